// Transposed convolutions of images whose channels are innermost. An output depends on every
// stride-th tap of the kernel only, and outputs that are a stride apart on the same ones: each such
// phase is an ordinary convolution with a small kernel of its own.
#pragma once

#include <vector>

#include "gemm.h"
#include "image_rows.h"

namespace kd {

// Input [n][h][w][ci], output [n][oh][ow][co]; a kernel is no shorter than its stride.
struct TransposedShape {
  int64_t n, h, w, ci, co, kh, kw, sh, sw, ph, pw, oh, ow;
};

// One dimension of a phase: its outputs first, first + stride ..., and its taps tap, tap + stride ...
struct PhaseAxis {
  int64_t first, count, tap, taps, before;  // `before`: the padding of the small convolution

  PhaseAxis(int64_t phase, int64_t stride, int64_t kernel, int64_t padding, int64_t outputs)
      : tap(phase), taps(ceil_div(kernel - phase, stride)) {
    const int64_t skipped = phase >= padding ? 0 : ceil_div(padding - phase, stride);
    first = phase - padding + stride * skipped;
    count = first < outputs ? ceil_div(outputs - first, stride) : 0;
    before = taps - 1 - skipped;
  }
};

struct Phase {
  PhaseAxis y, x;
  ConvShape shape;
  int64_t packed;  // where its weight begins, in floats

