// The innermost loops of convolutions of each channel, or of each group of a few channels, with a kernel
// of its own: neighbouring output pixels, one vector of channels after the other.
#pragma once

#include <utility>

#include "conv_shape.h"
#include "microkernel.h"
#include "pack.h"

namespace kd {

// Vectors of channels. The last one ends with the last channel, overlapping the one before it, so
// that no vector is cut off unless it is the only one. It begins with a group, as groups divide both.
static inline int64_t first_channel(int64_t channels, int64_t vector) {
  return std::max<int64_t>(std::min(vector * kLanes, channels - kLanes), 0);
}

// Neighbouring output pixels that need the same taps.
struct DepthwiseSpan {
  const ConvShape* shape;
  const float* x;       // the first tap's input for the first pixel and channel
  const float* packed;  // the first tap's weights for the first channel
  float* y;
  int64_t step, pixel;    // from what is computed to the next: of the inputs, of the outputs
  int64_t rows, columns;  // taps
  Range inside;           // of the columns of inputs, those that the image has
  Range vectors;
  const float* bias;
  float low, high;
};

// `few`: the only vector is cut off.
template <bool few>
static inline vec load_channels(const float* p, int channels) {
  return few ? load_first(p, channels) : load(p);
}

// Adds the bias, applies the limits and stores the pixels, for one vector of channels at a time.
template <bool few = false>
class DepthwiseStore {
 public:
  explicit DepthwiseStore(const DepthwiseSpan& span)
      : y_(span.y), pixel_(span.pixel), bias_(span.bias), low_(splat(span.low)),
        high_(splat(span.high)),
        channels_(static_cast<int>(std::min<int64_t>(span.shape->ci, kLanes))) {}

  template <int pixels>
  __attribute__((always_inline)) void operator()(int64_t c, const vec (&sums)[pixels]) const {
    const vec bias = bias_ ? load_channels<few>(bias_ + c, channels_) : vec{};
#pragma GCC unroll 8
    for (int t = 0; t < pixels; t++) {
      const vec y = clamp(sums[t] + bias, low_, high_);
      if (few)
        store_first(y_ + t * pixel_, y, channels_);
      else
        store(y_ + t * pixel_ + c, y);
    }
  }

 private:
  float* y_;
  int64_t pixel_;
  const float* bias_;
  vec low_, high_;
  int channels_;
};

// kw taps in each row, neighbours: an input is loaded once for all the pixels that need it. `edge`: some
// of the inputs are beyond the image's sides.
template <int pixels, int kw, int stride, bool edge>
void depthwise_tile(const DepthwiseSpan& span) {
  const ConvShape& s = *span.shape;
  const int64_t line = s.dh * s.w * s.ldx, pixel = s.ldx, rows = span.rows;
  const DepthwiseStore<> finish(span);
  for (int64_t v = span.vectors.begin; v < span.vectors.end; v++) {
    const int64_t c = first_channel(s.ci, v);
    vec sums[pixels] = {};
    const float* x = span.x + c;
    const float* w = span.packed + v * s.kh * kw * kLanes;
    for (int64_t r = 0; r < rows; r++, x += line, w += kw * kLanes) {
#pragma GCC unroll 32
      for (int i = 0; i < (pixels - 1) * stride + kw; i++) {
        if (edge && (i < span.inside.begin || i >= span.inside.end)) continue;
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

// Any kernel, and any part of it where the image ends. `few`: there are less channels than lanes.
template <int pixels, bool few>
void depthwise_tile_of_any_kernel(const DepthwiseSpan& span) {
  const ConvShape& s = *span.shape;
  const int64_t line = s.dh * s.w * s.ldx, tap = s.dw * s.ldx, step = span.step;
  const int64_t rows = span.rows, columns = span.columns;
  const int channels = static_cast<int>(std::min<int64_t>(s.ci, kLanes));
  const DepthwiseStore<few> finish(span);
  for (int64_t v = span.vectors.begin; v < span.vectors.end; v++) {
    const int64_t c = first_channel(s.ci, v);
    vec sums[pixels] = {};
    for (int64_t r = 0; r < rows; r++) {
      const float* x = span.x + r * line + c;
      const float* weights = span.packed + (v * s.kh + r) * s.kw * kLanes;
      for (int64_t q = 0; q < columns; q++, x += tap) {
        const vec w = load(weights + q * kLanes);
#pragma GCC unroll 8
        for (int t = 0; t < pixels; t++)
          sums[t] = multiply_add(load_channels<few>(x + t * step, channels), w, sums[t]);
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
  const int64_t line = s.dh * s.w * s.ldx, tap = s.dw * s.ldx, step = span.step;
  const int64_t rows = span.rows, columns = span.columns;
  const DepthwiseStore<> finish(span);
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

using DepthwiseTile = void (*)(const DepthwiseSpan&);
constexpr int kMostPixels = 8;
constexpr auto kPixelCounts = std::make_integer_sequence<int, kMostPixels>();

// Kernels whose taps in a row are neighbours, of the sizes that networks have.
static inline bool has_tiles(const ConvShape& s) {
  if (s.group_inputs() > 1 || s.dw > 1 || s.ci < kLanes) return false;
  return s.sw == 1 ? s.kw == 3 || s.kw == 5 || s.kw == 7 : s.sw == 2 && (s.kw == 3 || s.kw == 5);
}

template <bool edge, int... pixels_less_one>
static inline DepthwiseTile depthwise_tile_of(const ConvShape& s, int pixels,
                                              std::integer_sequence<int, pixels_less_one...>) {
  static constexpr DepthwiseTile tiles[][kMostPixels] = {
      {depthwise_tile<pixels_less_one + 1, 3, 1, edge>...},
      {depthwise_tile<pixels_less_one + 1, 3, 2, edge>...},
      {depthwise_tile<pixels_less_one + 1, 5, 1, edge>...},
      {depthwise_tile<pixels_less_one + 1, 5, 2, edge>...},
      {depthwise_tile<pixels_less_one + 1, 7, 1, edge>...}};
  return tiles[s.kw - 4 + s.sw][pixels - 1];
}

// Of other kernels, and of groups of so many channels.
template <int... pixels_less_one>
static inline DepthwiseTile any_tile_of(int64_t channels, int pixels, bool few,
                                        std::integer_sequence<int, pixels_less_one...>) {
  static constexpr DepthwiseTile tiles[][kMostPixels] = {
      {depthwise_tile_of_any_kernel<pixels_less_one + 1, false>...},
      {depthwise_tile_of_any_kernel<pixels_less_one + 1, true>...},
      {grouped_tile<pixels_less_one + 1, 2>...},
      {grouped_tile<pixels_less_one + 1, 4>...},
      {grouped_tile<pixels_less_one + 1, 8>...}};
  if (channels > 1) return tiles[channels == 2 ? 2 : channels == 4 ? 3 : 4][pixels - 1];
  return tiles[few][pixels - 1];
}

}  // namespace kd
