// Convolutions, and what stands between them, as a graph describes them.
#pragma once

#include <array>

#include "conv_shape.h"
#include "convolution_norm.h"

namespace kd {

// What a layer does to its image. In the order of `Kind` in lowering/convolution_steps.py.
enum class Kind : int64_t {
  convolution,
  mean,             // of each channel's pixels
  part,             // copies it into some channels of a larger image
  slice,            // some of its channels
  pointwise,        // of each pixel: a norm, if it has statistics, and what an epilogue does
  largest,          // of a window
  average,          // of a window, with zeros around the image
  average_inside,   // of what the image has of a window
  enlarged,         // each pixel `stride` times in each dimension
};

// How a convolution is computed. In the order of `Way` in lowering/convolution_steps.py.
enum class Way : int64_t {
  plain,
  winograd,
  bfloat16,  // by products of such numbers where the shape is one for that
  float16,
};

constexpr bool by_halves(Way way) { return way == Way::bfloat16 || way == Way::float16; }

// What it reads besides its weights are numbers of values: first the images that are given, then what
// each layer makes.
struct Layer {
  static constexpr int64_t kNothing = -1;

  Lent weight, bias;
  Norm norm;
  at::IntArrayRef stride, padding, dilation;
  int64_t groups, act;
  double a, b;
  Way way;
  int64_t image = 0, before = kNothing, times = kNothing, after = kNothing;
  int64_t factors = kNothing;  // of the image's channels
  Kind kind = Kind::convolution;
  // The size of a window; the first of some channels, and how many channels the larger image has or
  // the slice. `before` of a part: what has the parts before it.
  std::array<int64_t, 2> extent{};
  bool once = false;  // its weights are others in the next call: packed, and not kept

  std::array<int64_t, 5> reads() const { return {image, before, times, after, factors}; }
  bool is(Kind other) const { return kind == other; }
  bool is_convolution() const { return is(Kind::convolution); }
  bool reads_beside() const { return before >= 0 || times >= 0 || after >= 0; }
  int64_t first_channel() const { return extent[0]; }
  int64_t channels() const { return extent[1]; }
};

struct Sides {
  int64_t top, left, bottom, right;
};

// One number for both sides of a dimension, or first those before it and then those behind it.
inline Sides sides_of(at::IntArrayRef padding, bool flat) {
  if (flat) return {0, padding[(padding.size() - 1) / 2], 0, padding.back()};
  if (padding.size() == 4) return {padding[0], padding[1], padding[2], padding[3]};
  return {padding.front(), padding.back(), padding.front(), padding.back()};
}

// Everything but channels and groups. A 1-D convolution is a 2-D one on images with one row.
inline ConvShape window_shape(at::IntArrayRef image, const Layer& layer, int64_t kh, int64_t kw,
                              bool flat) {
  ConvShape s{};
  s.n = image[0], s.ci = s.ldx = image[1], s.h = image[2], s.w = image[3];
  s.kh = kh, s.kw = kw;
  s.sh = flat ? 1 : layer.stride.front(), s.sw = layer.stride.back();
  const Sides sides = sides_of(layer.padding, flat);
  s.ph = sides.top, s.pw = sides.left;
  s.dh = flat ? 1 : layer.dilation.front(), s.dw = layer.dilation.back();
  s.oh = (s.h + sides.top + sides.bottom - s.dh * (s.kh - 1) - 1) / s.sh + 1;
  s.ow = (s.w + sides.left + sides.right - s.dw * (s.kw - 1) - 1) / s.sw + 1;
  return s;
}

inline ConvShape shape_of(at::IntArrayRef image, const Layer& layer) {
  if (!layer.is_convolution()) {
    ConvShape s = window_shape(image, layer, layer.extent[0], layer.extent[1], false);
    s.co = s.ldy = s.groups = s.ci;
    return s;
  }
  const Tensor& weight = layer.weight;
  const bool flat = weight.dim() == 3;
  ConvShape s = window_shape(image, layer, flat ? 1 : weight.size(2), weight.size(-1), flat);
  s.co = s.ldy = weight.size(0), s.groups = layer.groups;
  return s;
}

inline std::array<int64_t, 4> sizes_behind(at::IntArrayRef image, const Layer& layer) {
  switch (layer.kind) {
    case Kind::mean:
      return {image[0], image[1], 1, 1};
    case Kind::part:
    case Kind::slice:
      return {image[0], layer.channels(), image[2], image[3]};
    case Kind::pointwise:
      return {image[0], image[1], image[2], image[3]};
    case Kind::enlarged:
      return {image[0], image[1], image[2] * layer.stride[0], image[3] * layer.stride[1]};
    default:
      const ConvShape s = shape_of(image, layer);
      return {s.n, s.co, s.oh, s.ow};
  }
}

}  // namespace kd
