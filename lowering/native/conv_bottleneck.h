// An inverted residual as one: some lines of the expansion, of the depthwise kernel and of the
// projection are made one after the other. What is wide is used while it is in the second cache.
#pragma once

#include "conv_pair.h"

namespace kd {

// Floats of wide lines that stay in the second cache beside the weights.
constexpr int64_t kWideLines = 96 * 1024;
// Lines of the expansion that neighbouring bands both make, as a part of all of them.
constexpr double kMostTwice = 0.08;

// How an image is cut into bands of output lines: 0 if the threads would make too much twice.
static inline int64_t bands_of(const ConvShape& depthwise, int threads) {
  const int64_t shared = (depthwise.kh - 1) * depthwise.dh + 1 - depthwise.sh;
  const auto cheap = [&](int64_t bands) {
    return static_cast<double>((bands - 1) * shared) <= kMostTwice * depthwise.h &&
           depthwise.oh >= 4 * bands;
  };
  for (const int64_t each : {4, 2, 1}) {
    const int64_t bands = std::max<int64_t>(1, ceil_div(each * threads, depthwise.n));
    if (threads == 1 || depthwise.n >= each * threads) return 1;
    if (cheap(bands)) return bands;
  }
  return 0;
}

static inline bool bottleneck_suits(const ConvShape& first, const ConvShape& second,
                                    const ConvShape& third, int threads) {
  if (first.values() < kWorthPairing || third.values() == 0) return false;
  if (first.groups > 1 || !(first.pointwise() || direct_suits(first))) return false;
  if (!by_channel(second) || third.groups > 1 || !third.pointwise()) return false;
  const int64_t lines = (second.kh - 1) * second.dh + 1;
  return lines * second.w * second.ci <= kWideLines && bands_of(second, threads) > 0;
}

// Output lines `mine` of one image.
template <class Inputs>
void bottleneck_lines(const ConvStage& first, const ConvStage& second, const ConvStage& third,
                      Inputs inputs, float* y, int64_t image, Range mine) {
  const ConvShape& s = second.shape;
  MadeLines<Inputs> made(first, inputs, image, {0, panels_of(s.ci)});
  const int64_t line = s.w * s.ci, reach = (s.kh - 1) * s.dh + 1, narrow = third.shape.co;
  const int64_t at_once =
      std::max<int64_t>((kWideLines - reach * line) / (s.sh * line + s.ow * s.ci) + 1, 1);
  float* const wide = scratch<4>(((at_once - 1) * s.sh + reach) * line);
  float* const filtered = scratch<5>(at_once * s.ow * s.ci);
  const auto within = [&](int64_t at) { return std::min(std::max<int64_t>(at, 0), s.h); };
  for (int64_t oy = mine.begin; oy < mine.end; oy += at_once) {
    const int64_t end = std::min(oy + at_once, mine.end), row = (image * s.oh + oy) * s.ow;
    const int64_t above = oy * s.sh - s.ph, below = (end - 1) * s.sh - s.ph + reach;
    const Lines<const float> lines = made.make({within(above), within(below)}, wide);
    for (int64_t i = oy; i < end; i++)
      depthwise_line(s, lines, second.packed, {filtered, image * s.oh + oy}, second.epilogue,
                     image * s.oh + i, {0, panels_of(s.ci)});
    multiply_item(Grid{}, 0, (end - oy) * s.ow, narrow, s.ci, MatrixRows{filtered, s.ci},
                  PackedColumns{third.packed, s.ci}, y + row * narrow, narrow,
                  third.epilogue.at(row, 0));
  }
}

static inline void bottleneck(const ConvStage& first, const ConvStage& second,
                              const ConvStage& third, const float* x, float* y, int threads) {
  const ConvShape &s = first.shape, &d = second.shape;
  const int64_t bands = bands_of(d, threads);
  for_each_item(d.n * bands, threads, [&](int64_t item) {
    const int64_t image = item / bands;
    const Range mine = part_of(d.oh, item % bands, bands);
    if (s.pointwise())
      bottleneck_lines(first, second, third, MatrixRows{x, s.ci}, y, image, mine);
    else
      bottleneck_lines(first, second, third, DirectLines(s, x), y, image, mine);
  });
}

}  // namespace kd
