// Convolutions of each channel of bytes with a kernel of its own. Of each channel, the bytes that four taps in
// a row read are put side by side, once for all rows of taps: they are words, which one instruction multiplies
// by the words of the weight.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <vector>

#include "conv_shape.h"
#include "int8_product.h"
#include "requantized.h"

namespace kd::int8 {

constexpr int64_t kAtOnce = 16;  // channels that are put side by side

// What such a convolution is made of, worked out once.
struct Taps {
  const ConvShape& s;
  int64_t channels;  // in whole blocks
  int64_t fours;     // of taps in a row
  int64_t step;      // only places that some output begins at have words, where that is regular
  int64_t places;    // of a line that have words
  int64_t kept;      // lines of inputs that outputs below each other share

  explicit Taps(const ConvShape& shape)
      : s(shape), channels(ceil_div(s.ci, kAtOnce) * kAtOnce), fours(ceil_div(s.kw, 4)),
        step(4 * s.dw % s.sw == 0 ? s.sw : 1), places(((s.ow - 1) * s.sw + (fours - 1) * 4 * s.dw) / step + 1),
        kept((s.kh - 1) * s.dh + 1) {}

  // In floats, which words and, behind them, sums of the weights of each channel are.
  int64_t packed_size() const { return (s.kh * fours + 1) * channels; }
  // From [channel][row][tap].
  void pack(float* packed, const int8_t* weight) const {
    std::memset(packed, 0, static_cast<size_t>(packed_size()) * sizeof(float));
    auto* const bytes = reinterpret_cast<int8_t*>(packed);
    auto* const sums = reinterpret_cast<int32_t*>(packed) + s.kh * fours * channels;
    for (int64_t c = 0; c < s.ci; c++) {
      for (int64_t i = 0; i < s.kh; i++) {
        for (int64_t j = 0; j < s.kw; j++) {
          const int8_t tap = weight[(c * s.kh + i) * s.kw + j];
          bytes[((i * fours + j / 4) * channels + c) * 4 + j % 4] = tap;
          sums[c] += tap;
        }
      }
    }
  }
  const int32_t* sums(const float* packed) const {
    return reinterpret_cast<const int32_t*>(packed) + s.kh * fours * channels;
  }
};

// Of sixteen channels: words of the bytes of four pixels.
__attribute__((always_inline)) static inline void side_by_side(uint8_t* to, const uint8_t* const (&from)[4],
                                                               uint8_t flip) {
#if defined(__SSE2__)
  const __m128i sign = _mm_set1_epi8(static_cast<char>(flip));
  const auto get = [&](int i) {
    return _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from[i])), sign);
  };
  const __m128i a = get(0), b = get(1), c = get(2), d = get(3);
  const __m128i low = _mm_unpacklo_epi8(a, b), low_right = _mm_unpacklo_epi8(c, d);
  const __m128i high = _mm_unpackhi_epi8(a, b), high_right = _mm_unpackhi_epi8(c, d);
  auto* const words = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(words, _mm_unpacklo_epi16(low, low_right));
  _mm_storeu_si128(words + 1, _mm_unpackhi_epi16(low, low_right));
  _mm_storeu_si128(words + 2, _mm_unpacklo_epi16(high, high_right));
  _mm_storeu_si128(words + 3, _mm_unpackhi_epi16(high, high_right));
#else
  for (int64_t c = 0; c < kAtOnce; c++)
    for (int64_t j = 0; j < 4; j++) to[4 * c + j] = static_cast<uint8_t>(from[j][c] ^ flip);
#endif
}

// An image whose lines become words. `outside`: what stands for zero around it, as it is in the image.
struct WordImage {
  Taps taps;
  const uint8_t* image;
  uint8_t flip, outside;
};

// Some channels of some lines of outputs, counted over all images.
template <class Out>
class DepthwiseBlock {
 public:
  // So many bytes of words stay in the second cache, from one line of outputs to the next. (Fewer channels at
  // a time, whose words stay in the first, were up to twice as slow: a Xeon.)
  static constexpr int64_t kBytes = 256 << 10;

