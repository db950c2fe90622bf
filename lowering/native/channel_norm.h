// A factor and a shift for each channel of an image, as BatchNorm is once its statistics are fixed.
#pragma once

#include "blocked.h"

namespace kd {

struct ChannelNorm {
  const float *scale = nullptr, *shift = nullptr;

  __attribute__((always_inline)) vec of(vec v, int64_t c, int lanes) const {
    if (lanes == kLanes) return v * load(scale + c) + load(shift + c);
    return v * load_first(scale + c, lanes) + load_first(shift + c, lanes);
  }
};

// Rows of `a`, pixels, on their way through a norm and limits.
struct NormedRows {
  static constexpr double kMaking = 6;
  const float* a;
  int64_t lda;
  ChannelNorm norm;
  float low, high;

  Block block(int64_t row, int64_t rows, int64_t k, int64_t depth, float* buffer) const {
    const int64_t ld = spread_out(depth);
    const ChannelNorm here{norm.scale + k, norm.shift + k};
    const vec least = splat(low), most = splat(high);
    for (int64_t i = 0; i < rows; i++) {
      const float* from = a + (row + i) * lda + k;
      float* to = buffer + i * ld;
      int64_t j = 0;
      for (; j + kLanes <= depth; j += kLanes)
        store(to + j, clamp(here.of(load(from + j), j, kLanes), least, most));
      const int left = static_cast<int>(depth - j);
      if (left > 0)
        store_first(to + j, clamp(here.of(load_first(from + j, left), j, left), least, most), left);
    }
    return {buffer, ld, 1};
  }
};

}  // namespace kd
