// Convolutions of each channel, or of each group of a few channels, with a kernel of its own.
// Channels are the lanes.
#pragma once

#include <utility>

#include "blocked.h"
#include "conv_shape.h"

namespace kd {

// Whether these are kernels for that: as many outputs as inputs, and whole groups in each vector.
static inline bool depthwise_suits(const ConvShape& s) {
  if (s.groups < 2 || s.ci != s.co) return false;
  const int64_t channels = s.group_inputs();
  if (channels == 1) return true;
  return (channels == 2 || channels == 4 || channels == 8) && kLanes % channels == 0 &&
         s.ci >= kLanes;
}

// Vectors of channels. The last one ends with the last channel, overlapping the one before it, so
// that no vector is cut off unless it is the only one. It begins with a group, as groups divide both.
static inline int64_t first_channel(int64_t channels, int64_t vector) {
  return std::max<int64_t>(std::min(vector * kLanes, channels - kLanes), 0);
}

static inline int64_t depthwise_packed_size(const ConvShape& s) {
  return packed_size(s.depth(), s.ci);
}

// From [co][channel][tap], channels being those of a group, to [vector][tap][channel][lane].
static inline void depthwise_pack(float* packed, const float* w, const float* scale,
                                  const ConvShape& s) {
  const int64_t taps = s.kh * s.kw, channels = s.group_inputs();
  for (int64_t v = 0; v < panels_of(s.ci); v++) {
    const int64_t first = first_channel(s.ci, v);
    for (int64_t tap = 0; tap < taps; tap++) {
      for (int64_t i = 0; i < channels; i++, packed += kLanes) {
        for (int lane = 0; lane < kLanes; lane++) {
          const int64_t c = first + lane;
          const float factor = scale != nullptr && c < s.ci ? scale[c] : 1.0f;
          packed[lane] = c < s.ci ? w[(c * channels + i) * taps + tap] * factor : 0.0f;
        }
      }
    }
  }
}

// Neighbouring output pixels that need the same taps.
struct DepthwiseSpan {
  const ConvShape* shape;
  const float* x;       // the first tap's input for the first pixel and channel
  const float* packed;  // the first tap's weights for the first channel
  float* y;
  int64_t rows, columns;  // taps
  Range vectors;
  const float* bias;
  float low, high;
};

// Adds the bias, applies the limits and stores the pixels, for one vector of channels at a time.
class DepthwiseStore {
 public:
  explicit DepthwiseStore(const DepthwiseSpan& span)
      : y_(span.y), pixel_(span.shape->co), bias_(span.bias), low_(splat(span.low)),
        high_(splat(span.high)) {}

  template <int pixels>
  __attribute__((always_inline)) void operator()(int64_t c, const vec (&sums)[pixels]) const {
    const vec bias = bias_ ? load(bias_ + c) : vec{};
#pragma GCC unroll 8
    for (int t = 0; t < pixels; t++)
      store(y_ + t * pixel_ + c, clamp(sums[t] + bias, low_, high_));
  }

