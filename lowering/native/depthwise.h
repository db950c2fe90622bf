// Convolutions of each channel, or of each group of a few channels, with a kernel of its own.
// Channels are the lanes.
#pragma once

#include "blocked.h"
#include "conv_shape.h"
#include "depthwise_tiles.h"

namespace kd {

// Whether these are kernels for that: as many outputs as inputs, and whole groups in each vector.
static inline bool depthwise_suits(const ConvShape& s) {
  if (s.groups < 2 || s.ci != s.co) return false;
  const int64_t channels = s.group_inputs();
  if (channels == 1) return true;
  return (channels == 2 || channels == 4 || channels == 8) && kLanes % channels == 0 &&
         s.ci >= kLanes;
}

// Of few channels, the pixels whose channels fill a vector side by side; else one.
static inline int64_t pixels_in_vector(int64_t channels) {
  return channels > 0 && channels < kLanes && kLanes % channels == 0 ? kLanes / channels : 1;
}

static inline int64_t depthwise_packed_size(const ConvShape& s) {
  return packed_size(s.depth(), s.ci);
}

// From [co][channel][tap], channels being those of a group, to [vector][tap][channel][lane]. Channels
// that fill a vector several times are there as often.
static inline void depthwise_pack(float* packed, const float* w, const float* scale,
                                  const ConvShape& s) {
  const int64_t taps = s.kh * s.kw, channels = s.group_inputs();
  const int64_t filled = pixels_in_vector(s.ci) * s.ci;
  for (int64_t v = 0; v < panels_of(s.ci); v++) {
    const int64_t first = first_channel(s.ci, v);
    for (int64_t tap = 0; tap < taps; tap++) {
      for (int64_t i = 0; i < channels; i++, packed += kLanes) {
        for (int lane = 0; lane < kLanes; lane++) {
          const int64_t c = s.ci < filled ? (first + lane) % s.ci : first + lane;
          const float factor = scale != nullptr && c < s.ci ? scale[c] : 1.0f;
          packed[lane] = c < s.ci ? w[(c * channels + i) * taps + tap] * factor : 0.0f;
        }
      }
    }
  }
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

// Whether what the epilogue reads lies as the outputs do, in memory without gaps.
static inline bool reads_alike(const Epilogue& e, int64_t channels) {
  return (!e.before || e.ld_before == channels) && (!e.times || e.ld_times == channels) &&
         (!e.after || e.ld_after == channels);
}

// One line of output pixels, some of its channels.
class DepthwiseLine {
 public:
  DepthwiseLine(const ConvShape& s, Lines<const float> x, const float* packed, Lines<float> y,
                const Epilogue& e, int64_t line, Range vectors)
      : s_(s), packed_(packed), e_(e), line_(line), limits_(e),
        in_registers_(limits_.enough && !e.before && !e.times && !e.after),
        without_gaps_(vectors.size() == panels_of(s.ci) && s.ldy == s.ci && reads_alike(e, s.ci)),
        in_vector_(s.ldx == s.ci && s.ldy == s.ci && s.sw == 1 ? pixels_in_vector(s.ci) : 1) {
    const Limits none{Epilogue{}};
    const int64_t oy = line % s.oh, image = line / s.oh;
    rows_ = taps_inside(oy, s.kh, s.sh, s.ph, s.dh, s.h);
    span_.shape = &s;
    span_.rows = rows_.size();
    span_.vectors = vectors;
    span_.bias = e.bias;
    span_.low = in_registers_ ? limits_.low : none.low;
    span_.high = in_registers_ ? limits_.high : none.high;
    const int64_t above = image * s.h + oy * s.sh - s.ph + rows_.begin * s.dh;
    input_ = x.data + (above - x.first) * s.w * s.ldx;
    output_ = y.data + (line - y.first) * s.ow * s.ldy;
    if (in_vector_ > 1 && e.bias)
      for (int64_t i = 0; i < kLanes; i++) repeated_bias_[i] = e.bias[i % s.ci];
  }

  void compute() {
    if (has_tiles(s_)) return in_tiles();
    const Range whole = whole_columns();
    const int64_t filled = whole.begin + whole.size() / in_vector_ * in_vector_;
    for (int64_t ox = 0; ox < whole.begin; ox++) some_pixels({ox, ox + 1}, 1);
    some_pixels({whole.begin, filled}, in_vector_);
    some_pixels({filled, whole.end}, 1);
    for (int64_t ox = whole.end; ox < s_.ow; ox++) some_pixels({ox, ox + 1}, 1);
  }

 private:
  Range columns(int64_t ox) const { return taps_inside(ox, s_.kw, s_.sw, s_.pw, s_.dw, s_.w); }

  // Those of which no tap is beyond the image's sides.
  Range whole_columns() const {
    const int64_t begin = std::min(ceil_div(s_.pw, s_.sw), s_.ow);
    const int64_t last = s_.w + s_.pw - (s_.kw - 1) * s_.dw - 1;
    const int64_t end = last < 0 ? begin : std::min(last / s_.sw + 1, s_.ow);
    return {begin, std::max(begin, end)};
  }

  // Pixels that need the same taps, so many in each vector.
  void some_pixels(Range mine, int64_t in_vector) {
    const bool few = in_vector == 1 && s_.ci < kLanes;
    const int64_t vectors = mine.size() / in_vector, tiles = ceil_div(vectors, kMostPixels);
    span_.bias = in_vector > 1 && e_.bias ? repeated_bias_ : e_.bias;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const Range some = part_of(vectors, tile, tiles);
      const int64_t first = mine.begin + some.begin * in_vector;
      place(first, columns(first), in_vector);
      finish(first, some.size() * in_vector,
             any_tile_of(s_.group_inputs(), static_cast<int>(some.size()), few, kPixelCounts));
    }
  }

  void in_tiles() {
    const int64_t tiles = ceil_div(s_.ow, kMostPixels);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const Range some = part_of(s_.ow, tile, tiles);
      const int pixels = static_cast<int>(some.size());
      const int64_t first = some.begin * s_.sw - s_.pw, needed = (pixels - 1) * s_.sw + s_.kw;
      span_.inside = {std::max<int64_t>(-first, 0), std::min(s_.w - first, needed)};
      const bool edge = span_.inside.size() < needed;
      place(some.begin, {0, s_.kw}, 1);
      finish(some.begin, pixels, edge ? depthwise_tile_of<true>(s_, pixels, kPixelCounts)
                                      : depthwise_tile_of<false>(s_, pixels, kPixelCounts));
    }
  }