  DepthwiseBlock(const WordImage& image, const float* packed, const Requantized<Out>& rest, Range channels)
      : taps_(image.taps), s_(taps_.s), image_(image), packed_(packed + channels.begin), rest_(rest),
        channels_(channels), wide_(channels.size()), line_(taps_.places * wide_),
        words_(scratch<0>((taps_.kept + 1) * line_)), sums_(scratch<1>(s_.ow * wide_)),
        holds_(static_cast<size_t>(taps_.kept), -1), lines_(static_cast<size_t>(s_.kh)),
        starts_(lines_.size()) {
    std::memset(zeros(), image_.outside ^ image_.flip, static_cast<size_t>(line_) * sizeof(float));
  }

  void compute(Range outputs) {
    const int64_t columns = std::min(channels_.end, s_.ci) - channels_.begin;
    const auto finish = rest_.finisher(rest_.e.act);
    for (int64_t line = outputs.begin; line < outputs.end; line++) {
      read_for(line);
      sum_line();
      finish(rest_.at(sums_, wide_, line * s_.ow, s_.ow, channels_.begin, columns), {0, s_.ow});
    }
  }

 private:
  // A line that is above or below the image.
  float* zeros() const { return words_ + taps_.kept * line_; }

  // The lines that one of outputs reads: those that are not there yet are made, where their numbers say.
  void read_for(int64_t output) {
    const int64_t first = output / s_.oh * s_.h, top = output % s_.oh * s_.sh - s_.ph;
    for (int64_t i = 0; i < s_.kh; i++) {
      const int64_t y = top + i * s_.dh, number = first + y;
      const float*& line = lines_[static_cast<size_t>(i)];
      line = zeros();
      if (y < 0 || y >= s_.h) continue;
      const int64_t place = number % taps_.kept;
      float* const at = words_ + place * line_;
      int64_t& held = holds_[static_cast<size_t>(place)];
      if (held != number) make(at, image_.image + number * s_.w * s_.ci);
      held = number, line = at;
    }
  }

  // Words of one of the lines of all images.
  void make(float* words, const uint8_t* line) const {
    const int64_t end = std::min(channels_.end, s_.ci), whole = (end - channels_.begin) / kAtOnce * kAtOnce;
    const int64_t left = end - channels_.begin - whole, places = taps_.places, step = taps_.step;
    const int64_t next = s_.dw * s_.ci, within = s_.w - 3 * s_.dw;
    const uint8_t flip = image_.flip;
    for (int64_t place = 0; place < places; place++) {
      auto* to = reinterpret_cast<uint8_t*>(words + place * wide_);
      const int64_t x = place * step - s_.pw;
      if (x < 0 || x >= within) {
        make_at_edge(to, line, x);
        continue;
      }
      const uint8_t* from = line + x * s_.ci + channels_.begin;
      for (int64_t c = 0; c < whole; c += kAtOnce, to += 4 * kAtOnce, from += kAtOnce)
        side_by_side(to, {from, from + next, from + 2 * next, from + 3 * next}, flip);
      if (left > 0) make_last(to, {from, from + next, from + 2 * next, from + 3 * next}, left);
    }
  }

  // Where some of the four pixels are beyond the line.
  void make_at_edge(uint8_t* to, const uint8_t* line, int64_t x) const {
    const int64_t end = std::min(channels_.end, s_.ci);
    uint8_t beyond[kAtOnce];
    std::memset(beyond, image_.outside, kAtOnce);
    for (int64_t c = channels_.begin; c < end; c += kAtOnce, to += 4 * kAtOnce) {
      const uint8_t* from[4];
      for (int64_t j = 0; j < 4; j++) {
        const int64_t pixel = x + j * s_.dw;
        const bool inside = pixel >= 0 && pixel < s_.w;
        from[j] = inside ? line + pixel * s_.ci + c : beyond;
      }
      if (end - c >= kAtOnce)
        side_by_side(to, from, image_.flip);
      else
        make_last(to, from, end - c);
    }
  }