 private:
  float* y_;
  int64_t pixel_;
  const float* bias_;
  vec low_, high_;
};

// kw taps in each row, neighbours: an input is loaded once for all the pixels that need it.
template <int pixels, int kw, int stride>
void depthwise_tile(const DepthwiseSpan& span) {
  const ConvShape& s = *span.shape;
  const int64_t line = s.dh * s.w * s.ci, pixel = s.ci, rows = span.rows;
  const DepthwiseStore finish(span);
  for (int64_t v = span.vectors.begin; v < span.vectors.end; v++) {
    const int64_t c = first_channel(s.ci, v);
    vec sums[pixels] = {};
    const float* x = span.x + c;
    const float* w = span.packed + v * s.kh * kw * kLanes;
    for (int64_t r = 0; r < rows; r++, x += line, w += kw * kLanes) {
#pragma GCC unroll 32
      for (int i = 0; i < (pixels - 1) * stride + kw; i++) {
        vec input = load(x + i * pixel);
        hold_in_register(input);
#pragma GCC unroll 8
        for (int q = 0; q < kw; q++) {
          const int t = (i - q) / stride;
          if (i >= q && (i - q) % stride == 0 && t < pixels)
            sums[t] = multiply_add(input, load(w + q * kLanes), sums[t]);
        }
      }
    }
    finish(c, sums);
  }
}

// Any kernel, and any part of it where the image ends.
template <int pixels>
void depthwise_tile_of_any_kernel(const DepthwiseSpan& span) {
  const ConvShape& s = *span.shape;
  const int64_t line = s.dh * s.w * s.ci, tap = s.dw * s.ci, step = s.sw * s.ci;
  const int64_t rows = span.rows, columns = span.columns;
  const DepthwiseStore finish(span);
  for (int64_t v = span.vectors.begin; v < span.vectors.end; v++) {
    const int64_t c = first_channel(s.ci, v);
    vec sums[pixels] = {};
    for (int64_t r = 0; r < rows; r++) {
      const float* x = span.x + r * line + c;
      const float* weights = span.packed + (v * s.kh + r) * s.kw * kLanes;
      for (int64_t q = 0; q < columns; q++, x += tap) {
        const vec w = load(weights + q * kLanes);
#pragma GCC unroll 8
        for (int t = 0; t < pixels; t++) sums[t] = multiply_add(load(x + t * step), w, sums[t]);
      }
    }
    finish(c, sums);
  }
}

// In each group of lanes, what its lane number `which` holds.
template <int group>
static inline vec spread_in_groups(vec v, int which) {
  ivec lanes;
  for (int i = 0; i < kLanes; i++) lanes[i] = i / group * group + which;
  return pick(v, lanes);
}

// Groups of channels: each output needs all the inputs of its group.
template <int pixels, int channels>
void grouped_tile(const DepthwiseSpan& span) {
  const ConvShape& s = *span.shape;
  const int64_t line = s.dh * s.w * s.ci, tap = s.dw * s.ci, step = s.sw * s.ci;
  const int64_t rows = span.rows, columns = span.columns;
  const DepthwiseStore finish(span);
  for (int64_t v = span.vectors.begin; v < span.vectors.end; v++) {
    const int64_t c = first_channel(s.ci, v);
    vec sums[pixels] = {};
    for (int64_t r = 0; r < rows; r++) {
      const float* x = span.x + r * line + c;
      const float* w = span.packed + (v * s.kh + r) * s.kw * channels * kLanes;
      for (int64_t q = 0; q < columns; q++, x += tap, w += channels * kLanes) {
        vec inputs[pixels];
#pragma GCC unroll 8
        for (int t = 0; t < pixels; t++) {
          inputs[t] = load(x + t * step);
          hold_in_register(inputs[t]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < channels; i++) {
          vec factor = load(w + i * kLanes);
          hold_in_register(factor);
#pragma GCC unroll 8
          for (int t = 0; t < pixels; t++)
            sums[t] = multiply_add(spread_in_groups<channels>(inputs[t], i), factor, sums[t]);
        }
      }
    }
    finish(c, sums);
  }
}

// The only vector, if it is cut off.
static inline void depthwise_of_few_channels(const DepthwiseSpan& span) {
  const ConvShape& s = *span.shape;
  const int count = static_cast<int>(s.ci);
  vec sum{};
  for (int64_t r = 0; r < span.rows; r++) {
    for (int64_t q = 0; q < span.columns; q++) {
      const float* x = span.x + (r * s.dh * s.w + q * s.dw) * s.ci;
      sum = multiply_add(load_first(x, count), load(span.packed + (r * s.kw + q) * kLanes), sum);
    }
  }
  if (span.bias) sum += load_first(span.bias, count);
  store_first(span.y, clamp(sum, splat(span.low), splat(span.high)), count);
}

using DepthwiseTile = void (*)(const DepthwiseSpan&);
constexpr int kMostPixels = 8;

// `whole`: no tap is beyond the image's sides.
template <int... pixels_less_one>
static inline DepthwiseTile depthwise_tile_of(const ConvShape& s, int pixels, bool whole,
                                              std::integer_sequence<int, pixels_less_one...>) {
  static constexpr DepthwiseTile tiles[][kMostPixels] = {
      {depthwise_tile_of_any_kernel<pixels_less_one + 1>...},
      {depthwise_tile<pixels_less_one + 1, 3, 1>...},
      {depthwise_tile<pixels_less_one + 1, 3, 2>...},
      {depthwise_tile<pixels_less_one + 1, 5, 1>...},
      {depthwise_tile<pixels_less_one + 1, 5, 2>...},
      {depthwise_tile<pixels_less_one + 1, 7, 1>...},
      {grouped_tile<pixels_less_one + 1, 2>...},
      {grouped_tile<pixels_less_one + 1, 4>...},
      {grouped_tile<pixels_less_one + 1, 8>...}};
  const int64_t channels = s.group_inputs();
  if (channels > 1) return tiles[channels == 2 ? 6 : channels == 4 ? 7 : 8][pixels - 1];
  if (!whole) return depthwise_tile_of_any_kernel<1>;
  int kind = 0;
  if (s.dw == 1 && s.kw == 3 && s.sw <= 2) kind = static_cast<int>(s.sw);
  if (s.dw == 1 && s.kw == 5 && s.sw <= 2) kind = 2 + static_cast<int>(s.sw);
  if (s.dw == 1 && s.kw == 7 && s.sw == 1) kind = 5;
  return tiles[kind][pixels - 1];
}

// The taps of one axis that lie within the image, for the output at `at`.
static inline Range taps_inside(int64_t at, int64_t taps, int64_t stride, int64_t padding,
                                int64_t dilation, int64_t size) {
  const int64_t origin = at * stride - padding;
  const int64_t begin = origin < 0 ? std::min(ceil_div(-origin, dilation), taps) : 0;
  const int64_t end = origin < size ? std::min(ceil_div(size - origin, dilation), taps) : 0;
  return {begin, std::max(begin, end)};
}

// Lines of images in memory, counted over all images: `data` is where line `first` begins.
template <class Number>
struct Lines {
  Number* data;
  int64_t first = 0;
};

// One line of output pixels, some of its channels.
static inline void depthwise_line(const ConvShape& s, Lines<const float> x, const float* packed,
                                  Lines<float> y, const Epilogue& e, int64_t line, Range vectors) {
  const int64_t oy = line % s.oh, image = line / s.oh;
  const Range rows = taps_inside(oy, s.kh, s.sh, s.ph, s.dh, s.h);
  const Limits limits(e);
  const bool in_registers = limits.enough && !e.before && !e.times && !e.after;
  const Limits none{Epilogue{}};
  DepthwiseSpan span{};
  span.shape = &s;
  span.rows = rows.size();
  span.vectors = vectors;
  span.bias = in_registers ? e.bias : nullptr;
  span.low = in_registers ? limits.low : none.low;
  span.high = in_registers ? limits.high : none.high;
  const int64_t above = image * s.h + oy * s.sh - s.ph + rows.begin * s.dh;
  const float* input = x.data + (above - x.first) * s.w * s.ci;
  const auto whole = [&](int64_t ox) {
    return ox < s.ow && taps_inside(ox, s.kw, s.sw, s.pw, s.dw, s.w).size() == s.kw;
  };
  for (int64_t ox = 0; ox < s.ow;) {
    const Range columns = taps_inside(ox, s.kw, s.sw, s.pw, s.dw, s.w);
    int64_t end = ox;
    while (whole(end) && s.ci >= kLanes) end++;
    end = std::max(end, ox + 1);
    const int64_t tiles = ceil_div(end - ox, kMostPixels);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const Range some = part_of(end - ox, tile, tiles);
      const int pixels = static_cast<int>(some.size());
      const int64_t pixel = ox + some.begin, row = line * s.ow + pixel;
      span.columns = columns.size();
      span.x = input + (pixel * s.sw - s.pw + columns.begin * s.dw) * s.ci;
      span.packed =
          packed + (rows.begin * s.kw + columns.begin) * s.group_inputs() * kLanes;
      span.y = y.data + (row - y.first * s.ow) * s.co;
      if (s.ci < kLanes) {
        depthwise_of_few_channels(span);
      } else {
        const auto sizes = std::make_integer_sequence<int, kMostPixels>();
        depthwise_tile_of(s, pixels, columns.size() == s.kw, sizes)(span);
      }
      if (in_registers) continue;
      const int64_t c = vectors.begin * kLanes, c_end = std::min(vectors.end * kLanes, s.ci);
      finish_stored(span.y + c, s.co, pixels, static_cast<int>(c_end - c), span.y + c, s.co,
                  e.at(row, c), Finish{false, true, 0, 0, nullptr});
    }
    ox = end;
  }
}

static inline void depthwise(const ConvShape& s, const float* x, const float* packed, float* y,
                             const Epilogue& e, int threads) {
  const int64_t lines = s.n * s.oh, vectors = panels_of(s.ci);
  if (lines == 0) return;
  const double work = static_cast<double>(s.pixels()) * s.ci * s.depth();
  threads = useful_threads(threads, work, kWorkPerThread);
  // Lines are items, some of them at once; where they are few, channels are divided as well, but
  // overlapping vectors must not be of different items.
  const int64_t wanted = threads > 1 ? 8 * static_cast<int64_t>(threads) : 1;
  const int64_t down = std::min(lines, wanted);
  const int64_t across =
      s.ci % kLanes == 0 ? std::min(ceil_div(wanted, down), ceil_div(vectors, 4)) : 1;
  for_each_item(down * across, threads, [&](int64_t item) {
    const Range mine = part_of(lines, item / across, down);
    const Range channels = part_of(vectors, item % across, across);
    for (int64_t line = mine.begin; line < mine.end; line++)
      depthwise_line(s, {x}, packed, {y}, e, line, channels);
  });
}

}  // namespace kd
