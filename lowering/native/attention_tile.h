// The two products of attention on tiles that stay in registers, and the packing they read.
#pragma once

#include <utility>

#include "attention_softmax.h"
#include "elements.h"
#include "microkernel.h"
#include "transpose.h"

namespace kd {
namespace attending {

// rows x (width * kLanes) sums over p of left[row * row_step + p * step] * right[vector][p], whose
// vectors are `apart` floats apart.
template <int rows, int width, int row_step, int step>
struct Products {
  vec at[rows][width];

  __attribute__((always_inline)) Products(int64_t size, const float* left, const float* right,
                                          int64_t apart) {
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
      for (int j = 0; j < width; j++) at[i][j] = vec{};
    for (int64_t p = 0; p < size; p++) {
      vec column[width];
#pragma GCC unroll 2
      for (int j = 0; j < width; j++) {
        column[j] = load(right + j * apart + p * kLanes);
        if (rows > 1) hold_in_register(column[j]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < rows; i++) {
        const vec factor = broadcast(left + i * row_step + p * step);
#pragma GCC unroll 2
        for (int j = 0; j < width; j++) at[i][j] = fma(factor, column[j], at[i][j]);
      }
    }
  }
};

template <int rows, int width>
void score_tile(int64_t d, const float* queries, const float* keys, float* scores) {
  const Products<rows, width, 1, kRows> products(d, queries, keys, d * kLanes);
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < width; j++)
      store(scores + i * kScoreStride + j * kLanes, products.at[i][j]);
}

template <int rows, int width>
void add_value_tile(int64_t keys, const float* weights, const float* values, int64_t apart,
                    const float* rescale, float* sums, int64_t ld) {
  const Products<rows, width, kScoreStride, 1> products(keys, weights, values, apart);
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < width; j++) {
      float* sum = sums + i * ld + j * kLanes;
      store(sum, fma(load(sum), broadcast(rescale + i), products.at[i][j]));
    }
}

using ScoreTile = void (*)(int64_t, const float*, const float*, float*);
using ValueTile = void (*)(int64_t, const float*, const float*, int64_t, const float*, float*,
                           int64_t);

template <int width, int... rows_less_one>
static inline ScoreTile score_tile_of(int rows, std::integer_sequence<int, rows_less_one...>) {
  static constexpr ScoreTile tiles[] = {score_tile<rows_less_one + 1, width>...};
  return tiles[rows - 1];
}

template <int width, int... rows_less_one>
static inline ValueTile value_tile_of(int rows, std::integer_sequence<int, rows_less_one...>) {
  static constexpr ValueTile tiles[] = {add_value_tile<rows_less_one + 1, width>...};
  return tiles[rows - 1];
}

// All scores of a tile of rows for `keys` packed keys, rounded up to whole vectors.
static inline void score(int rows, int64_t d, int keys, const float* queries, const float* packed,
                         float* scores) {
  const std::make_integer_sequence<int, kRows> heights;
  const ScoreTile wide = score_tile_of<2>(rows, heights), narrow = score_tile_of<1>(rows, heights);
  int j = 0;
  for (; j + kLanes < keys; j += 2 * kLanes) wide(d, queries, packed + j * d, scores + j);
  if (j < keys) narrow(d, queries, packed + j * d, scores + j);
}

// sums = sums * rescale + weights times packed values, of which `keys` out of `present` count.
static inline void add_values(int rows, int keys, int64_t present, const float* weights,
                              const float* packed, const float* rescale, float* sums, int64_t ld) {
  const std::make_integer_sequence<int, kRows> heights;
  const ValueTile wide = value_tile_of<2>(rows, heights), narrow = value_tile_of<1>(rows, heights);
  const int64_t apart = present * kLanes;
  int64_t c = 0;
  for (; c + kLanes < ld; c += 2 * kLanes)
    wide(keys, weights, packed + c * present, apart, rescale, sums + c, ld);
  if (c < ld) narrow(keys, weights, packed + c * present, apart, rescale, sums + c, ld);
}

// Up to kLanes rows as columns: to[p * ld + i] = change(from[i][p]) for p < d. Whole vectors are
// written, in the order of p, with zeros in the place of absent rows.
template <class Element, class Change>
static inline void pack_columns(float* to, int64_t ld, const Element* const* from, int rows,
                                int64_t d, const Change& change) {
  for (int64_t p = 0; p < d; p += kLanes) {
    const int count = d - p < kLanes ? static_cast<int>(d - p) : kLanes;
    vec tile[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) {
      if (i >= rows)
        tile[i] = vec{};
      else if (count == kLanes)
        tile[i] = change(load_floats(from[i] + p));
      else
        tile[i] = change(load_floats_first(from[i] + p, count));
    }
    transpose(tile);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
      if (i < count) store(to + (p + i) * ld, tile[i]);
  }
}

// Asks for a row that is packed later: memory is to be busy while this one is packed.
template <class Element>
static inline void fetch_row(const Element* row, int64_t size) {
  constexpr int64_t line = 64 / sizeof(Element);
  for (int64_t i = 0; i < size; i += line) __builtin_prefetch(row + i, 0, 2);
}

// Rows of keys or of values as they lie.
template <class Element>
struct Rows {
  const Element* data;
  int64_t stride, size;
  const Element* row(int64_t index) const { return data + index * stride; }
};

// [vector][d][kLanes]
template <class Element>
static inline void pack_keys(float* to, Rows<Element> keys, int count, Rows<Element> later) {
  for (int j = 0; j < count; j += kLanes) {
    const Element* rows[kLanes];
    const int present = count - j < kLanes ? count - j : kLanes;
    for (int i = 0; i < present; i++) {
      rows[i] = keys.row(j + i);
      fetch_row(later.row(j + i), later.size);
    }
    pack_columns(to + j * keys.size, kLanes, rows, present, keys.size, [](vec v) { return v; });
  }
}

// [vector][key][kLanes]
template <class Element>
static inline void pack_values(float* to, Rows<Element> values, int count, Rows<Element> later) {
  for (int j = 0; j < count; j++) {
    fetch_row(later.row(j), later.size);
    const Element* from = values.row(j);
    float* place = to + j * kLanes;
    int64_t c = 0;
    for (; c + kLanes <= values.size; c += kLanes, place += count * kLanes)
      store(place, load_floats(from + c));
    if (c < values.size)
      store(place, load_floats_first(from + c, static_cast<int>(values.size - c)));
  }
}

}  // namespace attending
}  // namespace kd
