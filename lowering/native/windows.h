// The largest number of a window, or the mean of its numbers, for each channel.
#pragma once

#include "blocked.h"
#include "depthwise.h"

namespace kd {

// Torch's: what is no number is the largest, and of equal ones the first.
struct Largest {
  static vec first() { return splat(-std::numeric_limits<float>::infinity()); }
  static vec add(vec so_far, vec v) { return (v > so_far) | (v != v) ? v : so_far; }
  static vec last(vec so_far, float) { return so_far; }
};

struct Average {
  static vec first() { return vec{}; }
  static vec add(vec so_far, vec v) { return so_far + v; }
  static vec last(vec so_far, float count) { return so_far / splat(count); }
};

// Of one output pixel: so many vectors of channels at once, the last one cut off to `lanes`.
template <class Of, int vectors>
static inline void window(const ConvShape& s, const float* x, float* y, Range rows, Range columns,
                          float count, int lanes) {
  vec found[vectors];
  for (int j = 0; j < vectors; j++) found[j] = Of::first();
  const auto get = [&](const float* p) { return lanes == kLanes ? load(p) : load_first(p, lanes); };
  for (int64_t r = rows.begin; r < rows.end; r++)
    for (int64_t q = columns.begin; q < columns.end; q++)
      for (int j = 0; j < vectors; j++)
        found[j] = Of::add(found[j], get(x + (r * s.dh * s.w + q * s.dw) * s.ldx + j * kLanes));
  for (int j = 0; j < vectors; j++) {
    const vec result = Of::last(found[j], count);
    if (lanes == kLanes)
      store(y + j * kLanes, result);
    else
      store_first(y + j * kLanes, result, lanes);
  }
}

// `whole`: zeros around the image count.
template <class Of>
void windows(const ConvShape& s, const float* x, float* y, bool whole, int threads) {
  constexpr int wide = 4;
  const int64_t lines = s.n * s.oh;
  const double work = static_cast<double>(s.values()) * static_cast<double>(s.kh * s.kw);
  for_each_item(lines, useful_threads(threads, work, kWorkPerThread), [&](int64_t line) {
    const int64_t image = line / s.oh, top = line % s.oh * s.sh - s.ph;
    const Range rows = taps_inside(line % s.oh, s.kh, s.sh, s.ph, s.dh, s.h);
    for (int64_t ox = 0; ox < s.ow; ox++) {
      const Range columns = taps_inside(ox, s.kw, s.sw, s.pw, s.dw, s.w);
      const auto count = static_cast<float>(whole ? s.kh * s.kw : rows.size() * columns.size());
      const float* from = x + ((image * s.h + top) * s.w + ox * s.sw - s.pw) * s.ldx;
      float* to = y + (line * s.ow + ox) * s.ldy;
      int64_t c = 0;
      for (; c + wide * kLanes <= s.ci; c += wide * kLanes)
        window<Of, wide>(s, from + c, to + c, rows, columns, count, kLanes);
      for (; c < s.ci; c += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(s.ci - c, kLanes));
        window<Of, 1>(s, from + c, to + c, rows, columns, count, lanes);
      }
    }
  });
}

}  // namespace kd
