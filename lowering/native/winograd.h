// 3x3 convolutions with 16 multiplications for each 2x2 outputs instead of 36, after Winograd: inputs
// in tiles of 4x4 and weights are transformed, multiplied place by place, and transformed back.
//
// The transforms add and halve only, so errors stay those of a direct convolution. But an output is
// made of its whole tile: infinities, and sums that overflow, spread to neighbours that do not depend
// on them. Whoever calls is told of any output that is no number.
#pragma once

#include <atomic>

#include "blocked.h"
#include "conv_shape.h"

namespace kd {
namespace winograd {

constexpr int kPlaces = 16;  // of a 4x4 tile
constexpr int64_t kTileFloats = 96 * 1024;  // of transformed inputs: they stay in the second cache
constexpr int64_t kMostSummed = 256;  // in a row: of 512, up to what the contract allows is lost
constexpr int64_t kStripPanels = ceil_div(64, kLanes);  // columns that are worked on at once

// Taps of a dilated kernel skip pixels: those that are a dilation apart make an image of their own, a
// phase of the whole one, whose kernel is not dilated.
struct Tiles {
  const ConvShape& s;
  int64_t down() const { return ceil_div(ceil_div(s.oh, s.dh), 2); }
  int64_t across() const { return ceil_div(ceil_div(s.ow, s.dw), 2); }
  int64_t of_phase() const { return down() * across(); }
  int64_t count() const { return s.n * s.dh * s.dw * of_phase(); }
};

// Some tiles, all of one group's channels.
struct Part {
  const ConvShape& s;
  int64_t group;
  Range tiles;
};

// The output pixel at the tile's upper left; the others are a dilation apart.
struct Place {
  int64_t image, y, x;
  Place(const Tiles& tiles, int64_t tile) {
    const ConvShape& s = tiles.s;
    const int64_t within = tile % tiles.of_phase(), phase = tile / tiles.of_phase();
    image = phase / (s.dh * s.dw);
    y = phase / s.dw % s.dh + within / tiles.across() * 2 * s.dh;
    x = phase % s.dw + within % tiles.across() * 2 * s.dw;
  }
};

// Of one group's weights, at one place.
static inline int64_t place_size_of(const ConvShape& s) {
  return packed_size(s.group_inputs(), s.group_outputs());
}

static inline int64_t packed_size_of(const ConvShape& s) {
  return s.groups * kPlaces * place_size_of(s);
}

// As many numbers as a vector has, in double precision: weights are rounded once.
typedef double wide __attribute__((vector_size(kLanes * 8)));

// One tap after the other, each of all outputs of a panel, to the places of a tile.
static inline void transform_weights(const float* taps, const float* factors, float* to,
                                     int64_t place_size) {
  wide rows[4][3];
  for (int j = 0; j < 3; j++) {
    const auto tap = [&](int i) {
      const wide number = __builtin_convertvector(load(taps + (3 * i + j) * kLanes), wide);
      return factors == nullptr ? number : number * __builtin_convertvector(load(factors), wide);
    };
    const wide a = tap(0), b = tap(1), c = tap(2);
    rows[0][j] = a, rows[1][j] = (a + b + c) * 0.5, rows[2][j] = (a - b + c) * 0.5, rows[3][j] = c;
  }
  for (int i = 0; i < 4; i++) {
    const wide a = rows[i][0], b = rows[i][1], c = rows[i][2];
    const wide made[4] = {a, (a + b + c) * 0.5, (a - b + c) * 0.5, c};
    for (int j = 0; j < 4; j++)
      store(to + (i * 4 + j) * place_size, __builtin_convertvector(made[j], vec));
  }
}

// w: [co][ci / groups][3][3] to [group][place][panel][ci / groups][lane]; scale: one factor for each
// output, or nullptr.
static inline void pack(float* packed, const float* w, const float* scale, const ConvShape& s,
                        int threads) {
  constexpr int64_t kTaps = 9, kAtOnce = 16;  // channels whose taps stay in the first cache
  const int64_t inputs = s.group_inputs(), outputs = s.group_outputs(), depth = kTaps * inputs;
  const int64_t panels = panels_of(outputs), place_size = place_size_of(s);
  for_each_item(s.groups * panels, threads, [&](int64_t item) {
    const int64_t group = item / panels, panel = item % panels;
    const int64_t first = group * outputs + panel * kLanes;
    const int columns = columns_of_panel(outputs, panel);
    alignas(64) float taps[kAtOnce * kTaps * kLanes], factors[kLanes] = {};
    if (scale != nullptr) std::copy_n(scale + first, columns, factors);
    for (int64_t c = 0; c < inputs; c += kAtOnce) {
      const int64_t some = std::min(kAtOnce, inputs - c);
      pack_panel(taps, w + first * depth + c * kTaps, some * kTaps, columns, 1, depth);
      float* const to = packed + group * kPlaces * place_size + (panel * inputs + c) * kLanes;
      for (int64_t i = 0; i < some; i++)
        transform_weights(taps + i * kTaps * kLanes, scale == nullptr ? nullptr : factors,
                          to + i * kLanes, place_size);
    }
  });
}

// Rows or columns of a tile of inputs, in place.
static inline __attribute__((always_inline)) void transform_input(vec& a, vec& b, vec& c, vec& d) {
  const vec first = a - c, second = b + c, third = c - b, fourth = b - d;
  a = first, b = second, c = third, d = fourth;
}

// Some tiles' inputs, to [place][tile][ld].
class Inputs {
 public:
  Inputs(const ConvShape& s, const float* x, int64_t group)
      : s_(s), x_(x + group * s.group_inputs()) {}

