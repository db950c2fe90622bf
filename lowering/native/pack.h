// The right operand of a product in the order in which the tiles read it: panels of kLanes columns,
// in each of them row after row. The last panel is filled up with zeros.
#pragma once

#include "parallel.h"
#include "partial.h"

namespace kd {

static inline int64_t panels_of(int64_t n) { return ceil_div(n, kLanes); }
static inline int64_t packed_size(int64_t k, int64_t n) { return panels_of(n) * kLanes * k; }

// One panel of `columns` columns.
static inline void pack_panel(float* to, const float* b, int64_t k, int columns, int64_t stride_k,
                              int64_t stride_n) {
  if (stride_n == 1) {
    for (int64_t p = 0; p < k; p++) {
      const float* from = b + p * stride_k;
      store(to + p * kLanes, columns == kLanes ? load(from) : load_first(from, columns));
    }
    return;
  }
  constexpr int64_t block = 16;  // a cache line of each column at a time
  for (int64_t p0 = 0; p0 < k; p0 += block) {
    const int64_t p1 = p0 + block < k ? p0 + block : k;
    for (int j = 0; j < kLanes; j++)
      for (int64_t p = p0; p < p1; p++)
        to[p * kLanes + j] = j < columns ? b[p * stride_k + j * stride_n] : 0.0f;
  }
}

static inline int columns_of_panel(int64_t n, int64_t panel) {
  const int64_t left = n - panel * kLanes;
  return static_cast<int>(left < kLanes ? left : kLanes);
}

static inline void pack_b(float* packed, const float* b, int64_t k, int64_t n, int64_t stride_k,
                          int64_t stride_n, int threads) {
  in_parallel(threads, [&](int thread, int team) {
    const Range mine = part_of(panels_of(n), thread, team);
    for (int64_t panel = mine.begin; panel < mine.end; panel++)
      pack_panel(packed + panel * kLanes * k, b + panel * kLanes * stride_n, k,
                 columns_of_panel(n, panel), stride_k, stride_n);
  });
}

}  // namespace kd
