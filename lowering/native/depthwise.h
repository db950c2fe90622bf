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
  Range inside;           // of the columns of inputs, those that the image has
  Range vectors;
  const float* bias;
  float low, high;
};

// Adds the bias, applies the limits and stores the pixels, for one vector of channels at a time.
class DepthwiseStore {
 public:
  explicit DepthwiseStore(const DepthwiseSpan& span)
      : y_(span.y), pixel_(span.shape->ldy), bias_(span.bias), low_(splat(span.low)),
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

// kw taps in each row, neighbours: an input is loaded once for all the pixels that need it. `edge`: some
// of the inputs are beyond the image's sides.
template <int pixels, int kw, int stride, bool edge>
void depthwise_tile(const DepthwiseSpan& span) {
  const ConvShape& s = *span.shape;
  const int64_t line = s.dh * s.w * s.ldx, pixel = s.ldx, rows = span.rows;
  const DepthwiseStore finish(span);
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

// Any kernel, and any part of it where the image ends.
template <int pixels>
void depthwise_tile_of_any_kernel(const DepthwiseSpan& span) {
  const ConvShape& s = *span.shape;
  const int64_t line = s.dh * s.w * s.ldx, tap = s.dw * s.ldx, step = s.sw * s.ldx;
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
  const int64_t line = s.dh * s.w * s.ldx, tap = s.dw * s.ldx, step = s.sw * s.ldx;
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
      const float* x = span.x + (r * s.dh * s.w + q * s.dw) * s.ldx;
      sum = multiply_add(load_first(x, count), load(span.packed + (r * s.kw + q) * kLanes), sum);
    }
  }
  if (span.bias) sum += load_first(span.bias, count);
  store_first(span.y, clamp(sum, splat(span.low), splat(span.high)), count);
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

// Of other kernels, and of groups of channels. `whole`: no tap is beyond the image's sides.
template <int... pixels_less_one>
static inline DepthwiseTile any_tile_of(const ConvShape& s, int pixels, bool whole,
                                        std::integer_sequence<int, pixels_less_one...>) {
  static constexpr DepthwiseTile tiles[][kMostPixels] = {
      {depthwise_tile_of_any_kernel<pixels_less_one + 1>...},
      {grouped_tile<pixels_less_one + 1, 2>...},
      {grouped_tile<pixels_less_one + 1, 4>...},
      {grouped_tile<pixels_less_one + 1, 8>...}};
  const int64_t channels = s.group_inputs();
  if (channels > 1) return tiles[channels == 2 ? 1 : channels == 4 ? 2 : 3][pixels - 1];
  return whole ? tiles[0][pixels - 1] : depthwise_tile_of_any_kernel<1>;
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
class DepthwiseLine {
 public:
  DepthwiseLine(const ConvShape& s, Lines<const float> x, const float* packed, Lines<float> y,
                const Epilogue& e, int64_t line, Range vectors)
      : s_(s), packed_(packed), e_(e), line_(line), limits_(e),
        in_registers_(limits_.enough && !e.before && !e.times && !e.after) {
    const Limits none{Epilogue{}};
    const int64_t oy = line % s.oh, image = line / s.oh;
    rows_ = taps_inside(oy, s.kh, s.sh, s.ph, s.dh, s.h);
    span_.shape = &s;
    span_.rows = rows_.size();
    span_.vectors = vectors;
    span_.bias = in_registers_ ? e.bias : nullptr;
    span_.low = in_registers_ ? limits_.low : none.low;
    span_.high = in_registers_ ? limits_.high : none.high;
    const int64_t above = image * s.h + oy * s.sh - s.ph + rows_.begin * s.dh;
    input_ = x.data + (above - x.first) * s.w * s.ldx;
    output_ = y.data + (line - y.first) * s.ow * s.ldy;
  }

  void compute() {
    if (has_tiles(s_)) return in_tiles();
    for (int64_t ox = 0; ox < s_.ow;) {
      int64_t end = ox;
      while (end < s_.ow && columns(end).size() == s_.kw && s_.ci >= kLanes) end++;
      end = std::max(end, ox + 1);
      const int64_t tiles = ceil_div(end - ox, kMostPixels);
      for (int64_t tile = 0; tile < tiles; tile++) {
        const Range some = part_of(end - ox, tile, tiles);
        const int pixels = static_cast<int>(some.size());
        const Range taps = columns(ox + some.begin);
        const bool whole = taps.size() == s_.kw;
        place(ox + some.begin, taps);
        finish(ox + some.begin, pixels,
               s_.ci < kLanes ? depthwise_of_few_channels
                              : any_tile_of(s_, pixels, whole, kPixelCounts));
      }
      ox = end;
    }
  }

 private:
  Range columns(int64_t ox) const { return taps_inside(ox, s_.kw, s_.sw, s_.pw, s_.dw, s_.w); }

  void in_tiles() {
    const int64_t tiles = ceil_div(s_.ow, kMostPixels);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const Range some = part_of(s_.ow, tile, tiles);
      const int pixels = static_cast<int>(some.size());
      const int64_t first = some.begin * s_.sw - s_.pw, needed = (pixels - 1) * s_.sw + s_.kw;
      span_.inside = {std::max<int64_t>(-first, 0), std::min(s_.w - first, needed)};
      const bool edge = span_.inside.size() < needed;
      place(some.begin, {0, s_.kw});
      finish(some.begin, pixels, edge ? depthwise_tile_of<true>(s_, pixels, kPixelCounts)
                                      : depthwise_tile_of<false>(s_, pixels, kPixelCounts));
    }
  }

  void place(int64_t pixel, Range taps) {
    span_.columns = taps.size();
    span_.x = input_ + (pixel * s_.sw - s_.pw + taps.begin * s_.dw) * s_.ldx;
    span_.packed = packed_ + (rows_.begin * s_.kw + taps.begin) * s_.group_inputs() * kLanes;
    span_.y = output_ + pixel * s_.ldy;
  }

  void finish(int64_t pixel, int pixels, DepthwiseTile tile) const {
    tile(span_);
    if (in_registers_) return;
    const int64_t c = span_.vectors.begin * kLanes;
    const int64_t c_end = std::min(span_.vectors.end * kLanes, s_.ci);
    finish_stored(span_.y + c, s_.ldy, pixels, static_cast<int>(c_end - c), span_.y + c, s_.ldy,
                  e_.at(line_ * s_.ow + pixel, c), Finish{false, true, 0, 0});
  }

  const ConvShape& s_;
  const float* packed_;
  const Epilogue& e_;
  int64_t line_;
  Limits limits_;
  bool in_registers_;
  Range rows_{0, 0};
  DepthwiseSpan span_{};
  const float* input_;
  float* output_;
};

// Floats of the inputs of one output line that are worked on at a time: they stay in the first cache
// until the next line, which needs most of them again.
constexpr int64_t kLineFloats = 8 * 1024;
constexpr int64_t kFewestVectors = 4, kLinesOfItem = 8;

// Lines of outputs, some of their channels.
static inline void depthwise_lines(const ConvShape& s, Lines<const float> x, const float* packed,
                                   Lines<float> y, const Epilogue& e, Range lines, Range vectors) {
  const int64_t at_once = std::max(kLineFloats / (s.kh * s.w * kLanes), kFewestVectors);
  // The last vector may overlap the one before it, which has to be of the same part.
  const int64_t parts = lines.size() > 1 ? std::max<int64_t>(vectors.size() / at_once, 1) : 1;
  for (int64_t i = 0; i < parts; i++) {
    const Range part = part_of(vectors.size(), i, parts);
    const Range some{vectors.begin + part.begin, vectors.begin + part.end};
    for (int64_t line = lines.begin; line < lines.end; line++)
      DepthwiseLine(s, x, packed, y, e, line, some).compute();
  }
}

static inline void depthwise(const ConvShape& s, const float* x, const float* packed, float* y,
                             const Epilogue& e, int threads) {
  const int64_t lines = s.n * s.oh, vectors = panels_of(s.ci);
  if (lines == 0) return;
  const double work = static_cast<double>(s.pixels()) * s.ci * s.depth();
  threads = useful_threads(threads, work, kWorkPerThread);
  // Neighbouring lines need the same inputs, so an item is some lines of a few vectors.
  const int64_t wanted = threads > 1 ? 8 * static_cast<int64_t>(threads) : 1;
  const int64_t most_across = std::max<int64_t>(vectors / kFewestVectors, 1);
  const int64_t tall = std::min(wanted, ceil_div(lines, kLinesOfItem));
  const int64_t across = std::min(ceil_div(wanted, tall), most_across);
  const int64_t down = std::min(ceil_div(wanted, across), lines);
  for_each_item(down * across, threads, [&](int64_t item) {
    const Range mine = part_of(lines, item / across, down);
    const Range channels = part_of(vectors, item % across, across);
    depthwise_lines(s, {x}, packed, {y}, e, mine, channels);
  });
}

}  // namespace kd
