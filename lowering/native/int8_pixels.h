// Images of bytes as rows of a product: of each output pixel, what it depends on, tap by tap.
#pragma once

#include <cstring>

#include "conv_shape.h"
#include "int8_product.h"
#include "requantized.h"

namespace kd::int8 {

// Channels last. `flip`: the bit that is changed on the way, so that bytes have the sign that the product
// wants; `outside`: what stands for zero around the image, flipped.
struct Pixels {
  const ConvShape& s;
  const uint8_t *image, *end;
  uint8_t flip, outside;

  // Copies write some bytes more than they are asked to.
  static int64_t buffer(int64_t rows, int64_t k) { return Rows::buffer(rows, k) + kAtOnce / 4; }

  // As they are where that is possible.
  Block block(int64_t row, int64_t rows, float* buffer) const {
    const int64_t words = words_of(s.depth());
    if (s.pointwise() && flip == 0 && s.ci == 4 * words && !crowded(words))
      return {reinterpret_cast<const float*>(image + row * s.ci), words, 1};
    const int64_t ld = spread_out(words), size = s.h * s.w * s.ci;
    int64_t x = row % s.ow, y = row / s.ow % s.oh;
    const uint8_t* from = image + row / (s.ow * s.oh) * size;
    for (int64_t i = 0; i < rows; i++) {
      gather(reinterpret_cast<uint8_t*>(buffer + i * ld), 4 * words, from, y, x);
      if (++x < s.ow) continue;
      x = 0;
      if (++y < s.oh) continue;
      y = 0, from += size;
    }
    return {buffer, ld, 1};
  }

 private:
  static constexpr int64_t kAtOnce = 16;

  void gather(uint8_t* to, int64_t size, const uint8_t* from, int64_t y, int64_t x) const {
    const uint8_t* const last = to + size;
    const int64_t left = x * s.sw - s.pw, bytes = s.kw * s.ci;
    const bool inside = left >= 0 && left + (s.kw - 1) * s.dw < s.w;
    for (int64_t i = 0; i < s.kh; i++, to += bytes) {
      const int64_t line = y * s.sh - s.ph + i * s.dh;
      const uint8_t* const pixels = from + line * s.w * s.ci;
      if (line < 0 || line >= s.h) {
        fill(to, bytes, outside);
      } else if (inside && s.dw == 1) {
        copy(to, pixels + left * s.ci, bytes);
      } else {
        for (int64_t j = 0; j < s.kw; j++) {
          const int64_t place = left + j * s.dw;
          if (place < 0 || place >= s.w)
            fill(to + j * s.ci, s.ci, outside);
          else
            copy(to + j * s.ci, pixels + place * s.ci, s.ci);
        }
      }
    }
    if (to < last) fill(to, last - to, 0);  // what the weight has zeros for
  }

  static void fill(uint8_t* to, int64_t bytes, uint8_t value) {
    for (int64_t p = 0; p < bytes; p += kAtOnce) std::memset(to + p, value, kAtOnce);
  }

  void copy(uint8_t* to, const uint8_t* from, int64_t bytes) const {
    if (end - from < bytes + kAtOnce) {
      for (int64_t p = 0; p < bytes; p++) to[p] = static_cast<uint8_t>(from[p] ^ flip);
      return;
    }
    for (int64_t p = 0; p < bytes; p += kAtOnce) {
      uint64_t some[kAtOnce / 8];
      std::memcpy(some, from + p, kAtOnce);
      for (uint64_t& eight : some) eight ^= flip * 0x0101010101010101u;
      std::memcpy(to + p, some, kAtOnce);
    }
  }
};

// Looks like Product; pixels are its rows.
template <class Out>
struct PixelProduct {
  using Element = Out;
  using Number = Uint8;  // of tiles, which are where vectors want no sign either
  using ToFinish = Requantized<Out>;
  int64_t m, n, k;
  Pixels a;
  Words b;
  ToFinish rest;
  typename ToFinish::Activation e;

  void prepare_for_vectors() {}
  int64_t pairs() const { return b.depth(); }
  int64_t rows_buffer(int64_t rows) const { return Pixels::buffer(rows, k); }
  Block panel(int64_t index, int64_t from) const {
    return {b.panel(index) + from * kLanes, kLanes * b.depth(), kLanes};
  }
  ToFinish unfinished(const float* sums, int64_t ld, int64_t row, int64_t rows, int64_t column,
                      int64_t columns) const {
    return rest.at(sums, ld, row, rows, column, columns);
  }
};

}  // namespace kd::int8
