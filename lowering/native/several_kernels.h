// Convolutions of each channel with several kernels: its outputs lie side by side, so lines of inputs
// in which each channel stands as often are what a kernel for each channel needs.
#pragma once

#include "depthwise.h"
#include "parallel.h"

namespace kd {

// Not those of one line: a long sequence would be one line to repeat, by one thread.
static inline bool several_kernels_suit(const ConvShape& s) {
  return s.groups > 1 && s.ci == s.groups && s.co > s.ci && s.kh > 1;
}

// The same with as many inputs as outputs. `ldx`: of the buffer that has them.
static inline ConvShape with_repeated_inputs(ConvShape s) {
  s.ci = s.groups = s.ldx = s.co;
  return s;
}

// From pixels of `s.ci` channels to pixels of `s.co`.
static inline void repeat_channels(const ConvShape& s, const float* from, float* to,
                                   int64_t pixels) {
  const int64_t times = s.group_outputs();
  for (int64_t v = 0; v < panels_of(s.co); v++) {
    const int64_t channel = first_channel(s.co, v), source = channel / times;
    const int outputs = static_cast<int>(std::min<int64_t>(kLanes, s.co));
    const int inputs = static_cast<int>(std::min<int64_t>(kLanes, s.ci - source));
    ivec lanes;
    for (int i = 0; i < kLanes; i++)
      lanes[i] = static_cast<int>(std::min((channel + i) / times, s.ci - 1) - source);
    const float* x = from + source;
    float* y = to + channel;
    for (int64_t p = 0; p < pixels; p++, x += s.ldx, y += s.co)
      store_first(y, pick(load_first(x, inputs), lanes), outputs);
  }
}

// Floats of repeated inputs that stay in the second cache beside the outputs.
constexpr int64_t kRepeatedAtOnce = 64 * 1024;

static inline void several_kernels(const ConvShape& s, const float* x, const float* packed,
                                   float* y, const Epilogue& e, int threads) {
  const ConvShape each = with_repeated_inputs(s);
  if (s.values() == 0) return;
  threads = useful_threads(threads, static_cast<double>(s.values()) * s.depth(), kWorkPerThread);
  const int64_t line = s.w * s.co, reach = (s.kh - 1) * s.dh + 1;
  const int64_t fitting = std::max<int64_t>((kRepeatedAtOnce / line - reach) / s.sh + 1, 1);
  const int64_t wanted = threads > 1 ? ceil_div(4 * int64_t{threads}, s.n) : 1;
  const int64_t bands = std::min(std::max(ceil_div(s.oh, fitting), wanted), s.oh);
  const auto within = [&](int64_t at) { return std::min(std::max<int64_t>(at, 0), s.h); };
  for_each_item(s.n * bands, threads, [&](int64_t item) {
    const int64_t image = item / bands;
    const Range mine = part_of(s.oh, item % bands, bands);
    const Range needed{within(mine.begin * s.sh - s.ph),
                       within((mine.end - 1) * s.sh - s.ph + reach)};
    float* const lines = scratch<4>(std::max<int64_t>(needed.size(), 1) * line);
    const int64_t first = image * s.h + needed.begin;
    repeat_channels(s, x + first * s.w * s.ldx, lines, needed.size() * s.w);
    depthwise_lines(each, {lines, first}, packed, {y}, e,
                    {image * s.oh + mine.begin, image * s.oh + mine.end}, {0, panels_of(s.co)});
  });
}

}  // namespace kd
