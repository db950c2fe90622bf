// Both products of attention in half precision, in tiles: scores and sums are floats, and only the weights
// are rounded between the two. Each block of keys and values is laid out here, as pairs, and is still
// in the cache when it is read.
#pragma once

#include "half_pairs.h"

#if defined(KD_AMX)

#include <algorithm>

#include "attention_softmax.h"
#include "attention_tile.h"
#include "parallel.h"

namespace kd {
namespace attending {

// What one step of the tiles reads of a row: so many numbers, half as many pairs.
constexpr int64_t kStepNumbers = 2 * amx::kTilePairs;
// Keys of a block: with their values, scores and weights they are what the first cache holds.
constexpr int kTiledKeys = 128;
constexpr int64_t kWeightsStride = kTiledKeys + kStepNumbers;

static inline int64_t steps_of(int64_t numbers) { return ceil_div(numbers, kStepNumbers); }

// Up to 32 numbers, with zeros behind them.
static inline vec load_pairs(const void* from, int64_t count) {
  const uint32_t there = count >= kStepNumbers ? ~0u : (1u << count) - 1;
  return (vec)_mm512_maskz_loadu_epi16(there, from);
}

// --- what the tiles read ---------------------------------------------------------------------------

// [row][step], as they lie, with zeros behind each.
template <class Number>
void pair_queries(float* to, const Group& group, const Number* q, Row row, int rows) {
  const int64_t d = group.shape.d, steps = steps_of(d);
  for (int r = 0; r < rows; r++, row = group.after(row)) {
    const Number* const from = q + group.query_offset(row);
    for (int64_t s = 0; s < steps; s++, to += kLanes)
      store(to, load_pairs(from + s * kStepNumbers, d - s * kStepNumbers));
  }
}

// [16 keys][pair of neighbours along d][key]
template <class Number>
void pair_keys(float* to, Rows<Number> keys, int count, Rows<Number> later) {
  const int64_t steps = steps_of(keys.size);
  for (int j = 0; j < count; j += kLanes) {
    const int present = std::min(count - j, kLanes);
    for (int i = 0; i < present; i++) fetch_row(later.row(j + i), later.size);
    for (int64_t s = 0; s < steps; s++, to += kLanes * kLanes) {
      vec square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++)
        square[i] = i < present ? load_pairs(keys.row(j + i) + s * kStepNumbers,
                                             keys.size - s * kStepNumbers)
                                : vec{};
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) store(to + i * kLanes, square[i]);
    }
  }
}

// [16 columns][pair of neighbouring keys][column]
template <class Number>
void pair_values(float* to, Rows<Number> values, int count, Rows<Number> later) {
  alignas(64) uint16_t places[2 * kStepNumbers];
  for (uint16_t i = 0; i < 2 * kStepNumbers; i++)
    places[i] = static_cast<uint16_t>(i / 2 + (i % 2) * kStepNumbers);
  const __m512i low = _mm512_load_si512(places), high = _mm512_load_si512(places + kStepNumbers);
  const int64_t pairs = steps_of(count) * amx::kTilePairs;
  for (int64_t p = 0; p < pairs; p++) {
    const int64_t first = 2 * p, second = first + 1;
    for (const int64_t key : {first, second})
      if (key < count) fetch_row(later.row(key), later.size);
    float* place = to + p * kLanes;
    for (int64_t c = 0; c < values.size; c += kStepNumbers) {
      const int64_t left = values.size - c;
      const auto numbers = [&](int64_t key) {
        return key < count ? (__m512i)load_pairs(values.row(key) + c, left) : __m512i{};
      };
      const __m512i a = numbers(first), b = numbers(second);
      store(place, (vec)_mm512_permutex2var_epi16(a, low, b));
      place += pairs * kLanes;
      if (left <= kLanes) continue;
      store(place, (vec)_mm512_permutex2var_epi16(a, high, b));
      place += pairs * kLanes;
    }
  }
}

// --- the two products ------------------------------------------------------------------------------

// The first `count` of four tiles beside each other: to (+)= left @ right. Strides: of floats.
template <class Number, int count, bool add>
void multiply_tiles(int64_t steps, const float* left, int64_t ld_left, const float* right,
                    int64_t apart, float* to, int64_t ld) {
  constexpr int64_t kPanelRow = kLanes * 4, kStep = amx::kTilePairs;
  const int64_t row = ld * 4;
  amx::memory_is_written();
  if constexpr (add) {
    _tile_loadd(0, to, row);
    if constexpr (count > 1) _tile_loadd(1, to + kLanes, row);
    if constexpr (count > 2) _tile_loadd(2, to + 2 * kLanes, row);
    if constexpr (count > 3) _tile_loadd(3, to + 3 * kLanes, row);
  } else {
    _tile_zero(0);
    if constexpr (count > 1) _tile_zero(1);
    if constexpr (count > 2) _tile_zero(2);
    if constexpr (count > 3) _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; step++, right += kStep * kLanes) {
    _tile_loadd(4, left + step * kStep, ld_left * 4);
    _tile_loadd(6, right, kPanelRow);
    amx::add_product<Number, 0, 4, 6>();
    if constexpr (count > 1) {
      _tile_loadd(7, right + apart, kPanelRow);
      amx::add_product<Number, 1, 4, 7>();
    }
    if constexpr (count > 2) {
      _tile_loadd(6, right + 2 * apart, kPanelRow);
      amx::add_product<Number, 2, 4, 6>();
    }
    if constexpr (count > 3) {
      _tile_loadd(7, right + 3 * apart, kPanelRow);
      amx::add_product<Number, 3, 4, 7>();
    }
  }
  _tile_stored(0, to, row);
  if constexpr (count > 1) _tile_stored(1, to + kLanes, row);
  if constexpr (count > 2) _tile_stored(2, to + 2 * kLanes, row);
  if constexpr (count > 3) _tile_stored(3, to + 3 * kLanes, row);
}

