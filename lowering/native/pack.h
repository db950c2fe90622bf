// The right operand of a product in the order in which the tiles read it: panels of kLanes columns,
// in each of them row after row. The last panel is filled up with zeros.
#pragma once

#include "parallel.h"
#include "partial.h"
#include "transpose.h"

namespace kd {

static inline int64_t panels_of(int64_t n) { return ceil_div(n, kLanes); }
static inline int64_t packed_size(int64_t k, int64_t n) { return panels_of(n) * kLanes * k; }

// One panel of `columns` columns.
static inline void pack_panel(float* to, const float* b, int64_t k, int columns, int64_t stride_k,
                              int64_t stride_n) {
  int64_t done = 0;
  if (stride_n == 1) {
    for (; done < k; done++) {
      const float* from = b + done * stride_k;
      store(to + done * kLanes, columns == kLanes ? load(from) : load_first(from, columns));
    }
  } else if (stride_k == 1) {
    for (; done + kLanes <= k; done += kLanes) {
      vec square[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; j++)
        square[j] = j < columns ? load(b + done + j * stride_n) : vec{};
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) store(to + (done + i) * kLanes, square[i]);
    }
  }
  for (; done < k; done++)
    for (int j = 0; j < kLanes; j++)
      to[done * kLanes + j] = j < columns ? b[done * stride_k + j * stride_n] : 0.0f;
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
