// The kinds of numbers of grouped products: how rows and columns of them become panels, and products
// of weights that are read once.
#pragma once

#include "dot.h"
#include "half_linear.h"

namespace kd::grouped {

// Lines that are asked for while those before them are read. They lie far from each other, where no
// CPU looks for them by itself.
constexpr int64_t kLinesAhead = 12;

template <class Element>
void fetch_line(const Element* line, int64_t numbers) {
  const auto* const bytes = reinterpret_cast<const char*>(line);
  for (int64_t i = 0; i < numbers * static_cast<int64_t>(sizeof(Element)); i += 64)
    __builtin_prefetch(bytes + i);
}

struct Floats : InFloats {
  static constexpr int64_t kMostDots = kMostDotRows;

  static void pack_rows(float* to, const float* rows, int64_t k, int count) {
    pack_panel(to, rows, k, count, 1, k);
  }

  static void pack_columns(float* to, const float* from, int64_t ld, int64_t k, int64_t columns) {
    for (int64_t p = 0; p < k; p++, from += ld) {
      if (p + kLinesAhead < k) fetch_line(from + kLinesAhead * ld, columns);
      for (int64_t j = 0; j < columns; j += kLanes)
        store(to + (j * k + p * kLanes), columns - j >= kLanes
                                             ? load(from + j)
                                             : load_first(from + j, static_cast<int>(columns - j)));
    }
  }

  static void dots(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c,
                   int64_t ldc, const Epilogue& e) {
    dot_panels({0, panels_of(n)}, m, n, k, a, k, b, k, 1, c, ldc, e);
  }

  // Of a weight that is read once: all of some rows of `a`, then all of the next ones, which are
  // fetched meanwhile. Rows that are whole pages a CPU fetches better by itself.
  static void stream(int64_t m, int64_t n, int64_t k, const float* a, const float* packed, float* c,
                     int64_t ld, const Epilogue& e) {
    constexpr int64_t page = 1024;
    const MatrixRows left{a, k};
    const PackedColumns right{packed, k};
    const Limits limits(e);
    const int64_t panels = panels_of(n), parts = std::max<int64_t>(ceil_div(k, kDepth), 1);
    const int64_t strips = ceil_div(panels, strip_width(ceil_div(k, parts)));
    const int64_t at_once = kTileRows[ceil_div(panels, strips)];
    float* const buffer = scratch<0>(kRowsBuffer);
    for (int64_t i = 0; i < m; i += at_once) {
      const int64_t rows = std::min(at_once, m - i);
      for (int64_t j = 0; j < parts; j++) {
        const Range deep = part_of(k, j, parts);
        const bool fetches = k % page != 0 && i + rows < m;
        const Block next{fetches ? a + (i + rows) * k + rows * deep.begin : nullptr, 0, 0};
        multiply_blocks(left.block(i, rows, deep.begin, deep.size(), buffer), rows,
                        right.block(0, panels, deep.begin, deep.size()), n, deep.size(), c + i * ld, ld,
                        e.at(i, 0), {j > 0, j + 1 == parts, limits.low, limits.high}, next);
      }
    }
  }
};

#if defined(__AVX512BF16__)
template <class Number>
struct Halves : InHalves<Number> {
  static constexpr int64_t kMostDots = 0;

  // Rows that do not end with a whole pair, or tile, are filled up first.
  static void pack_rows(float* to, const Number* rows, int64_t k, int count) {
    const int64_t pairs = halves::pairs_of(k);
    if (k == 2 * pairs)
      return pack_panel(to, reinterpret_cast<const float*>(rows), pairs, count, 1, pairs);
    float* const filled = scratch<4>(kLanes * pairs);
    for (int i = 0; i < count; i++)
      copy_filled_up(filled + i * pairs, pairs, rows + i * k, k * static_cast<int64_t>(sizeof(Number)));
    pack_panel(to, filled, pairs, count, 1, pairs);
  }

  // Two lines become one of pairs.
  static void pack_columns(float* to, const Number* from, int64_t ld, int64_t k, int64_t columns) {
    const int64_t pairs = halves::pairs_of(k);
    for (int64_t p = 0; p < pairs; p++, from += 2 * ld) {
      if (2 * p + kLinesAhead + 1 < k) {
        fetch_line(from + kLinesAhead * ld, columns);
        fetch_line(from + (kLinesAhead + 1) * ld, columns);
      }
      for (int64_t j = 0; j < columns; j += kLanes) {
        const int wide = static_cast<int>(std::min<int64_t>(columns - j, kLanes));
        const ivec first = 2 * p < k ? bits_of(from + j, wide) : ivec{};
        const ivec second = 2 * p + 1 < k ? bits_of(from + ld + j, wide) : ivec{};
        store(to + (j * pairs + p * kLanes), (vec)(first | second << 16));
      }
    }
  }

  static void stream(int64_t m, int64_t n, int64_t k, const Number* a, const float* packed, Number* c,
                     int64_t ld, const EpilogueOf<Number>& e) {
    constexpr int64_t two_tiles = 32;
    const int64_t at_once = halves::in_tiles<Number>() ? two_tiles : 2 * kTileRows[2];
    for (int64_t i = 0; i < m; i += at_once)
      Halves::multiply(Grid{}, 0, std::min(at_once, m - i), n, k, a + i * k, packed, c + i * ld, ld,
                       e.at(i, 0));
  }

 private:
  static ivec bits_of(const Number* from, int count) {
    hvec v{};
    if (count == kLanes)
      std::memcpy(&v, from, sizeof v);
    else
      std::memcpy(&v, from, static_cast<size_t>(count) * sizeof(Number));
    return widened(v);
  }
};
#endif

}  // namespace kd::grouped
