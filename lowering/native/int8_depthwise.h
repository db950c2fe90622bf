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
                                                               const int64_t (&at)[4], uint8_t flip) {
#if defined(__SSE2__)
  const __m128i sign = _mm_set1_epi8(static_cast<char>(flip));
  const auto get = [&](int i) {
    return _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from[i] + at[i])), sign);
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
    for (int64_t j = 0; j < 4; j++) to[4 * c + j] = static_cast<uint8_t>(from[j][at[j] + c] ^ flip);
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
  // So many bytes of words stay in the first cache, from one line of outputs to the next.
  static constexpr int64_t kBytes = 24 << 10;

  DepthwiseBlock(const WordImage& image, const float* packed, const Requantized<Out>& rest, Range channels)
      : taps_(image.taps), s_(taps_.s), image_(image), packed_(packed + channels.begin), rest_(rest),
        channels_(channels), wide_(channels.size()), line_(taps_.places * wide_),
        words_(scratch<0>((taps_.kept + 1) * line_)), sums_(scratch<1>(s_.ow * wide_)),
        holds_(static_cast<size_t>(taps_.kept), -1), lines_(static_cast<size_t>(s_.kh)) {
    make(zeros(), nullptr);
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

  // Words of one of the lines of all images; nullptr: of one that is above or below.
  void make(float* words, const uint8_t* line) const {
    const int64_t end = std::min(channels_.end, s_.ci), whole = (end - channels_.begin) / kAtOnce * kAtOnce;
    const int64_t left = end - channels_.begin - whole, places = taps_.places, step = taps_.step;
    const uint8_t flip = image_.flip;
    uint8_t beyond[kAtOnce];
    std::memset(beyond, image_.outside, kAtOnce);
    for (int64_t place = 0; place < places; place++) {
      auto* const to = reinterpret_cast<uint8_t*>(words + place * wide_);
      const uint8_t* from[4];
      int64_t moves[4];  // from a channel to the next: what is beyond the line is the same for all
      for (int64_t j = 0; j < 4; j++) {
        const int64_t x = place * step - s_.pw + j * s_.dw;
        const bool inside = line != nullptr && x >= 0 && x < s_.w;
        from[j] = inside ? line + x * s_.ci + channels_.begin : beyond;
        moves[j] = inside;
      }
      for (int64_t c = 0; c < whole; c += kAtOnce)
        side_by_side(to + 4 * c, from, {c * moves[0], c * moves[1], c * moves[2], c * moves[3]}, flip);
      if (left > 0) make_last(to + 4 * whole, from, moves, whole, left);
    }
  }

  // The channels that are less than sixteen.
  void make_last(uint8_t* to, const uint8_t* const (&from)[4], const int64_t (&moves)[4], int64_t c,
                 int64_t count) const {
    uint8_t copies[4][kAtOnce] = {};
    for (int64_t j = 0; j < 4; j++)
      std::memcpy(copies[j], from[j] + c * moves[j], static_cast<size_t>(count));
    side_by_side(to, {copies[0], copies[1], copies[2], copies[3]}, {0, 0, 0, 0}, image_.flip);
  }

  void sum_line() const {
    int64_t x = 0;
    for (; x + 8 <= s_.ow; x += 8) sum_pixels<8>(x);
    for (; x + 3 <= s_.ow; x += 3) sum_pixels<3>(x);
    for (; x < s_.ow; x++) sum_pixels<1>(x);
  }

  // sums[pixel][channel] of neighbouring outputs.
  template <int pixels>
  void sum_pixels(int64_t first) const {
    const int64_t step = s_.sw / taps_.step * wide_, next = 4 * s_.dw / taps_.step * wide_;
    const int64_t rows = s_.kh, fours = taps_.fours, weights = taps_.channels;
    for (int64_t c = 0; c < wide_; c += kLanes) {
      vec of[pixels] = {};
      const float* w = packed_ + c;
      for (int64_t i = 0; i < rows; i++) {
        const float* words = lines_[static_cast<size_t>(i)] + first * step + c;
        for (int64_t f = 0; f < fours; f++, words += next, w += weights) {
          const vec weight = load(w);
#pragma GCC unroll 8
          for (int t = 0; t < pixels; t++)
            of[t] = Fours::multiply_add(load(words + t * step), weight, of[t]);
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < pixels; t++) store(sums_ + (first + t) * wide_ + c, of[t]);
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
  std::vector<const float*> lines_;
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