  void place(int64_t pixel, Range taps, int64_t in_vector) {
    span_.columns = taps.size();
    span_.x = input_ + (pixel * s_.sw - s_.pw + taps.begin * s_.dw) * s_.ldx;
    span_.packed = packed_ + (rows_.begin * s_.kw + taps.begin) * s_.group_inputs() * kLanes;
    span_.y = output_ + pixel * s_.ldy;
    span_.step = in_vector * s_.sw * s_.ldx;
    span_.pixel = in_vector * s_.ldy;
  }

  void finish(int64_t pixel, int64_t pixels, DepthwiseTile tile) const {
    tile(span_);
    if (in_registers_) return;
    const int64_t c = span_.vectors.begin * kLanes;
    const int64_t c_end = std::min(span_.vectors.end * kLanes, s_.ci);
    const int64_t rows = without_gaps_ ? 1 : pixels;
    Epilogue left = e_.at(line_ * s_.ow + pixel, c);
    left.bias = nullptr;  // which the tile added
    finish_stored(span_.y + c, s_.ldy, static_cast<int>(rows),
                  static_cast<int>(without_gaps_ ? pixels * s_.ci : c_end - c), span_.y + c, s_.ldy,
                  left, Finish{false, true, 0, 0});
  }

  const ConvShape& s_;
  const float* packed_;
  const Epilogue& e_;
  int64_t line_;
  Limits limits_;
  bool in_registers_, without_gaps_;
  int64_t in_vector_;  // pixels
  Range rows_{0, 0};
  DepthwiseSpan span_{};
  const float* input_;
  float* output_;
  float repeated_bias_[kLanes];
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