  int64_t outputs(const TransposedShape& s, int64_t pixel) const {
    const int64_t column = pixel % shape.ow, row = pixel / shape.ow % shape.oh;
    const int64_t image = pixel / shape.ow / shape.oh;
    return ((image * s.oh + y.first + row * s.sh) * s.ow + x.first + column * s.sw) * s.co;
  }
};

static inline std::vector<Phase> phases_of(const TransposedShape& s) {
  std::vector<Phase> phases;
  int64_t packed = 0;
  for (int64_t i = 0; i < s.sh * s.sw; i++) {
    const PhaseAxis y(i / s.sw, s.sh, s.kh, s.ph, s.oh), x(i % s.sw, s.sw, s.kw, s.pw, s.ow);
    const ConvShape shape{s.n, s.h, s.w,      s.ci,     s.co, y.taps, x.taps,  1,
                          1,   y.before, x.before, 1, 1,    1,      y.count, x.count, s.ci, s.co};
    phases.push_back({y, x, shape, packed});
    packed += packed_size(shape.depth(), s.co);
  }
  return phases;
}

static inline int64_t transposed_packed_size(const TransposedShape& s) {
  return s.kh * s.kw * packed_size(s.ci, s.co);
}

// w: [ci][co][kh][kw]; scale: one factor for each output channel, or nullptr.
static inline void transposed_pack(float* packed, const float* w, const float* scale,
                                   const TransposedShape& s, int threads) {
  const std::vector<Phase> phases = phases_of(s);
  const int64_t panels = panels_of(s.co), taps = s.kh * s.kw;
  in_parallel(threads, [&](int thread, int team) {
    const Range mine = part_of(static_cast<int64_t>(phases.size()) * panels, thread, team);
    for (int64_t at = mine.begin; at < mine.end; at++) {
      const Phase& phase = phases[static_cast<size_t>(at / panels)];
      const int64_t first = at % panels * kLanes, depth = phase.shape.depth();
      const int columns = columns_of_panel(s.co, at % panels);
      float* const panel = packed + phase.packed + first * depth;
      float* to = panel;
      for (int64_t i = phase.y.taps; i-- > 0;) {  // the last tap meets the first pixel
        for (int64_t j = phase.x.taps; j-- > 0; to += s.ci * kLanes) {
          const int64_t tap = (phase.y.tap + i * s.sh) * s.kw + phase.x.tap + j * s.sw;
          pack_panel(to, w + first * taps + tap, s.ci, columns, s.co * taps, taps);
        }
      }
      if (scale == nullptr) continue;
      for (int64_t k = 0; k < depth; k++)
        for (int j = 0; j < columns; j++) panel[k * kLanes + j] *= scale[first + j];
    }
  });
}

// Rows of another matrix, from one of them on.
template <class Rows>
struct RowsFrom {
  const Rows& rows;
  int64_t first;
  Block block(int64_t row, int64_t count, int64_t k, int64_t depth, float* buffer) const {
    return rows.block(first + row, count, k, depth, buffer);
  }
};

constexpr int64_t kLongLine = 2 * kMostTileRows;
constexpr int64_t kTransposedPanels = ceil_div(512, kLanes);
constexpr int64_t kTransposedRow = kTransposedPanels * kLanes + 16;

// Some pixels of a phase times some panels. Those of a long line are written where they belong,
// a stride apart; those of short lines are computed side by side first.
static inline void transposed_block(const TransposedShape& s, const Phase& phase, Range pixels,
                                    Range panels, const float* x, const float* packed, float* y,
                                    const Epilogue& e) {
  const ConvShape& shape = phase.shape;
  const int64_t depth = shape.depth(), column = panels.begin * kLanes;
  const int64_t columns = std::min(panels.size() * kLanes, s.co - column);
  const PackedColumns weight{packed + phase.packed + column * depth, depth};
  const Epilogue part = e.at(0, column);
  const ImageRows rows(shape, x, 0);
  const auto multiply = [&](int64_t pixel, int64_t count, float* to, int64_t ld) {
    if (shape.pointwise())
      multiply_item(Grid{}, 0, count, columns, depth, MatrixRows{x + pixel * s.ci, s.ci}, weight,
                    to, ld, part);
    else
      multiply_item(Grid{}, 0, count, columns, depth, RowsFrom<ImageRows>{rows, pixel}, weight,
                    to, ld, part);
  };
  if (shape.ow >= kLongLine) {
    for (int64_t pixel = pixels.begin; pixel < pixels.end;) {
      const int64_t count = std::min(shape.ow - pixel % shape.ow, pixels.end - pixel);
      multiply(pixel, count, y + phase.outputs(s, pixel) + column, s.sw * s.co);
      pixel += count;
    }
    return;
  }
  float* const block = scratch<2>(kBlockRows * kTransposedRow);
  multiply(pixels.begin, pixels.size(), block, kTransposedRow);
  for (int64_t i = 0; i < pixels.size(); i++)
    copy_row(y + phase.outputs(s, pixels.begin + i) + column, block + i * kTransposedRow, columns);
}

// The epilogue has a bias and an activation at most.
static inline void transposed(const TransposedShape& s, const float* x, const float* packed,
                              float* y, const Epilogue& e, int threads) {
  const std::vector<Phase> phases = phases_of(s);
  double work = 0;
  for (const Phase& phase : phases)
    work += static_cast<double>(phase.shape.pixels()) * s.co * phase.shape.depth();
  threads = useful_threads(threads, work, kWorkPerThread);
  // Phases differ by a line and a tap at most, so all are cut like the first.
  const ConvShape& first = phases.front().shape;
  const int64_t count = static_cast<int64_t>(phases.size());
  const Grid grid = grid_of(first.pixels(), s.co, first.depth(), count >= 4 * threads ? 1 : threads,
                            ImageRows::kMaking, PackedColumns::kMaking);
  for_each_item(count * grid.items(), threads, [&](int64_t at) {
    const Phase& phase = phases[static_cast<size_t>(at / grid.items())];
    const int64_t item = at % grid.items();
    const Range pixels = part_of(phase.shape.pixels(), item / grid.across, grid.down);
    const Range panels = part_of(panels_of(s.co), item % grid.across, grid.across);
    const int64_t row_blocks = ceil_div(pixels.size(), kBlockRows);
    const int64_t wide_blocks = ceil_div(panels.size(), kTransposedPanels);
    for (int64_t block = 0; block < row_blocks * wide_blocks; block++) {
      const Range some = part_of(pixels.size(), block / wide_blocks, row_blocks);
      const Range wide = part_of(panels.size(), block % wide_blocks, wide_blocks);
      transposed_block(s, phase, {pixels.begin + some.begin, pixels.begin + some.end},
                       {panels.begin + wide.begin, panels.begin + wide.end}, x, packed, y, e);
    }
  });
}

}  // namespace kd
