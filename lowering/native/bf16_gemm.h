// Matrix products of bfloat16 numbers by the CPU's own instruction for them, which multiplies two
// pairs and adds both products to a float. Sums stay floats until the epilogue is done; they are
// rounded once, when they are stored.
#pragma once

#if defined(__AVX512BF16__)

#include <utility>

#include "half_pairs.h"

namespace kd::halves {

struct Pairs {
  static inline vec multiply_add(vec a, vec b, vec sum) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};

// Operands of a block: `kBlockBytes` of rows, beside panels that are `kDepthPairs` deep, are what
// the second cache holds.
constexpr int64_t kDepthPairs = 1536;
constexpr int64_t kBlockBytes = 400 << 10;
constexpr int64_t kStripColumns = kTileWidth * kLanes;

// --- a tile ---------------------------------------------------------------------------------------

template <int rows, int width>
void sum_tile(int64_t depth, const Block& left, const Block& right, float* sums, bool accumulate,
              const float* ahead) {
  Sums<rows, width, Pairs> tile(depth, left, right, {ahead, kLanes});
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < width; j++) {
      float* const to = sums + i * kStripColumns + j * kLanes;
      store(to, accumulate ? load(to) + tile.at[i][j] : tile.at[i][j]);
    }
  }
}

using SumTile = void (*)(int64_t depth, const Block& left, const Block& right, float* sums,
                         bool accumulate, const float* ahead);

template <int width, int... rows_less_one>
static inline SumTile of_width(int rows, std::integer_sequence<int, rows_less_one...>) {
  static constexpr SumTile tiles[] = {sum_tile<rows_less_one + 1, width>...};
  return tiles[rows - 1];
}

static inline SumTile sum_tile_of(int rows, int width) {
  switch (width) {
    case 1:
      return of_width<1>(rows, std::make_integer_sequence<int, kTileRows[1]>());
    case 2:
      return of_width<2>(rows, std::make_integer_sequence<int, kTileRows[2]>());
    case 3:
      return of_width<3>(rows, std::make_integer_sequence<int, kTileRows[3]>());
    default:
      return of_width<4>(rows, std::make_integer_sequence<int, kTileRows[4]>());
  }
}

// --- the product ----------------------------------------------------------------------------------

// A block of rows times a strip of panels, whose sums are kept in `sums` where k has several parts.
template <class Rows, class Element>
void multiply_strip(const Product<Rows, Element>& p, const Block& left, Range rows, Range strip,
                    const float* following, float* sums) {
  const int width = static_cast<int>(strip.size());
  const int64_t column = strip.begin * kLanes;
  const int64_t columns = std::min<int64_t>(p.n - column, width * kLanes);
  const int64_t deep_parts = std::max<int64_t>(ceil_div(p.pairs(), kDepthPairs), 1);
  const int64_t tiles = ceil_div(rows.size(), kTileRows[width]);
  for (int64_t part = 0; part < deep_parts; part++) {
    const Range deep = part_of(p.pairs(), part, deep_parts);
    const bool last = part + 1 == deep_parts;
    const Block right = p.panel(strip.begin, deep.begin);
    const float* const next = last ? following : right.data + deep.size() * kLanes;
    for (int64_t t = 0; t < tiles; t++) {
      const Range some = part_of(rows.size(), t, tiles);
      const Block rows_left{left.data + some.begin * left.across + deep.begin, left.across, 1};
      float* const at = deep_parts == 1 ? sums : sums + some.begin * kStripColumns;
      const float* const ahead = next && t < width ? next + t * right.across : right.data;
      sum_tile_of(static_cast<int>(some.size()), width)(deep.size(), rows_left, right, at,
                                                        part > 0, ahead);
      if (last)
        Unfinished<Element>::finisher(p.e.act)(
            p.unfinished(at, kStripColumns, rows.begin + some.begin, some.size(), column, columns),
            {0, some.size()});
    }
  }
}

template <class Rows, class Element>
void multiply_item(const Product<Rows, Element>& p, const Grid& grid, int64_t item) {
  const Range rows = part_of(p.m, item / grid.across, grid.down);
  const Range panels = part_of(panels_of(p.n), item % grid.across, grid.across);
  if (rows.size() == 0 || panels.size() == 0) return;
  const int64_t fitting = kBlockBytes / 4 / std::max<int64_t>(p.pairs(), 1);
  const int64_t most_rows = std::clamp<int64_t>(fitting, 3 * kMostTileRows, kBlockRows);
  const int64_t row_blocks = ceil_div(rows.size(), most_rows);
  const int64_t strips = ceil_div(panels.size(), kTileWidth);
  float* const buffer = scratch<0>(rows_buffer_size(most_rows, p.k));
  float* const sums = scratch<1>(most_rows * kStripColumns);
  for (int64_t i = 0; i < row_blocks; i++) {
    const Range part = part_of(rows.size(), i, row_blocks);
    const Range some{rows.begin + part.begin, rows.begin + part.end};
    const Block left = p.a.block(some.begin, some.size(), buffer);
    for (int64_t s = 0; s < strips; s++) {
      const Range strip = part_of(panels.size(), s, strips);
      const int64_t first = panels.begin + strip.begin, end = panels.begin + strip.end;
      const float* const following = s + 1 < strips ? p.panel(end, 0).data : nullptr;
      multiply_strip(p, left, some, {first, end}, following, sums);
    }
  }
}

}  // namespace kd::halves

#endif
