// Attention of many queries: a work item is some rows of a group, which go through the keys block
// by block. Each block is packed by the item that reads it and is still in its cache then.
#pragma once

#include <algorithm>
#include <atomic>

#include "attention_tile.h"
#include "parallel.h"

namespace kd {
namespace attending {

constexpr int64_t kItemFloats = 65536;  // queries and sums of an item: they stay in the cache
constexpr int64_t kFewestItemRows = 48;  // with fewer, packing would take longer than computing

// [d][kRows]. Where that is no whole number of vectors, what a column writes beyond its end is
// overwritten by the next one, or is slack.
template <class Element>
static inline void pack_queries(float* to, const Group& group, const Element* q, Row row,
                                int rows) {
  static_assert(kRows < kLanes || kRows % kLanes == 0, "columns would overwrite earlier ones");
  const vec scale = splat(query_scale(group.shape));
  for (int r = 0; r < rows; r += kLanes) {
    const int present = std::min(rows - r, kLanes);
    const Element* from[kLanes];
    for (int i = 0; i < present; i++, row = group.after(row)) from[i] = q + group.query_offset(row);
    pack_columns(to + r, kRows, from, present, group.shape.d, 0, [&](vec v) { return v * scale; });
  }
}

template <class Element>
static inline void write_row(Element* to, const float* sums, float inverse, int64_t dv) {
  int64_t c = 0;
  for (; c + kLanes <= dv; c += kLanes) store_floats(to + c, load(sums + c) * splat(inverse));
  if (c < dv)
    store_floats_first(to + c, load(sums + c) * splat(inverse), static_cast<int>(dv - c));
}

struct PrefillMemory {
  float *queries, *keys, *values, *scores, *sums, *softmax;

  PrefillMemory(const AttentionShape& shape, int64_t rows) {
    const int64_t tiles = ceil_div(rows, kRows) + 1, dv = whole_vectors(shape.dv);
    const int64_t sizes[] = {tiles * kRows * shape.d, kBlockKeys * shape.d, kBlockKeys * dv,
                             kRows * kScoreStride,    rows * dv,            Softmax::floats(rows)};
    float** const parts[] = {&queries, &keys, &values, &scores, &sums, &softmax};
    int64_t total = 0;
    for (int64_t size : sizes) total += ceil_div(size, 16) * 16;
    float* memory = scratch<1>(total);
    for (int i = 0; i < 6; memory += ceil_div(sizes[i], 16) * 16, i++) *parts[i] = memory;
  }
};

template <class Element>
static inline void attend_rows(const Group& group, Range range, const Element* q, const Element* k,
                               const Element* v, Element* o) {
  const AttentionShape& shape = group.shape;
  const int64_t rows = range.size(), tiles = ceil_div(rows, kRows), ld = whole_vectors(shape.dv);
  PrefillMemory memory(shape, rows);
  Softmax softmax(memory.softmax, rows);
  softmax.start(rows);
  std::fill(memory.sums, memory.sums + rows * ld, 0.0f);
  for (int64_t t = 0; t < tiles; t++) {
    const Range tile = part_of(rows, t, tiles);
    pack_queries(memory.queries + t * kRows * shape.d, group, q,
                 group.row(range.begin + tile.begin), static_cast<int>(tile.size()));
  }
  const int64_t keys = group.visible_keys(group.row(range.begin), rows);
  for (int64_t key = 0; key < keys; key += kBlockKeys) {
    const int count = static_cast<int>(std::min<int64_t>(kBlockKeys, keys - key));
    pack_keys(memory.keys, k + group.key_offset(key), shape.k_l, count, shape.d);
    pack_values(memory.values, v + group.value_offset(key), shape.v_l, count, shape.dv);
    for (int64_t t = 0; t < tiles; t++) {
      const Range tile = part_of(rows, t, tiles);
      const int height = static_cast<int>(tile.size());
      const Row first = group.row(range.begin + tile.begin);
      const int64_t seen = group.visible_keys(first, height) - key;
      if (seen <= 0) continue;
      const int width = static_cast<int>(std::min<int64_t>(count, seen));
      score(height, shape.d, width, memory.queries + t * kRows * shape.d, memory.keys,
            memory.scores);
      float rescale[kRowsInLanes];
      weigh(group, first, height, key, width, memory.scores, softmax.from(tile.begin), rescale);
      add_values(height, width, count, memory.scores, memory.values, rescale,
                 memory.sums + tile.begin * ld, ld);
    }
  }
  Row row = group.row(range.begin);
  for (int64_t r = 0; r < rows; r++, row = group.after(row))
    write_row(o + group.output_offset(row), memory.sums + r * ld,
              inverse_sum(softmax.sum + r * kLanes), shape.dv);
}

template <class Element>
static inline void prefill(const AttentionShape& shape, const Element* q, const Element* k,
                           const Element* v, Element* o, int threads) {
  const int64_t groups = shape.batch * shape.kv_heads;
  const int64_t rows = shape.heads / shape.kv_heads * shape.lq;
  const double work = 2.0 * groups * rows * shape.lk * (shape.d + shape.dv);
  threads = useful_threads(threads, work, 1e6);
  // Enough items that no thread waits long for the last one. No row's result depends on its item.
  const int64_t wanted = threads > 1 ? ceil_div(threads * 8, groups) : 1;
  const int64_t most = std::max(kFewestItemRows, kItemFloats / (shape.d + shape.dv + 1));
  const int64_t parts = std::max(ceil_div(rows, most),
                                 std::min(wanted, std::max<int64_t>(1, rows / kFewestItemRows)));
  std::atomic<int64_t> next{0};
  in_parallel(threads, [&](int, int) {
    for (int64_t item; (item = next++) < groups * parts;) {
      // With a causal mask the last rows take longest: they come first.
      const int64_t part = parts - 1 - item / groups, index = item % groups;
      attend_rows(Group{shape, index / shape.kv_heads, index % shape.kv_heads},
                  part_of(rows, part, parts), q, k, v, o);
    }
  });
}

}  // namespace attending
}  // namespace kd