  // Of so many channels, sixteen at most.
  void make_last(uint8_t* to, const uint8_t* const (&from)[4], int64_t count) const {
    uint8_t copies[4][kAtOnce] = {};
    for (int64_t j = 0; j < 4; j++) std::memcpy(copies[j], from[j], static_cast<size_t>(count));
    side_by_side(to, {copies[0], copies[1], copies[2], copies[3]}, image_.flip);
  }

  void sum_line() {
    int64_t x = 0;
    for (; x + 8 <= s_.ow; x += 8) sum_pixels<8>(x);
    for (; x + 3 <= s_.ow; x += 3) sum_pixels<3>(x);
    for (; x < s_.ow; x++) sum_pixels<1>(x);
  }

  template <int pixels>
  void sum_pixels(int64_t first) {
    const int64_t step = s_.sw / taps_.step * wide_;
    float* const sums = sums_ + first * wide_;
    for (size_t i = 0; i < lines_.size(); i++) starts_[i] = lines_[i] + first * step;
    taps_.fours == 1 ? sum_pixels<pixels, true>(step, sums) : sum_pixels<pixels, false>(step, sums);
  }

  // sums[pixel][channel] of neighbouring outputs. `one`: a row of taps is one word.
  template <int pixels, bool one>
  void sum_pixels(int64_t step, float* sums) const {
    const int64_t next = 4 * s_.dw / taps_.step * wide_, fours = one ? 1 : taps_.fours;
    const int64_t weights = taps_.channels, wide = wide_;
    const float* const* const end = starts_.data() + starts_.size();
    for (int64_t c = 0; c < wide; c += kLanes) {
      vec of[pixels] = {};
      const float* w = packed_ + c;
      for (const float* const* start = starts_.data(); start < end; start++) {
        const float* words = *start + c;
        for (int64_t f = 0; f < fours; f++, words += next, w += weights) {
          const vec weight = load(w);
#pragma GCC unroll 8
          for (int t = 0; t < pixels; t++)
            of[t] = Fours::multiply_add(load(words + t * step), weight, of[t]);
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < pixels; t++) store(sums + t * wide + c, of[t]);
    }
  }

  const Taps& taps_;
  const ConvShape& s_;
  const WordImage& image_;
  const float* packed_;
  const Requantized<Out>& rest_;
  Range channels_;
  int64_t wide_, line_;  // channels; words of a line
  float *words_, *sums_;
  std::vector<int64_t> holds_;  // which line of all images is in each place
  std::vector<const float*> lines_, starts_;  // of a line of outputs; of some of its pixels
};

template <class Out>
void depthwise(const WordImage& image, const float* packed, const Requantized<Out>& rest, int threads) {
  const Taps& taps = image.taps;
  const ConvShape& s = taps.s;
  const int64_t lines = s.n * s.oh, some = taps.channels / kAtOnce;
  const double of_pixel = static_cast<double>(taps.channels * (s.kh * taps.fours + 8));
  threads = useful_threads(threads, static_cast<double>(s.pixels()) * of_pixel, kWorkPerThread);
  const int64_t bytes = taps.kept * taps.places * kAtOnce * 4;
  const int64_t across = ceil_div(some, std::max<int64_t>(DepthwiseBlock<Out>::kBytes / bytes, 1));
  const int64_t wanted = threads > 1 ? 4 * static_cast<int64_t>(threads) : 1;
  const int64_t down = std::min(ceil_div(wanted, across), lines);
  for_each_item(down * across, threads, [&](int64_t item) {
    const Range mine = part_of(some, item % across, across);
    const Range channels{mine.begin * kAtOnce, mine.end * kAtOnce};
    DepthwiseBlock<Out>(image, packed, rest, channels).compute(part_of(lines, item / across, down));
  });
}

}  // namespace kd::int8
