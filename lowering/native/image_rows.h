// The left operand of a convolution as a matrix product: one row for each output pixel, with the
// inputs that it depends on side by side. Only the block that is worked on is ever made.
#pragma once

#include "blocked.h"
#include "conv_shape.h"

namespace kd {

static inline void fill_zero(float* to, int64_t size) {
  for (int64_t i = 0; i < size; i++) to[i] = 0;
}

// May write up to kLanes - 1 elements too many, which is faster.
static inline void copy_overrunning(float* to, const float* from, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i));
  if (i < size) store(to + i, load_first(from + i, static_cast<int>(size - i)));
}

class ImageRows {
 public:
  static constexpr double kMaking = 6;

  ImageRows(const ConvShape& shape, const float* x, int64_t group)
      : s_(shape), x_(x + group * shape.group_inputs()) {
    // Neighbouring taps of an ungrouped, undilated kernel row are neighbours in memory too.
    const bool joined = s_.groups == 1 && s_.dw == 1 && s_.ldx == s_.ci;
    taps_ = joined ? s_.kw : 1;
    run_ = taps_ * s_.group_inputs();
  }

  Block block(int64_t row, int64_t rows, int64_t k, int64_t depth, float* buffer) const {
    const int64_t ld = spread_out(depth);
    const int64_t end = row + rows;
    for (int64_t pixel = row; pixel < end;) {
      const int64_t left = s_.ow - pixel % s_.ow;
      const int64_t count = std::min(left, end - pixel);
      line(pixel, count, k, depth, buffer + (pixel - row) * ld, ld);
      pixel += count;
    }
    return {buffer, ld, 1};
  }

 private:
  // Output pixels next to each other, none of them in another line of the image.
  void line(int64_t pixel, int64_t count, int64_t k, int64_t depth, float* to, int64_t ld) const {
    const int64_t ox = pixel % s_.ow, oy = pixel / s_.ow % s_.oh, image = pixel / s_.ow / s_.oh;
    const int64_t runs_per_line = s_.kw / taps_;
    const int64_t first = k / run_, last = ceil_div(k + depth, run_);
    for (int64_t r = first; r < last; r++) {
      const int64_t begin = std::max(k, r * run_), end = std::min(k + depth, (r + 1) * run_);
      const int64_t y = oy * s_.sh - s_.ph + r / runs_per_line * s_.dh;
      const int64_t x = ox * s_.sw - s_.pw + r % runs_per_line * s_.dw;
      float* at = to + (begin - k);
      if (y < 0 || y >= s_.h) {
        for (int64_t i = 0; i < count; i++) fill_zero(at + i * ld, end - begin);
        continue;
      }
      run(image * s_.h + y, x, count, begin - r * run_, end - begin, at, ld);
    }
  }

  // Elements skip.. of the taps that begin at column x of an input line, then the same for the
  // following pixels.
  void run(int64_t line, int64_t x, int64_t count, int64_t skip, int64_t size, float* to,
           int64_t ld) const {
    const float* from = x_ + line * s_.w * s_.ldx + skip;
    int64_t i = 0;
    for (; i < count && x < 0; i++, x += s_.sw) clipped(from, x, skip, size, to + i * ld);
    const int64_t step = s_.sw * s_.ldx;
    const float* source = from + x * s_.ldx;
    const int64_t inside = s_.w - taps_ < x ? i : i + (s_.w - taps_ - x) / s_.sw + 1;
    const int64_t end = std::min(inside, count);
    x += (end - i) * s_.sw;
    if (size <= kLanes) {
      const int few = static_cast<int>(size);
      for (; i < end; i++, source += step) store(to + i * ld, load_first(source, few));
    } else {
      for (; i < end; i++, source += step) copy_overrunning(to + i * ld, source, size);
    }
    for (; i < count; i++, x += s_.sw) clipped(from, x, skip, size, to + i * ld);
  }

  void clipped(const float* from, int64_t x, int64_t skip, int64_t size, float* to) const {
    const int64_t per_tap = run_ / taps_;
    const auto within = [&](int64_t element) {
      return std::min(std::max<int64_t>(element - skip, 0), size);
    };
    const int64_t begin = within(-x * per_tap), end = within((s_.w - x) * per_tap);
    if (begin >= end) return fill_zero(to, size);
    fill_zero(to, begin);
    copy_row(to + begin, from + x * s_.ldx + begin, end - begin);
    fill_zero(to + end, size - end);
  }

  ConvShape s_;
  const float* x_;
  int64_t taps_, run_;  // taps that are copied at once, and their elements
};

}  // namespace kd