  void transform(const Tiles& tiles, Range some, float* to, int64_t ld) const {
    const int64_t apart = some.size() * ld, channels = s_.group_inputs();
    for (int64_t tile = some.begin; tile < some.end; tile++, to += ld) {
      const Place place(tiles, tile);
      const int64_t y = place.y - s_.ph, x = place.x - s_.pw;
      const float* from = x_ + ((place.image * s_.h + y) * s_.w + x) * s_.ldx;
      const bool inside = y >= 0 && x >= 0 && y + 3 * s_.dh < s_.h && x + 3 * s_.dw < s_.w;
      const int64_t full = inside ? channels / kLanes * kLanes : 0;
      const int64_t down = s_.dh * s_.w * s_.ldx, right = s_.dw * s_.ldx;
      for (int64_t c = 0; c < full; c += kLanes)
        one(to + c, apart, [&](int i, int j) { return load(from + i * down + j * right + c); });
      for (int64_t c = full; c < channels; c += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(channels - c, kLanes));
        one(to + c, apart, [&](int i, int j) {
          const int64_t line = y + i * s_.dh, column = x + j * s_.dw;
          if (line < 0 || line >= s_.h || column < 0 || column >= s_.w) return vec{};
          const float* at = from + i * down + j * right + c;
          return lanes == kLanes ? load(at) : load_first(at, lanes);
        });
      }
    }
  }

 private:
  template <class Get>
  static __attribute__((always_inline)) void one(float* to, int64_t apart, const Get& get) {
    vec d[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) d[i][j] = get(i, j);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) transform_input(d[0][j], d[1][j], d[2][j], d[3][j]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) transform_input(d[i][0], d[i][1], d[i][2], d[i][3]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) store(to + (i * 4 + j) * apart, d[i][j]);
  }

  const ConvShape& s_;
  const float* x_;
};

// Products of some tiles, [place][tile][ld], to outputs with their epilogue.
class Outputs {
 public:
  Outputs(const ConvShape& s, float* y, const Epilogue& e) : s_(s), y_(y), e_(e), limits_(e) {}

  // Channels from `channel` on; false where a result is no number.
  bool transform(const Tiles& tiles, Range some, int64_t channel, int64_t channels,
                 const float* from, int64_t ld) const {
    const int64_t apart = some.size() * ld;
    vec odd{};  // zero as long as all results are numbers
    for (int64_t tile = some.begin; tile < some.end; tile++, from += ld) {
      const Place place(tiles, tile);
      for (int64_t c = 0; c < channels; c += kLanes) {
        vec out[2][2];
        one(from + c, apart, out);
        const int lanes = static_cast<int>(std::min<int64_t>(channels - c, kLanes));
        for (int i = 0; i < 2; i++) {
          for (int j = 0; j < 2; j++) {
            odd += out[i][j] - out[i][j];
            const int64_t y = place.y + i * s_.dh, x = place.x + j * s_.dw;
            if (y < s_.oh && x < s_.ow)
              finish(out[i][j], (place.image * s_.oh + y) * s_.ow + x, channel + c, lanes);
          }
        }
      }
    }
    return horizontal_sum(odd) == 0;
  }

 private:
  static __attribute__((always_inline)) void one(const float* from, int64_t apart,
                                                 vec (&out)[2][2]) {
    vec rows[2][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const vec a = load(from + j * apart), b = load(from + (4 + j) * apart),
                c = load(from + (8 + j) * apart), d = load(from + (12 + j) * apart);
      rows[0][j] = a + b + c, rows[1][j] = b - c - d;
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const vec* r = rows[i];
      out[i][0] = r[0] + r[1] + r[2], out[i][1] = r[1] - r[2] - r[3];
    }
  }