// Of so many panels, four at a time.
template <class Number, bool add>
static inline void multiply_panels(int64_t panels, int64_t steps, const float* left,
                                   int64_t ld_left, const float* right, int64_t apart, float* to,
                                   int64_t ld) {
  for (int64_t p = 0; p < panels; p += 4) {
    const int64_t count = panels - p;
    const auto multiply = count == 1   ? multiply_tiles<Number, 1, add>
                          : count == 2 ? multiply_tiles<Number, 2, add>
                          : count == 3 ? multiply_tiles<Number, 3, add>
                                       : multiply_tiles<Number, 4, add>;
    multiply(steps, left, ld_left, right + p * apart, apart, to + p * kLanes, ld);
  }
}

// Weights as the second product reads them. Scores get their scale here: queries that had it would
// have been rounded once more.
template <class Number>
struct RoundedWeights {
  static constexpr bool scales = true;
  float scale;
  Number* weights;

  vec scaled(vec score) const { return score * splat(scale); }
  void keep(int row, int key, float*, vec weight) const {
    *reinterpret_cast<hvec*>(weights + row * kWeightsStride + key) = rounded(weight, Number());
  }
};

// Where an item keeps what it made of its operands.
struct TiledOperands {
  float *scores, *weights, *keys, *values, *queries;

  TiledOperands(int64_t d_steps, int64_t ld, int64_t tiles) {
    constexpr int64_t kScores = amx::kTileRows * kScoreStride;
    constexpr int64_t kWeights = amx::kTileRows * kWeightsStride / 2;
    const int64_t a_step = kTiledKeys * amx::kTilePairs, sums = kTiledKeys / 2 * ld;
    scores = scratch<1>(kScores + kWeights + d_steps * a_step + sums +
                        tiles * amx::kTileRows * d_steps * kLanes);
    weights = scores + kScores;
    keys = weights + kWeights;
    values = keys + d_steps * a_step;
    queries = values + sums;
  }
};

// Adds to what `result` has.
template <class Number>
void attend_in_tiles(const Group& group, Range rows, Range keys, const Number* q, const Number* k,
                     const Number* v, const Result& result) {
  static_assert(amx::kTileRows <= kRowsInLanes, "weigh() takes the rows of one tile");
  const AttentionShape& shape = group.shape;
  const int64_t tiles = ceil_div(rows.size(), amx::kTileRows), ld = whole_vectors(shape.dv);
  const int64_t d_steps = steps_of(shape.d), query_row = d_steps * kLanes;
  const TiledOperands own(d_steps, ld, tiles);
  auto* const weights = reinterpret_cast<Number*>(own.weights);
  const RoundedWeights<Number> form{query_scale(shape), weights};
  for (int64_t t = 0; t < tiles; t++) {
    const Range tile = part_of(rows.size(), t, tiles);
    pair_queries(own.queries + tile.begin * query_row, group, q,
                 group.row(rows.begin + tile.begin), static_cast<int>(tile.size()));
  }
  amx::Registers registers;
  const int64_t end = std::min(keys.end, group.visible_keys(group.row(rows.begin), rows.size()));
  for (int64_t key = keys.begin; key < end; key += kTiledKeys) {
    const int count = static_cast<int>(std::min<int64_t>(kTiledKeys, end - key));
    const Rows<Number> block_keys{k + group.key_offset(key), shape.k_l, shape.d};
    const Rows<Number> block_values{v + group.value_offset(key), shape.v_l, shape.dv};
    const int64_t next_size = key + count < end ? shape.d : 0;
    pair_keys(own.keys, block_keys, count, block_values);
    pair_values(own.values, block_values, count,
                Rows<Number>{block_keys.row(count), shape.k_l, next_size});
    const int64_t apart = steps_of(count) * amx::kTilePairs * kLanes;
    for (int64_t t = 0; t < tiles; t++) {
      const Range tile = part_of(rows.size(), t, tiles);
      const int height = static_cast<int>(tile.size());
      const Row first = group.row(rows.begin + tile.begin);
      const int64_t seen = group.visible_keys(first, height) - key;
      if (seen <= 0) continue;
      const int width = static_cast<int>(std::min<int64_t>(count, seen));
      const int64_t steps = steps_of(width);
      registers.shape(height, 0);
      multiply_panels<Number, false>(ceil_div(width, kLanes), d_steps, own.queries + tile.begin * query_row,
                             query_row, own.keys, d_steps * amx::kTilePairs * kLanes, own.scores,
                             kScoreStride);
      float rescale[kRowsInLanes];
      weigh(form, group, first, height, key, width, own.scores, result.softmax.from(tile.begin),
            rescale);
      float* const sums = result.sums + tile.begin * ld;
      for (int r = 0; r < height; r++) {
        Number* const row = weights + r * kWeightsStride;
        for (int64_t j = whole_vectors(width); j < steps * kStepNumbers; j += kLanes)
          *reinterpret_cast<hvec*>(row + j) = hvec{};
        for (int64_t c = 0; c < ld; c += kLanes)
          store(sums + r * ld + c, load(sums + r * ld + c) * splat(rescale[r]));
      }
      multiply_panels<Number, true>(ld / kLanes, steps, own.weights, kWeightsStride / 2, own.values, apart,
                            sums, ld);
    }
  }
}

}  // namespace attending
}  // namespace kd

#endif
