// Convolutions by products of halves. Images are of floats, which are rounded on their way to
// the product, or of such numbers; sums and all that follows are floats.
#pragma once

#include "half_product.h"
#include "conv.h"

#if defined(__AVX512BF16__)

namespace kd::halves {

// --- floats, rounded ------------------------------------------------------------------------------

static inline void put_both(BFloat16* to, vec first, vec second) {
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  std::memcpy(to, &both, sizeof both);
}
static inline void put_both(Half* to, vec first, vec second) {
  store_floats(to, first);
  store_floats(to + kLanes, second);
}

// `count` floats as pairs; of an odd one the partner is zero.
template <class Number>
void round_row(float* pairs, const float* from, int64_t count) {
  auto* const to = reinterpret_cast<Number*>(pairs);
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes)
    put_both(to + i, load(from + i), load(from + i + kLanes));
  for (; i < count; i += kLanes) {
    const int some = static_cast<int>(std::min<int64_t>(count - i, kLanes));
    put(to + i, load_first(from + i, some), some + (some & 1));
  }
}

static inline void zero_pairs(float* to, int64_t count) {
  if (count > 0) std::memset(to, 0, static_cast<size_t>(count) * sizeof(float));
}

// A few rows of floats are made at a time, so that they are in the first cache when they are rounded.
template <class Of, class Rows>
struct RoundedRows {
  using Number = Of;
  static constexpr int64_t kAtOnce = 8;
  Rows a;
  int64_t k;

  Block block(int64_t row, int64_t rows, float* buffer) const {
    const int64_t pairs = pairs_of(k), ld = spread_out(pairs), own = ceil_div(k, 2);
    float* const floats = scratch<2>(kAtOnce * (k + 64));
    for (int64_t at = 0; at < rows; at += kAtOnce) {
      const int64_t some = std::min(kAtOnce, rows - at);
      const Block made = a.block(row + at, some, 0, k, floats);
      for (int64_t i = 0; i < some; i++) {
        float* const to = buffer + (at + i) * ld;
        round_row<Number>(to, made.data + i * made.across, k);
        zero_pairs(to + own, pairs - own);
      }
    }
    return {buffer, ld, 1};
  }
};

// The convolution of pairs of channels, as if a pair were one float.
static inline ConvShape in_pairs(ConvShape s) {
  s.ci = s.groups * ceil_div(s.group_inputs(), 2), s.ldx /= 2;
  return s;
}

static inline Block gathered(const ImageRows& all, int64_t row, int64_t rows, int64_t depth,
                             float* buffer) {
  const Block made = all.block(row, rows, 0, depth, buffer);
  const int64_t more = pairs_of(2 * depth) - depth;
  for (int64_t i = 0; more > 0 && i < rows; i++)
    zero_pairs(buffer + i * made.across + depth, more);
  return made;
}

// Rows with the inputs under all taps.
template <class Of>
struct GatheredPairs {
  using Number = Of;
  ConvShape pairs;
  ImageRows all;

  GatheredPairs(const ConvShape& s, const Number* x, int64_t group)
      : pairs(in_pairs(s)), all(pairs, reinterpret_cast<const float*>(x), group) {}

  Block block(int64_t row, int64_t rows, float* buffer) const {
    return gathered(all, row, rows, pairs.depth(), buffer);
  }
};

// The same of floats: the lines of an image that a block needs are rounded first.
template <class Of>
class RoundedImageRows {
 public:
  using Number = Of;

  RoundedImageRows(const ConvShape& shape, const float* x, int64_t group)
      : s_(shape), x_(x + group * shape.group_inputs()) {}

  Block block(int64_t row, int64_t rows, float* buffer) const {
    const int64_t depth = in_pairs(s_).depth(), ld = spread_out(depth);
    const int64_t image_rows = s_.oh * s_.ow, end = row + rows;
    for (int64_t at = row; at < end;) {
      const int64_t image = at / image_rows, last = std::min(end, (image + 1) * image_rows);
      const int64_t first = at % image_rows;
      of_image(image, {first, first + last - at}, buffer + (at - row) * ld);
      at = last;
    }
    return {buffer, ld, 1};
  }

