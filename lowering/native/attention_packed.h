// Some rows of a group against some of its keys, block by block. Each block of keys and values is
// packed here, and is still in the cache when it is read.
#pragma once

#include <algorithm>

#include "attention_tile.h"
#include "parallel.h"

namespace kd {
namespace attending {

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
    pack_columns(to + r, kRows, from, present, group.shape.d, [&](vec v) { return v * scale; });
  }
}

// Adds to what `result` has.
template <class Element>
static inline void attend_packed(const Group& group, Range rows, Range keys, const Element* q,
                                 const Element* k, const Element* v, const Result& result) {
  const AttentionShape& shape = group.shape;
  const int64_t tiles = ceil_div(rows.size(), kRows), ld = whole_vectors(shape.dv);
  const int64_t tile_queries = kRows * shape.d, slack = kLanes;
  const int64_t key_floats = kBlockKeys * shape.d, value_floats = kBlockKeys * ld;
  float* const scores =
      scratch<1>(kRows * kScoreStride + key_floats + value_floats + tiles * tile_queries + slack);
  float* const packed_keys = scores + kRows * kScoreStride;
  float* const packed_values = packed_keys + key_floats;
  float* const queries = packed_values + value_floats;
  for (int64_t t = 0; t < tiles; t++) {
    const Range tile = part_of(rows.size(), t, tiles);
    pack_queries(queries + t * tile_queries, group, q, group.row(rows.begin + tile.begin),
                 static_cast<int>(tile.size()));
  }
  const int64_t end = std::min(keys.end, group.visible_keys(group.row(rows.begin), rows.size()));
  for (int64_t key = keys.begin; key < end; key += kBlockKeys) {
    const int count = static_cast<int>(std::min<int64_t>(kBlockKeys, end - key));
    const Rows<Element> block_keys{k + group.key_offset(key), shape.k_l, shape.d};
    const Rows<Element> block_values{v + group.value_offset(key), shape.v_l, shape.dv};
    const int64_t next_size = key + count < end ? shape.d : 0;
    const Rows<Element> next_keys{block_keys.row(count), shape.k_l, next_size};
    pack_keys(packed_keys, block_keys, count, block_values);
    pack_values(packed_values, block_values, count, next_keys);
    for (int64_t t = 0; t < tiles; t++) {
      const Range tile = part_of(rows.size(), t, tiles);
      const int height = static_cast<int>(tile.size());
      const Row first = group.row(rows.begin + tile.begin);
      const int64_t seen = group.visible_keys(first, height) - key;
      if (seen <= 0) continue;
      const int width = static_cast<int>(std::min<int64_t>(count, seen));
      score(height, shape.d, width, queries + t * tile_queries, packed_keys, scores);
      float rescale[kRowsInLanes];
      weigh(InPlace(), group, first, height, key, width, scores, result.softmax.from(tile.begin),
            rescale);
      add_values(height, width, count, scores, packed_values, rescale,
                 result.sums + tile.begin * ld, ld);
    }
  }
}

}  // namespace attending
}  // namespace kd