  void finish(vec v, int64_t pixel, int64_t c, int lanes) const {
    const auto get = [&](const float* p) { return lanes == kLanes ? load(p) : load_first(p, lanes); };
    if (e_.bias) v += get(e_.bias + c);
    if (e_.before) v += get(e_.before + pixel * e_.ld_before + c);
    v = limits_.enough ? clamp(v, splat(limits_.low), splat(limits_.high))
                       : activate(e_.act, v, e_.a, e_.b);
    if (e_.times) v *= get(e_.times + pixel * e_.ld_times + c);
    if (e_.after) v += get(e_.after + pixel * e_.ld_after + c);
    float* to = y_ + pixel * s_.ldy + c;
    if (lanes == kLanes)
      store(to, v);
    else
      store_first(to, v, lanes);
  }

  const ConvShape& s_;
  float* y_;
  const Epilogue& e_;
  Limits limits_;
};

// Some panels of outputs of one group.
static inline bool multiply(const Part& mine, const float* x, const float* packed,
                            const Outputs& outputs, Range panels) {
  const ConvShape& s = mine.s;
  const Tiles tiles{s};
  const Inputs inputs(s, x, mine.group);
  const int64_t depth = s.group_inputs(), place_size = place_size_of(s);
  const int64_t ld = spread_out(depth), panel = depth * kLanes;
  const int64_t most = std::max<int64_t>(kTileFloats / (kPlaces * ld), kMostTileRows);
  const int64_t blocks = ceil_div(mine.tiles.size(), most);
  const int64_t strips = ceil_div(panels.size(), kStripPanels);
  const int64_t pieces = ceil_div(depth, kMostSummed);
  float* const transformed = scratch<0>(kPlaces * (most + 1) * (ld + kStripPanels * kLanes));
  float* const products = transformed + kPlaces * (most + 1) * ld;
  bool numbers = true;
  for (int64_t block = 0; block < blocks; block++) {
    const Range part = part_of(mine.tiles.size(), block, blocks);
    const Range some{mine.tiles.begin + part.begin, mine.tiles.begin + part.end};
    inputs.transform(tiles, some, transformed, ld);
    for (int64_t i = 0; i < strips; i++) {
      const Range within = part_of(panels.size(), i, strips);
      const int64_t first = panels.begin + within.begin, wide = within.size() * kLanes;
      for (int place = 0; place < kPlaces; place++) {
        const float* weights = packed + (mine.group * kPlaces + place) * place_size + first * panel;
        const float* left = transformed + place * some.size() * ld;
        float* to = products + place * some.size() * wide;
        for (int64_t piece = 0; piece < pieces; piece++) {
          const Range deep = part_of(depth, piece, pieces);
          const Finish finish{piece > 0, false, 0, 0};
          const bool last = piece + 1 == pieces;
          const float* next = !last                 ? weights + deep.end * kLanes
                              : place + 1 < kPlaces ? weights + place_size
                                                    : nullptr;
          multiply_blocks({left + deep.begin, ld, 1}, some.size(),
                          {weights + deep.begin * kLanes, panel, kLanes}, wide, deep.size(), to, wide,
                          Epilogue{}, finish, Block{next, panel, kLanes});
        }
      }
      const int64_t channels = std::min(wide, s.group_outputs() - first * kLanes);
      const int64_t channel = mine.group * s.group_outputs() + first * kLanes;
      numbers &= outputs.transform(tiles, some, channel, channels, products, wide);
    }
  }
  return numbers;
}

}  // namespace winograd

// Of a 3x3 convolution with stride 1. False: some results are no numbers, and
// others may not be right.
static inline bool winograd_conv(const ConvShape& s, const float* x, const float* packed, float* y,
                                 const Epilogue& e, int threads) {
  const int64_t m = winograd::Tiles{s}.count(), n = s.group_outputs();
  const int64_t k = winograd::kPlaces * s.group_inputs();
  const winograd::Outputs outputs(s, y, e);
  threads = useful_threads(threads, static_cast<double>(m) * s.co * k, kWorkPerThread);
  const Grid grid = grid_of(m, n, k, s.groups >= 4 * threads ? 1 : threads, 6, 4);
  std::atomic<bool> numbers{true};
  for_each_item(s.groups * grid.items(), threads, [&](int64_t at) {
    const int64_t item = at % grid.items();
    const winograd::Part mine{s, at / grid.items(),
                              part_of(m, item / grid.across, grid.down)};
    const Range panels = part_of(panels_of(n), item % grid.across, grid.across);
    if (!winograd::multiply(mine, x, packed, outputs, panels)) numbers = false;
  });
  return numbers;
}

}  // namespace kd
