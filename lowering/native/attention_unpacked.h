// A few rows against some of their keys, which takes as long as reading keys and values takes: they
// are read where they lie.
#pragma once

#include <algorithm>

#include "attention_softmax.h"
#include "elements.h"
#include "microkernel.h"
#include "parallel.h"

namespace kd {
namespace attending {

// As many rows share what was read as leave the accumulators in registers.
constexpr int kRowsScored = 4;
constexpr int kRowsAdded = kRows > 6 ? 2 : 1;
// Rows take turns on so few keys that all but the first turn find them in the first cache.
constexpr int kKeysPerTurn = 32;

// scores[row][key] of kLanes keys, the last of which is repeated where fewer are there. Memory is
// read in its order: that is what makes hardware fetch ahead.
template <int rows, class Element>
static inline void score_vector(const Element* keys, int64_t stride, int present,
                                const float* queries, int64_t ld, int64_t d, float* scores) {
  const int64_t full = d / kLanes * kLanes;
  vec sums[rows][kLanes];
  for (int i = 0; i < kLanes; i++) {
    const Element* key = keys + std::min(i, present - 1) * stride;
    vec sum[rows] = {};
    for (int64_t p = 0; p < full; p += kLanes) {
      const vec x = load_floats(key + p);
      for (int r = 0; r < rows; r++) sum[r] = fma(x, load(queries + r * ld + p), sum[r]);
    }
    if (full < d) {
      const vec x = load_floats_first(key + full, static_cast<int>(d - full));
      for (int r = 0; r < rows; r++) sum[r] = fma(x, load(queries + r * ld + full), sum[r]);
    }
    for (int r = 0; r < rows; r++) sums[r][i] = sum[r];
  }
  for (int r = 0; r < rows; r++)
    store(scores + r * kScoreStride, reduce_lanes(sums[r], [](vec a, vec b) { return a + b; }));
}

template <class Element>
static inline void score_unpacked(const Element* keys, int64_t stride, int count,
                                  const float* queries, int rows, int64_t d, float* scores) {
  const int64_t ld = whole_vectors(d);
  for (int j = 0; j < count; j += kLanes)
    for (int r = 0; r < rows; r += kRowsScored) {
      const int left = rows - r;
      const auto score_rows = left == 1   ? score_vector<1, Element>
                              : left == 2 ? score_vector<2, Element>
                              : left == 3 ? score_vector<3, Element>
                                          : score_vector<kRowsScored, Element>;
      score_rows(keys + j * stride, stride, count - j, queries + r * ld, ld, d,
                 scores + r * kScoreStride + j);
    }
}

// `columns` of the last vector are there. These keys are added up by themselves before they join the
// sums, which keeps the rounding of one long chain of additions away.
template <int rows, int width, class Element>
static inline void add_columns(const Element* values, int64_t stride, int keys, int columns,
                               const float* weights, float* sums, int64_t ld) {
  vec at[rows][width] = {};
  for (int key = 0; key < keys; key++, values += stride)
#pragma GCC unroll 8
    for (int j = 0; j < width; j++) {
      const vec value = width > 1 || columns >= kLanes ? load_floats(values + j * kLanes)
                                                       : load_floats_first(values, columns);
#pragma GCC unroll 2
      for (int i = 0; i < rows; i++)
        at[i][j] = fma(broadcast(weights + i * kScoreStride + key), value, at[i][j]);
    }
#pragma GCC unroll 2
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < width; j++) {
      float* const to = sums + i * ld + j * kLanes;
      store(to, load(to) + at[i][j]);
    }
}

template <int rows, class Element>
static inline void add_rows(const Element* values, int64_t stride, int keys, int64_t dv,
                            const float* weights, float* sums, int64_t ld) {
  int64_t c = 0;
  for (; c + 8 * kLanes <= dv; c += 8 * kLanes)
    add_columns<rows, 8>(values + c, stride, keys, kLanes, weights, sums + c, ld);
  for (; c + 4 * kLanes <= dv; c += 4 * kLanes)
    add_columns<rows, 4>(values + c, stride, keys, kLanes, weights, sums + c, ld);
  for (; c + 2 * kLanes <= dv; c += 2 * kLanes)
    add_columns<rows, 2>(values + c, stride, keys, kLanes, weights, sums + c, ld);
  for (; c < dv; c += kLanes)
    add_columns<rows, 1>(values + c, stride, keys, static_cast<int>(dv - c), weights, sums + c, ld);
}

// sums = sums * rescale + weights times values.
template <class Element>
static inline void add_unpacked(const Element* values, int64_t stride, int count, int64_t dv,
                                const float* weights, int rows, const float* rescale, float* sums,
                                int64_t ld) {
  for (int r = 0; r < rows; r++)
    for (int64_t c = 0; c < ld; c += kLanes)
      store(sums + r * ld + c, load(sums + r * ld + c) * splat(rescale[r]));
  for (int key = 0; key < count; key += kKeysPerTurn)
    for (int r = 0; r < rows; r += kRowsAdded)
      (rows - r >= kRowsAdded ? add_rows<kRowsAdded, Element> : add_rows<1, Element>)(
          values + key * stride, stride, std::min(kKeysPerTurn, count - key), dv,
          weights + r * kScoreStride + key, sums + r * ld, ld);
}

// All rows of the group, which are no more than kMostUnpackedRows. Adds to what `result` has.
template <class Element>
static inline void attend_unpacked(const Group& group, Range keys, const Element* q,
                                   const Element* k, const Element* v, const Result& result) {
  const AttentionShape& shape = group.shape;
  const int rows = static_cast<int>(group.rows());
  const int64_t d = whole_vectors(shape.d), ld = whole_vectors(shape.dv);
  float* const scores = scratch<1>(kMostUnpackedRows * (kScoreStride + d));
  float* const queries = scores + kMostUnpackedRows * kScoreStride;
  const vec scale = splat(query_scale(shape));
  Row row = group.row(0);
  for (int r = 0; r < rows; r++, row = group.after(row)) {
    const Element* from = q + group.query_offset(row);
    for (int64_t p = 0; p < shape.d; p += kLanes) {
      const int64_t left = shape.d - p;
      store(queries + r * d + p,
            scale * (left >= kLanes ? load_floats(from + p)
                                    : load_floats_first(from + p, static_cast<int>(left))));
    }
  }
  const int64_t end = std::min(keys.end, group.visible_keys(group.row(0), rows));
  for (int64_t key = keys.begin; key < end; key += kBlockKeys) {
    const int count = static_cast<int>(std::min<int64_t>(kBlockKeys, end - key));
    score_unpacked(k + group.key_offset(key), shape.k_l, count, queries, rows, shape.d, scores);
    float rescale[kRowsInLanes];
    weigh(InPlace(), group, group.row(0), rows, key, count, scores, result.softmax, rescale);
    add_unpacked(v + group.value_offset(key), shape.v_l, count, shape.dv, scores, rows, rescale,
                 result.sums, ld);
  }
}

}  // namespace attending
}  // namespace kd