 private:
  void of_image(int64_t image, Range pixels, float* to) const {
    const auto within = [&](int64_t y) { return std::min(std::max<int64_t>(y, 0), s_.h); };
    const int64_t above = pixels.begin / s_.ow * s_.sh - s_.ph;
    const int64_t below = (pixels.end - 1) / s_.ow * s_.sh - s_.ph + (s_.kh - 1) * s_.dh + 1;
    const Range lines{within(above), within(below)};
    ConvShape part = in_pairs(s_);
    part.n = 1, part.h = lines.size(), part.ph += lines.begin;
    part.ldx = part.ci = part.group_inputs(), part.groups = 1;
    const float* const from = x_ + (image * s_.h + lines.begin) * s_.w * s_.ldx;
    const float* const made = rounded_pixels(from, lines.size() * s_.w, part.ldx);
    gathered(ImageRows(part, made, 0), pixels.begin, pixels.size(), part.depth(), to);
  }

  const float* rounded_pixels(const float* from, int64_t pixels, int64_t pairs) const {
    const int64_t inputs = s_.group_inputs();
    float* const made = scratch<2>(pixels * pairs + kLanes);
    if (inputs == s_.ldx && inputs % 2 == 0) {
      round_row<Number>(made, from, pixels * inputs);
      return made;
    }
    for (int64_t i = 0; i < pixels; i++) round_row<Number>(made + i * pairs, from + i * s_.ldx, inputs);
    return made;
  }

  ConvShape s_;
  const float* x_;
};

// --- the convolution ------------------------------------------------------------------------------

// Sums over fewer numbers, or for fewer outputs, would leave most of a tile empty.
static inline bool suits(const ConvShape& s) {
  return !several_kernels_suit(s) && !depthwise_suits(s) && s.depth() >= 16 &&
         s.group_outputs() >= 8;
}

// The sums of one group are over so many numbers.
static inline int64_t depth_of(const ConvShape& s) {
  return s.kh * s.kw == 1 ? s.group_inputs() : 2 * in_pairs(s).depth();
}

static inline int64_t convolution_packed_size(const ConvShape& s) {
  return s.groups * packed_size_of(depth_of(s), s.group_outputs());
}

// w: [co][ci / groups][kh][kw]
template <class Number>
void pack_convolution(float* packed, const float* w, const ConvShape& s, int threads) {
  const int64_t inputs = s.group_inputs(), outputs = s.group_outputs(), taps = s.kh * s.kw;
  const int64_t depth = depth_of(s), numbers = 2 * pairs_of(depth), of_tap = depth / taps;
  std::vector<Number> rows(static_cast<size_t>(outputs * numbers));
  for (int64_t g = 0; g < s.groups; g++) {
    in_parallel(threads, [&](int thread, int team) {
      const Range mine = part_of(outputs, thread, team);
      for (int64_t o = mine.begin; o < mine.end; o++)
        for (int64_t c = 0; c < inputs; c++)
          for (int64_t tap = 0; tap < taps; tap++) {
            const float* const from = w + ((g * outputs + o) * inputs + c) * taps + tap;
            put(&rows[static_cast<size_t>(o * numbers + tap * of_tap + c)], splat(*from), 1);
          }
    });
    pack(packed + g * packed_size_of(depth, outputs), rows.data(), depth, outputs, threads);
  }
}

// What a convolution multiplies by and adds to its sums, as it was packed here.
struct Weighing {
  const float* packed;
  OfColumns own;
};

