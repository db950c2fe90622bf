// The two products of attention on tiles that stay in registers, and the packing they read.
#pragma once

#include <utility>

#include "attention_softmax.h"
#include "elements.h"
#include "lanes.h"
#include "microkernel.h"

namespace kd {
namespace attending {

constexpr int kPanel = 2 * kLanes;  // columns of a tile

// rows x (width * kLanes) sums over p of left[row * row_step + p * step] * right[p][vector].
template <int rows, int width, int row_step, int step>
struct Products {
  vec at[rows][width];

  __attribute__((always_inline)) Products(int64_t size, const float* left, const float* right) {
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
      for (int j = 0; j < width; j++) at[i][j] = vec{};
    for (int64_t p = 0; p < size; p++) {
      vec column[width];
#pragma GCC unroll 2
      for (int j = 0; j < width; j++) {
        column[j] = load(right + (p * width + j) * kLanes);
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

template <int rows>
void score_tile(int64_t d, const float* queries, const float* keys, float* scores) {
  const Products<rows, 2, 1, kRows> products(d, queries, keys);
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) store(scores + i * kScoreStride + j * kLanes, products.at[i][j]);
}

template <int rows, int width>
void add_value_tile(int64_t keys, const float* weights, const float* values, const float* rescale,
                    float* sums, int64_t ld) {
  const Products<rows, width, kScoreStride, 1> products(keys, weights, values);
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < width; j++) {
      float* sum = sums + i * ld + j * kLanes;
      store(sum, fma(load(sum), broadcast(rescale + i), products.at[i][j]));
    }
}

using ScoreTile = void (*)(int64_t, const float*, const float*, float*);
using ValueTile = void (*)(int64_t, const float*, const float*, const float*, float*, int64_t);

template <int... rows_less_one>
static inline ScoreTile score_tile_of(int rows, std::integer_sequence<int, rows_less_one...>) {
  static constexpr ScoreTile tiles[] = {score_tile<rows_less_one + 1>...};
  return tiles[rows - 1];
}

template <int width, int... rows_less_one>
static inline ValueTile value_tile_of(int rows, std::integer_sequence<int, rows_less_one...>) {
  static constexpr ValueTile tiles[] = {add_value_tile<rows_less_one + 1, width>...};
  return tiles[rows - 1];
}

static inline int64_t whole_vectors(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// kLanes rows as columns: to[p * ld + i] = from[i][p] for p < d. Absent rows become zeros.
template <class Element>
static inline void pack_columns(float* to, int64_t ld, const Element* const* from, int rows,
                                int64_t d) {
  for (int64_t p = 0; p < d; p += kLanes) {
    const int count = d - p < kLanes ? static_cast<int>(d - p) : kLanes;
    vec tile[kLanes];
    if (rows == kLanes && count == kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) tile[i] = load_floats(from[i] + p);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++)
        tile[i] = i < rows ? load_floats_first(from[i] + p, count) : vec{};
    }
    transpose(tile);
    if (count == kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) store(to + (p + i) * ld, tile[i]);
    } else {
      for (int i = 0; i < count; i++) store(to + (p + i) * ld, tile[i]);
    }
  }
}

// [panel][d][kPanel]
template <class Element>
static inline void pack_keys(float* to, const Element* keys, int64_t stride, int count, int64_t d) {
  for (int j = 0; j < count; j += kPanel)
    for (int half = 0; half < kPanel; half += kLanes) {
      const Element* rows[kLanes];
      const int left = count - j - half, present = left < 0 ? 0 : left < kLanes ? left : kLanes;
      for (int i = 0; i < present; i++) rows[i] = keys + (j + half + i) * stride;
      pack_columns(to + j * d + half, kPanel, rows, present, d);
    }
}

// [panel][key][kPanel]; the last panel is one vector wide if that is enough.
template <class Element>
static inline void pack_values(float* to, const Element* values, int64_t stride, int count,
                               int64_t dv) {
  for (int64_t c = 0; c < dv; c += kPanel) {
    const int64_t columns = dv - c < kPanel ? dv - c : kPanel, padded = whole_vectors(columns);
    for (int j = 0; j < count; j++, to += padded) {
      const Element* from = values + j * stride + c;
      int64_t i = 0;
      for (; i + kLanes <= columns; i += kLanes) store(to + i, load_floats(from + i));
      if (i < columns) store(to + i, load_floats_first(from + i, static_cast<int>(columns - i)));
    }
  }
}

}  // namespace attending
}  // namespace kd
