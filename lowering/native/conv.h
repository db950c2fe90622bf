// Convolutions of images whose channels are innermost, with fused epilogues.
#pragma once

#include "by_taps.h"
#include "channel_factors.h"
#include "channel_norm.h"
#include "depthwise.h"
#include "direct.h"
#include "gemm.h"
#include "image_rows.h"
#include "several_kernels.h"

namespace kd {

static inline int64_t conv_packed_size(const ConvShape& s) {
  if (several_kernels_suit(s)) return depthwise_packed_size(with_repeated_inputs(s));
  if (depthwise_suits(s)) return depthwise_packed_size(s);
  return s.groups * packed_size(s.depth(), s.group_outputs());
}

// w: [co][ci / groups][kh][kw]; scale: one factor for each output channel, or nullptr.
static inline void conv_pack(float* packed, const float* w, const float* scale,
                             const ConvShape& s, int threads) {
  if (several_kernels_suit(s)) return depthwise_pack(packed, w, scale, with_repeated_inputs(s));
  if (depthwise_suits(s)) return depthwise_pack(packed, w, scale, s);
  const int64_t taps = s.kh * s.kw, inputs = s.group_inputs(), outputs = s.group_outputs();
  const int64_t panels = panels_of(outputs), depth = s.depth();
  in_parallel(threads, [&](int thread, int team) {
    const Range mine = part_of(s.groups * panels, thread, team);
    for (int64_t at = mine.begin; at < mine.end; at++) {
      const int64_t panel = at % panels, first = at / panels * outputs + panel * kLanes;
      const int columns = columns_of_panel(outputs, panel);
      float* to = packed + at * kLanes * depth;
      for (int64_t tap = 0; tap < taps; tap++)
        pack_panel(to + tap * inputs * kLanes, w + first * depth + tap, inputs, columns, taps,
                   depth);
      if (scale == nullptr) continue;
      for (int64_t k = 0; k < depth; k++)
        for (int j = 0; j < columns; j++) to[k * kLanes + j] *= scale[first + j];
    }
  });
}

// What happens to inputs on their way: a factor for each channel of each image, or a norm and limits.
struct Prologue {
  const float* factors = nullptr;
  int64_t ld_factors = 0;  // from an image to the next
  ChannelNorm norm{};
  float low = 0, high = 0;
};

static inline bool takes_prologue(const ConvShape& s) { return s.pointwise() && s.groups == 1; }

// Whether no sum is stored before all of it is there.
static inline bool stores_once(const ConvShape& s) {
  return s.pointwise() && s.groups == 1 && s.depth() <= kDepth;
}

// The rows of the epilogue's operands are output pixels, their columns output channels.
static inline void conv(const ConvShape& s, const float* x, const float* packed, float* y,
                        const Epilogue& e, int threads, const Prologue& before = {}) {
  if (several_kernels_suit(s)) return several_kernels(s, x, packed, y, e, threads);
  if (depthwise_suits(s)) return depthwise(s, x, packed, y, e, threads);
  const int64_t m = s.pixels(), n = s.group_outputs(), k = s.depth();
  if (m == 0 || n == 0) return;
  if (taps_suit(s)) return by_taps(s, x, packed, y, e, threads);
  if (direct_suits(s)) return direct(s, x, packed, y, e, threads);
  threads = useful_threads(threads, static_cast<double>(m) * n * k * s.groups, kWorkPerThread);
  const Grid grid = grid_of(m, n, k, s.groups >= 4 * threads ? 1 : threads,
                            s.pointwise() ? MatrixRows::kMaking : ImageRows::kMaking,
                            PackedColumns::kMaking);
  for_each_item(s.groups * grid.items(), threads, [&](int64_t at) {
    const int64_t g = at / grid.items(), item = at % grid.items();
    const PackedColumns columns{packed + g * packed_size(k, n), k};
    const Epilogue part = e.at(0, g * n);
    float* to = y + g * n;
    if (before.factors != nullptr)
      multiply_item(grid, item, m, n, k,
                    ScaledRows{x, s.ldx, before.factors, before.ld_factors, s.h * s.w}, columns, to,
                    s.ldy, part);
    else if (before.norm.scale != nullptr)
      multiply_item(grid, item, m, n, k, NormedRows{x, s.ldx, before.norm, before.low, before.high},
                    columns, to, s.ldy, part);
    else if (s.pointwise())
      multiply_item(grid, item, m, n, k, MatrixRows{x + g * k, s.ldx}, columns, to, s.ldy, part);
    else
      multiply_item(grid, item, m, n, k, ImageRows(s, x, g), columns, to, s.ldy, part);
  });
}

}  // namespace kd
