// Dilated convolutions: tap by tap, for those outputs that have a pixel under it. Nothing is copied, and
// what would be multiplied by zeros around the image is left out: often most of it.
#pragma once

#include "blocked.h"
#include "conv_shape.h"
#include "gemm.h"
#include "image_rows.h"

namespace kd {
namespace taps {

// One dimension of the image, its outputs and the kernel.
struct Extent {
  int64_t size, made, step, padding, apart;

  int64_t first(int64_t tap) const { return tap * apart - padding; }
  // The outputs that have a pixel under this tap.
  Range inside(int64_t tap) const {
    const int64_t before = -first(tap);
    const int64_t begin = before > 0 ? ceil_div(before, step) : 0;
    const int64_t end = size + before > 0 ? (size - 1 + before) / step + 1 : 0;
    return {begin, std::max(begin, std::min(end, made))};
  }
};

static inline Extent down(const ConvShape& s) { return {s.h, s.oh, s.sh, s.ph, s.dh}; }
static inline Extent across(const ConvShape& s) { return {s.w, s.ow, s.sw, s.pw, s.dw}; }

// Lines of all images, and some panels of outputs.
struct Part {
  const ConvShape& s;
  const float* x;
  float* y;
  Range lines, panels;

  int64_t column() const { return panels.begin * kLanes; }
  int64_t columns() const { return std::min(panels.size() * kLanes, s.co - column()); }
  float* outputs(int64_t line, int64_t pixel) const {
    return y + (line * s.ow + pixel) * s.ldy + column();
  }
};

// Adds to what is there.
static inline void add_tap(const Part& part, int64_t row, int64_t tap, Range deep,
                           const Block& weights) {
  const ConvShape& s = part.s;
  const Extent lines = down(s), pixels = across(s);
  const Range within = lines.inside(row), under = pixels.inside(tap);
  const int64_t chunks = ceil_div(under.size(), kBlockRows);
  const Finish more{true, false, 0, 0};
  for (int64_t line = part.lines.begin; line < part.lines.end; line++) {
    const int64_t image = line / s.oh, oy = line % s.oh;
    if (oy < within.begin || oy >= within.end) continue;
    const int64_t from = (image * s.h + oy * s.sh + lines.first(row)) * s.w + pixels.first(tap);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const Range some = part_of(under.size(), chunk, chunks);
      const int64_t pixel = under.begin + some.begin;
      multiply_blocks({part.x + (from + pixel * s.sw) * s.ldx + deep.begin, s.sw * s.ldx, 1},
                      some.size(), weights, part.columns(), deep.size(), part.outputs(line, pixel),
                      s.ldy, Epilogue{}, more, Block{});
    }
  }
}

static inline void compute(const Part& part, const float* packed, const Epilogue& e) {
  const ConvShape& s = part.s;
  const PackedColumns columns{packed, s.depth()};
  const int64_t first = part.lines.begin * s.ow, pixels = part.lines.size() * s.ow;
  const int64_t pieces = ceil_div(s.ci, kDepth);
  for (int64_t i = 0; i < pixels; i++) fill_zero(part.outputs(0, first + i), part.columns());
  for (int64_t tap = 0; tap < s.kh * s.kw; tap++) {
    for (int64_t piece = 0; piece < pieces; piece++) {
      const Range deep = part_of(s.ci, piece, pieces);
      add_tap(part, tap / s.kw, tap % s.kw, deep,
              columns.block(part.panels.begin, part.panels.size(), tap * s.ci + deep.begin,
                            deep.size()));
    }
  }
  const Limits limits(e);
  const Finish last{false, true, limits.low, limits.high};
  float* const to = part.outputs(0, first);
  finish_stored(to, s.ldy, static_cast<int>(pixels), static_cast<int>(part.columns()), to, s.ldy,
                e.at(first, part.column()), last);
}

}  // namespace taps

// Sums of few inputs at a time would be mostly reading and writing; a sequence is one line, and lines are
// not divided (measured: Zen 5).
static inline bool taps_suit(const ConvShape& s) {
  constexpr int64_t fewest_inputs = 32, fewest_lines = 4;
  const bool dilated = (s.dh > 1 && s.kh > 1) || (s.dw > 1 && s.kw > 1);
  return dilated && s.groups == 1 && s.ci >= fewest_inputs && s.oh >= fewest_lines;
}

static inline void by_taps(const ConvShape& s, const float* x, const float* packed, float* y,
                           const Epilogue& e, int threads) {
  const double work = static_cast<double>(s.pixels()) * s.co * s.depth();
  threads = useful_threads(threads, work, kWorkPerThread);
  const Grid grid = grid_of(s.pixels(), s.co, s.depth(), threads, 1, PackedColumns::kMaking);
  const int64_t lines = s.n * s.oh, at_once = std::max<int64_t>(1, kBlockRows / s.ow);
  const int64_t blocks = std::min(lines, std::max(grid.down, ceil_div(lines, at_once)));
  for_each_item(blocks * grid.across, threads, [&](int64_t item) {
    const Range panels = part_of(panels_of(s.co), item % grid.across, grid.across);
    taps::compute({s, x, y, part_of(lines, item / grid.across, blocks), panels}, packed, e);
  });
}

}  // namespace kd