template <class Number>
Grid grid_for(const ConvShape& s, int& threads) {
  const int64_t m = s.pixels(), n = s.group_outputs(), pairs = pairs_of(depth_of(s));
  const double reading = in_tiles<Number>() ? 200 : 8;
  const double work = (static_cast<double>(m) + reading) * static_cast<double>(n * pairs * s.groups);
  threads = useful_threads(threads, in_tiles<Number>() ? 0.1 * work : work, kWorkPerThread);
  return grid_of(m, n, pairs, s.groups >= 4 * threads ? 1 : threads, reading, reading);
}

// make(group): the rows of a group's product.
template <class Out, class Make>
void convolution_of(const ConvShape& s, const Weighing& w, Out* y, const EpilogueOf<Out>& e,
                    int threads, const Make& make) {
  const int64_t n = s.group_outputs(), k = depth_of(s);
  if (s.values() == 0) return;
  using Number = typename decltype(make(0))::Number;
  const Grid grid = grid_for<Number>(s, threads);
  for_each_item(s.groups * grid.items(), threads, [&](int64_t at) {
    const int64_t g = at / grid.items();
    auto rows = make(g);
    const Product<decltype(rows), Out> product{s.pixels(), n, k, rows,
                                               w.packed + g * packed_size_of(k, n), y + g * n,
                                               s.ldy, e.at(0, g * n), w.own.from(g * n)};
    multiply(product, grid, at % grid.items());
  });
}

#if defined(KD_AMX)
// Of whole tiles of channels, and so many lines that threads have about as many of them: a sequence is
// one line.
template <class Number>
bool image_lines_suit(const ConvShape& s, int threads) {
  constexpr int64_t fewest_of_thread = 4, shortest = 4;
  if (!in_tiles<Number>() || s.group_inputs() % (2 * amx::kTilePairs) != 0 || s.ldx % 2 != 0) return false;
  if (s.dw != 1 || s.ow < shortest || s.n * s.oh < fewest_of_thread * threads) return false;
  return DirectLines(in_pairs(s), nullptr).floats(1, s.ow) <= DirectLines::kMost;
}
#endif

template <class Number, class Out>
void convolution(const ConvShape& s, const Number* x, const Weighing& w, Out* y,
                 const EpilogueOf<Out>& e, int threads) {
  const int64_t k = s.group_inputs();
  if (s.pointwise())
    convolution_of(s, w, y, e, threads, [&](int64_t g) { return PairRows<Number>{x + g * k, s.ldx, k}; });
#if defined(KD_AMX)
  else if (image_lines_suit<Number>(s, threads))
    convolution_of(s, w, y, e, threads, [&](int64_t g) {
      return amx::ImageLines<Number>{in_pairs(s), reinterpret_cast<const float*>(x), g};
    });
#endif
  else
    convolution_of(s, w, y, e, threads, [&](int64_t g) { return GatheredPairs<Number>(s, x, g); });
}

template <class Number, class Out>
void convolution_of_floats(const ConvShape& s, const float* x, const Weighing& w, Out* y,
                 const EpilogueOf<Out>& e, int threads, const Prologue& before) {
  const int64_t k = s.group_inputs();
  const auto of = [&](const auto& make) { convolution_of(s, w, y, e, threads, make); };
  if (before.factors != nullptr)
    of([&](int64_t) {
      const ScaledRows rows{x, s.ldx, before.factors, before.ld_factors, s.h * s.w};
      return RoundedRows<Number, ScaledRows>{rows, k};
    });
  else if (before.norm.scale != nullptr)
    of([&](int64_t) {
      const NormedRows rows{x, s.ldx, before.norm, before.low, before.high};
      return RoundedRows<Number, NormedRows>{rows, k};
    });
  else if (s.pointwise())
    of([&](int64_t g) { return RoundedRows<Number, MatrixRows>{{x + g * k, s.ldx}, k}; });
  else if (s.kh * s.kw == 1)
    of([&](int64_t g) { return RoundedRows<Number, ImageRows>{ImageRows(s, x, g), k}; });
  else
    of([&](int64_t g) { return RoundedImageRows<Number>(s, x, g); });
}

}  // namespace kd::halves

#endif
