// How attention is divided among threads: by rows where there are many, else by keys.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention_in_tiles.h"
#include "attention_packed.h"
#include "attention_unpacked.h"

namespace kd {
namespace attending {

constexpr int64_t kItemFloats = 65536;  // queries and sums of an item: they stay in the cache
constexpr int64_t kFewestItemRows = 48;  // with fewer, packing would take longer than computing
constexpr int64_t kItemsByKeys = 128;    // enough for any machine: no result depends on threads

static inline int threads_for(const AttentionShape& shape, int threads) {
  const double pairs = static_cast<double>(shape.batch) * shape.heads * shape.lq * shape.lk;
  const double read = static_cast<double>(shape.batch) * shape.kv_heads * shape.lk;
  const double width = static_cast<double>(shape.d + shape.dv);
  return useful_threads(threads, std::max(2 * pairs * width / 1e6, read * width / 32768), 1.0);
}

// All rows of a group that are few are cheaper to do without packing.
template <class Element>
static inline void attend(const Group& group, Range rows, Range keys, const Element* q,
                          const Element* k, const Element* v, const Result& result) {
  result.start(rows.size(), whole_vectors(group.shape.dv));
  if (group.rows() <= kMostUnpackedRows) return attend_unpacked(group, keys, q, k, v, result);
#if defined(KD_AMX)
  if constexpr (!std::is_same_v<Element, float>)
    if (amx::multiplies<Element>()) return attend_in_tiles(group, rows, keys, q, k, v, result);
#endif
  attend_packed(group, rows, keys, q, k, v, result);
}

template <class Element>
static inline void write_row(Element* to, const float* sums, const float* softmax_sum, int64_t dv) {
  const vec inverse = splat(inverse_sum(softmax_sum));
  int64_t c = 0;
  for (; c + kLanes <= dv; c += kLanes) store_floats(to + c, load(sums + c) * inverse);
  if (c < dv) store_floats_first(to + c, load(sums + c) * inverse, static_cast<int>(dv - c));
}

template <class Element>
static inline void attend_by_rows(const AttentionShape& shape, const Element* q, const Element* k,
                                  const Element* v, Element* o, int threads) {
  const int64_t groups = shape.batch * shape.kv_heads, ld = whole_vectors(shape.dv);
  const int64_t rows = shape.heads / shape.kv_heads * shape.lq;
  threads = threads_for(shape, threads);
  // Enough items that no thread waits long for the last one. No row's result depends on its item.
  const int64_t wanted = threads > 1 ? ceil_div(threads * 8, groups) : 1;
  const int64_t most = std::max(kFewestItemRows, kItemFloats / (shape.d + shape.dv + 1));
  const int64_t parts = std::max(ceil_div(rows, most),
                                 std::min(wanted, std::max<int64_t>(1, rows / kFewestItemRows)));
  for_each_item(groups * parts, threads, [&](int64_t item) {
    // With a causal mask the last rows take longest: they come first.
    const int64_t index = item % groups;
    const Range range = part_of(rows, parts - 1 - item / groups, parts);
    const Group group{shape, index / shape.kv_heads, index % shape.kv_heads};
    const Result result(scratch<2>(Result::floats(range.size(), ld)), range.size(), ld);
    attend(group, range, Range{0, shape.lk}, q, k, v, result);
    Row row = group.row(range.begin);
    for (int64_t r = 0; r < range.size(); r++, row = group.after(row))
      write_row(o + group.output_offset(row), result.sums + r * ld,
                result.softmax.sum + r * kLanes, shape.dv);
  });
}

// Adds up what the parts of the keys gave, in their order, and writes the rows.
template <class Element>
static inline void merge(const Group& group, float* results, int64_t parts, Element* o) {
  const int64_t rows = group.rows(), ld = whole_vectors(group.shape.dv);
  const int64_t step = Result::floats(rows, ld);
  const float unit = group.shape.mask ? kLog2E : 1.0f;
  const Result total(results, rows, ld);
  Row row = group.row(0);
  for (int64_t r = 0; r < rows; r++, row = group.after(row)) {
    float greatest = -INFINITY;
    for (int64_t p = 0; p < parts; p++)
      greatest = std::max(greatest, Result(results + p * step, rows, ld).softmax.maximum[r]);
    const float reference = greatest == -INFINITY ? 0.0f : greatest;
    float* sums = total.sums + r * ld;
    float* weights = total.softmax.sum + r * kLanes;
    for (int64_t p = 0; p < parts; p++) {
      const Result part(results + p * step, rows, ld);
      const vec rescale =
          exp2_of_nonpositive(splat((part.softmax.maximum[r] - reference) * unit));
      const float* part_sums = part.sums + r * ld;
      for (int64_t c = 0; c < ld; c += kLanes)
        store(sums + c, p == 0 ? load(part_sums + c) * rescale
                               : fma(load(part_sums + c), rescale, load(sums + c)));
      const vec weight = load(part.softmax.sum + r * kLanes);
      store(weights, p == 0 ? weight * rescale : fma(weight, rescale, load(weights)));
    }
    write_row(o + group.output_offset(row), sums, weights, group.shape.dv);
  }
}

template <class Element>
static inline void attend_by_keys(const AttentionShape& shape, const Element* q, const Element* k,
                                  const Element* v, Element* o, int64_t parts, int threads) {
  const int64_t groups = shape.batch * shape.kv_heads, blocks = ceil_div(shape.lk, kBlockKeys);
  const int64_t rows = shape.heads / shape.kv_heads * shape.lq, ld = whole_vectors(shape.dv);
  threads = threads_for(shape, threads);
  const int64_t step = Result::floats(rows, ld);
  float* const results = scratch<3>(groups * parts * step);
  std::vector<std::atomic<int64_t>> unfinished(static_cast<size_t>(groups));
  for (auto& count : unfinished) count = parts;
  for_each_item(groups * parts, threads, [&](int64_t item) {
    const int64_t index = item / parts, part = item % parts;
    const Group group{shape, index / shape.kv_heads, index % shape.kv_heads};
    const Range range = part_of(blocks, part, parts);
    const Range keys{range.begin * kBlockKeys, std::min(range.end * kBlockKeys, shape.lk)};
    float* const of_group = results + index * parts * step;
    attend(group, Range{0, rows}, keys, q, k, v, Result(of_group + part * step, rows, ld));
    if (--unfinished[static_cast<size_t>(index)] == 0) merge(group, of_group, parts, o);
  });
}

// How many parts the keys are split into.
static inline int64_t parts_of_keys(const AttentionShape& shape) {
  const int64_t groups = shape.batch * shape.kv_heads;
  if (shape.heads / shape.kv_heads * shape.lq > kFewestItemRows) return 1;
  return std::min(ceil_div(shape.lk, kBlockKeys), ceil_div(kItemsByKeys, groups));
}

}  // namespace attending
}  // namespace kd
