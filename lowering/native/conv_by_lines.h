// A convolution and the depthwise kernel behind it, line by line: some lines of the first are made, used
// while they are in the second cache, and overwritten. Or three, with the projection of an inverted
// residual: what is wide never lies in memory as a whole. Threads take bands of lines; where too many
// lines would be made twice at their borders, conv_pair.h divides channels instead.
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

// Whether the lines of a depthwise kernel, and the convolution that makes them, stay in the cache.
static inline bool lines_suit(const ConvShape& first, const ConvShape& second, int threads) {
  if (first.values() < kWorthPairing || second.values() == 0) return false;
  if (!makes_lines(first) || !(first.pointwise() || direct_suits(first))) return false;
  if (!by_channel(second)) return false;
  const int64_t lines = (second.kh - 1) * second.dh + 1;
  return lines * second.w * second.ci <= kWideLines && bands_of(second, threads) > 0;
}

static inline bool bottleneck_suits(const ConvShape& first, const ConvShape& second,
                                    const ConvShape& third, int threads) {
  return third.groups == 1 && third.pointwise() && third.values() > 0 &&
         lines_suit(first, second, threads);
}

// take(lines, some): the output lines `some` of one image can be made of these lines now.
template <class Inputs, class Take>
void made_line_by_line(const ConvStage& first, const ConvShape& s, Inputs inputs, int64_t image,
                       Range mine, int64_t at_once, const Take& take) {
  MadeLines<Inputs> made(first, inputs, image, {0, panels_of(s.ci)});
  const int64_t reach = (s.kh - 1) * s.dh + 1;
  float* const wide = scratch<4>(((at_once - 1) * s.sh + reach) * s.w * s.ci);
  const auto within = [&](int64_t at) { return std::min(std::max<int64_t>(at, 0), s.h); };
  for (int64_t oy = mine.begin; oy < mine.end; oy += at_once) {
    const Range some{oy, std::min(oy + at_once, mine.end)};
    const int64_t above = oy * s.sh - s.ph, below = (some.end - 1) * s.sh - s.ph + reach;
    take(made.make({within(above), within(below)}, wide), some);
  }
}

// The bands of all images, and the inputs of `first` as it reads them: use(inputs, image, lines).
template <class Use>
void for_each_band(const ConvStage& first, const ConvStage& second, const float* x, int threads,
                   const Use& use) {
  const ConvShape &s = first.shape, &d = second.shape;
  const int64_t bands = bands_of(d, threads);
  for_each_item(d.n * bands, threads, [&](int64_t item) {
    const int64_t image = item / bands;
    const Range mine = part_of(d.oh, item % bands, bands);
    if (s.pointwise())
      use(MatrixRows{x, s.ldx}, image, mine);
    else
      use(DirectLines(s, x), image, mine);
  });
}

// How many output lines at once: so many that the wide ones, and as many floats for each output line
// as `more`, stay in the cache.
static inline int64_t lines_at_once(const ConvShape& s, int64_t more) {
  const int64_t line = s.w * s.ci, reach = (s.kh - 1) * s.dh + 1;
  return std::max<int64_t>((kWideLines - reach * line) / (s.sh * line + more) + 1, 1);
}

static inline void dense_then_depthwise_lines(const ConvStage& first, const ConvStage& second,
                                              const float* x, float* y, int threads) {
  const ConvShape& s = second.shape;
  for_each_band(first, second, x, threads, [&](auto inputs, int64_t image, Range mine) {
    const auto depthwise = [&](const Lines<const float>& lines, Range some) {
      const int64_t line = image * s.oh;
      depthwise_lines(s, lines, second.packed, {y}, second.epilogue,
                      {line + some.begin, line + some.end}, {0, panels_of(s.ci)});
    };
    made_line_by_line(first, s, inputs, image, mine, lines_at_once(s, 0), depthwise);
  });
}

static inline void bottleneck(const ConvStage& first, const ConvStage& second,
                              const ConvStage& third, const float* x, float* y, int threads) {
  const ConvShape& s = second.shape;
  const int64_t narrow = third.shape.co, ldy = third.shape.ldy;
  const int64_t wide = s.ow * s.ci, at_once = lines_at_once(s, wide);
  for_each_band(first, second, x, threads, [&](auto inputs, int64_t image, Range mine) {
    float* const filtered = scratch<5>(at_once * wide);
    const auto depthwise_and_project = [&](const Lines<const float>& lines, Range some) {
      const int64_t line = image * s.oh + some.begin, row = line * s.ow;
      depthwise_lines(s, lines, second.packed, {filtered, line}, second.epilogue,
                      {line, line + some.size()}, {0, panels_of(s.ci)});
      multiply_item(Grid{}, 0, some.size() * s.ow, narrow, s.ci, MatrixRows{filtered, s.ci},
                    PackedColumns{third.packed, s.ci}, y + row * ldy, ldy,
                    third.epilogue.at(row, 0));
    };
    made_line_by_line(first, s, inputs, image, mine, at_once, depthwise_and_project);
  });
}

}  // namespace kd
