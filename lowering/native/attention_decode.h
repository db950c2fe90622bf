// Attention of few queries, which takes as long as reading keys and values takes: they are read
// where they lie. Long rows of keys are split into parts of which each thread takes some.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention_prefill.h"

namespace kd {
namespace attending {

constexpr int64_t kMostDecodeRows = kRows < 8 ? kRows : 8;
constexpr int64_t kDecodeItems = 128;  // many enough for any machine; no result depends on it

// scores[row][key] of a block of keys; the keys up to a whole vector get some score as well.
template <class Element>
static inline void score_keys(const Element* keys, int64_t stride, int count, const float* queries,
                              int rows, int64_t d, float* scores) {
  const int64_t ld = whole_vectors(d), full = d / kLanes * kLanes;
  for (int j = 0; j < count; j += kLanes)
    for (int r = 0; r < rows; r++) {
      const float* query = queries + r * ld;
      vec sums[kLanes];
#pragma GCC unroll 4
      for (int first = 0; first < kLanes; first += 4) {
        const Element* at[4];
        for (int i = 0; i < 4; i++) at[i] = keys + std::min(j + first + i, count - 1) * stride;
        vec sum[4] = {};
        for (int64_t p = 0; p < full; p += kLanes) {
          const vec x = load(query + p);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) sum[i] = fma(load_floats(at[i] + p), x, sum[i]);
        }
        if (full < d) {
          const vec x = load(query + full);
          const int left = static_cast<int>(d - full);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++)
            sum[i] = fma(load_floats_first(at[i] + full, left), x, sum[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sums[first + i] = sum[i];
      }
      store(scores + r * kScoreStride + j,
            reduce_lanes(sums, [](vec a, vec b) { return a + b; }));
    }
}

// `count` columns of the last vector are there.
template <int rows, int width, class Element>
static inline void add_value_columns(const Element* values, int64_t stride, int keys, int count,
                                     const float* weights, const float* rescale, float* sums,
                                     int64_t ld) {
  vec at[rows][width] = {};
  for (int key = 0; key < keys; key++) {
    vec value[width];
#pragma GCC unroll 4
    for (int j = 0; j < width; j++)
      value[j] = width > 1 || count == kLanes
                     ? load_floats(values + key * stride + j * kLanes)
                     : load_floats_first(values + key * stride, count);
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
      const vec weight = broadcast(weights + i * kScoreStride + key);
#pragma GCC unroll 4
      for (int j = 0; j < width; j++) at[i][j] = fma(weight, value[j], at[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < width; j++) {
      float* sum = sums + i * ld + j * kLanes;
      store(sum, fma(load(sum), broadcast(rescale + i), at[i][j]));
    }
}

template <int rows, class Element>
static inline void add_value_rows(const Element* values, int64_t stride, int keys, int64_t dv,
                                  const float* weights, const float* rescale, float* sums,
                                  int64_t ld) {
  constexpr int widest = rows <= 2 || kRows > 6 ? 4 : 2;  // as many as the registers hold
  int64_t c = 0;
  for (; c + widest * kLanes <= dv; c += widest * kLanes)
    add_value_columns<rows, widest>(values + c, stride, keys, kLanes, weights, rescale, sums + c,
                                    ld);
  for (; c + 2 * kLanes <= dv; c += 2 * kLanes)
    add_value_columns<rows, 2>(values + c, stride, keys, kLanes, weights, rescale, sums + c, ld);
  for (; c < dv; c += kLanes)
    add_value_columns<rows, 1>(values + c, stride, keys,
                               static_cast<int>(std::min<int64_t>(kLanes, dv - c)), weights,
                               rescale, sums + c, ld);
}

template <class Element>
static inline void add_unpacked(const Element* values, int64_t stride, int keys, int64_t dv,
                                const float* weights, int rows, const float* rescale, float* sums,
                                int64_t ld) {
  for (int r = 0; r < rows; r += 4) {
    const auto add = rows - r == 1   ? add_value_rows<1, Element>
                     : rows - r == 2 ? add_value_rows<2, Element>
                     : rows - r == 3 ? add_value_rows<3, Element>
                                     : add_value_rows<4, Element>;
    add(values, stride, keys, dv, weights + r * kScoreStride, rescale + r, sums + r * ld, ld);
  }
}

// What one item finds out about its part of the keys.
struct Partial {
  float* sums;  // [row][ld]
  Softmax softmax;

  static int64_t floats(int64_t rows, int64_t ld) {
    return rows * ld + ceil_div(Softmax::floats(rows), 16) * 16;
  }
  Partial(float* memory, int64_t rows, int64_t ld)
      : sums(memory), softmax(memory + rows * ld, rows) {}
};

template <class Element>
static inline void attend_keys(const Group& group, Range keys, const Element* q, const Element* k,
                               const Element* v, const Partial& result) {
  const AttentionShape& shape = group.shape;
  const int rows = static_cast<int>(group.rows());
  const int64_t d = whole_vectors(shape.d), ld = whole_vectors(shape.dv);
  float* queries = scratch<2>(rows * d);
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
  result.softmax.start(rows);
  std::fill(result.sums, result.sums + rows * ld, 0.0f);
  alignas(64) float scores[kMostDecodeRows * kScoreStride];
  for (int64_t key = keys.begin; key < keys.end; key += kBlockKeys) {
    const int count = static_cast<int>(std::min<int64_t>(kBlockKeys, keys.end - key));
    score_keys(k + group.key_offset(key), shape.k_l, count, queries, rows, shape.d, scores);
    float rescale[kRowsInLanes];
    weigh(group, group.row(0), rows, key, count, scores, result.softmax, rescale);
    add_unpacked(v + group.value_offset(key), shape.v_l, count, shape.dv, scores, rows, rescale,
                 result.sums, ld);
  }
}

// Adds up what the parts of the keys gave, in their order, and writes the rows.
template <class Element>
static inline void merge(const Group& group, float* partials, int64_t parts, Element* o) {
  const int64_t rows = group.rows(), ld = whole_vectors(group.shape.dv);
  const int64_t step = Partial::floats(rows, ld);
  const float unit = group.shape.mask ? kLog2E : 1.0f;
  const Partial total(partials, rows, ld);
  Row row = group.row(0);
  for (int64_t r = 0; r < rows; r++, row = group.after(row)) {
    float greatest = -INFINITY;
    for (int64_t p = 0; p < parts; p++)
      greatest = std::max(greatest, Partial(partials + p * step, rows, ld).softmax.maximum[r]);
    const float reference = greatest == -INFINITY ? 0.0f : greatest;
    float* sums = total.sums + r * ld;
    float* weights = total.softmax.sum + r * kLanes;
    for (int64_t p = 0; p < parts; p++) {
      const Partial part(partials + p * step, rows, ld);
      const vec rescale =
          exp2_of_nonpositive(splat((part.softmax.maximum[r] - reference) * unit));
      const float* part_sums = part.sums + r * ld;
      for (int64_t c = 0; c < ld; c += kLanes)
        store(sums + c, p == 0 ? load(part_sums + c) * rescale
                               : fma(load(part_sums + c), rescale, load(sums + c)));
      const vec weight = load(part.softmax.sum + r * kLanes);
      store(weights, p == 0 ? weight * rescale : fma(weight, rescale, load(weights)));
    }
    write_row(o + group.output_offset(row), sums, inverse_sum(weights), group.shape.dv);
  }
}

template <class Element>
static inline void decode(const AttentionShape& shape, const Element* q, const Element* k,
                          const Element* v, Element* o, int threads) {
  const int64_t groups = shape.batch * shape.kv_heads;
  const int64_t rows = shape.heads / shape.kv_heads * shape.lq, ld = whole_vectors(shape.dv);
  const int64_t blocks = std::max<int64_t>(1, ceil_div(shape.lk, kBlockKeys));
  const int64_t parts = std::min(blocks, ceil_div(kDecodeItems, groups));
  const double read = static_cast<double>(groups) * shape.lk * (shape.d + shape.dv);
  threads = useful_threads(threads, read, 32768);
  const int64_t step = Partial::floats(rows, ld);
  float* partials = scratch<3>(groups * parts * step);
  std::vector<std::atomic<int64_t>> unfinished(static_cast<size_t>(groups));
  for (auto& count : unfinished) count = parts;
  std::atomic<int64_t> next{0};
  in_parallel(threads, [&](int, int) {
    for (int64_t item; (item = next++) < groups * parts;) {
      const int64_t index = item / parts, part = item % parts;
      const Group group{shape, index / shape.kv_heads, index % shape.kv_heads};
      const Range range = part_of(blocks, part, parts);
      const Range keys{range.begin * kBlockKeys, std::min(range.end * kBlockKeys, shape.lk)};
      float* of_group = partials + index * parts * step;
      attend_keys(group, keys, q, k, v, Partial(of_group + part * step, rows, ld));
      if (--unfinished[static_cast<size_t>(index)] == 0) merge(group, of_group, parts, o);
    }
  });
}

}  // namespace attending
}  // namespace kd
