// Matrix products of bfloat16 numbers by the CPU's own instruction for them, which multiplies two
// pairs and adds both products to a float. Sums stay floats until the epilogue is done; they are
// rounded once, when they are stored.
#pragma once

#if defined(__AVX512BF16__)

#include <cstring>
#include <utility>

#include "blocked.h"
#include "elements.h"
#include "gemm.h"

namespace kd::bf16 {

// Two neighbours along k, which is what 32 bits of both operands are. Moved about as if they were
// one float; a last one without a neighbour gets a zero.
static constexpr int64_t pairs_of(int64_t k) { return ceil_div(k, 2); }

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

// --- the right operand: panels of kLanes columns, in each of them row after row of pairs ----------

static inline int64_t packed_size_of(int64_t k, int64_t n) { return packed_size(pairs_of(k), n); }

// `b` is (n, k), its rows as long as `k` is even: with a zero behind an odd k.
static inline void pack(float* packed, const BFloat16* b, int64_t k, int64_t n, int threads) {
  const int64_t pairs = pairs_of(k);
  pack_b(packed, reinterpret_cast<const float*>(b), pairs, n, 1, pairs, threads);
}

// --- the left operand: rows as they are -----------------------------------------------------------

// Rows with an odd number of values are copied, as the last one needs a zero beside it.
struct PairRows {
  const BFloat16* a;
  int64_t k;

  static int64_t buffer_size(int64_t rows, int64_t k) { return rows * (pairs_of(k) + 48); }

  Block block(int64_t row, int64_t rows, float* buffer) const {
    const int64_t pairs = pairs_of(k);
    if (k % 2 == 0)
      return MatrixRows{reinterpret_cast<const float*>(a), pairs}.block(row, rows, 0, pairs,
                                                                        buffer);
    const int64_t ld = spread_out(pairs);
    for (int64_t i = 0; i < rows; i++) {
      buffer[i * ld + pairs - 1] = 0;
      std::memcpy(buffer + i * ld, a + (row + i) * k, static_cast<size_t>(k) * sizeof(BFloat16));
    }
    return {buffer, ld, 1};
  }
};

// --- a tile ---------------------------------------------------------------------------------------

template <int rows, int width>
void sum_tile(int64_t depth, const Block& left, const Block& right, float* sums, bool accumulate,
              const float* ahead) {
  Sums<rows, width, Pairs> tile(depth, left, right, ahead);
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

using PairEpilogue = EpilogueOf<BFloat16>;

// What is left to do with sums: all of it in floats, and the one rounding.
static inline void finish(const float* sums, int64_t rows, int64_t columns, BFloat16* c,
                          int64_t ldc, const PairEpilogue& e) {
  for (int64_t i = 0; i < rows; i++, c += ldc, sums += kStripColumns) {
    for (int64_t j = 0; j < columns; j += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(columns - j, kLanes));
      const auto get = [&](const BFloat16* p) {
        return count == kLanes ? load_floats(p + j) : load_floats_first(p + j, count);
      };
      vec v = load(sums + j);
      if (e.bias) v += get(e.bias);
      if (e.before) v += get(e.before + i * e.ld_before);
      v = activate(e.act, v, e.a, e.b);
      if (e.times) v *= get(e.times + i * e.ld_times);
      if (e.after) v += get(e.after + i * e.ld_after);
      if (count == kLanes)
        store_floats(c + j, v);
      else
        store_floats_first(c + j, v, count);
    }
  }
}

// --- the product ----------------------------------------------------------------------------------

struct Product {
  int64_t m, n, k;
  PairRows a;
  const float* b;  // packed
  BFloat16* c;
  int64_t ldc;
  PairEpilogue e;

  int64_t pairs() const { return pairs_of(k); }
  Block panel(int64_t index, int64_t from) const {
    return {b + index * kLanes * pairs() + from * kLanes, kLanes * pairs(), kLanes};
  }
};

// A block of rows times a strip of panels, whose sums are kept in `sums` where k has several parts.
static inline void multiply_strip(const Product& p, const Block& left, Range rows, Range strip,
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
      const int64_t row = rows.begin + some.begin;
      if (last)
        finish(at, some.size(), columns, p.c + row * p.ldc + column, p.ldc, p.e.at(row, column));
    }
  }
}

static inline void multiply_item(const Product& p, const Grid& grid, int64_t item) {
  const Range rows = part_of(p.m, item / grid.across, grid.down);
  const Range panels = part_of(panels_of(p.n), item % grid.across, grid.across);
  if (rows.size() == 0 || panels.size() == 0) return;
  const int64_t fitting = kBlockBytes / 4 / std::max<int64_t>(p.pairs(), 1);
  const int64_t most_rows = std::clamp<int64_t>(fitting, 3 * kMostTileRows, kBlockRows);
  const int64_t row_blocks = ceil_div(rows.size(), most_rows);
  const int64_t strips = ceil_div(panels.size(), kTileWidth);
  float* const buffer = scratch<0>(PairRows::buffer_size(most_rows, p.k));
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

struct InBFloat16 {
  using Element = BFloat16;
  static int64_t depth(int64_t k) { return pairs_of(k); }
  static void multiply(const Grid& grid, int64_t item, int64_t m, int64_t n, int64_t k,
                       const BFloat16* x, const float* weight, BFloat16* out, int64_t ld,
                       const PairEpilogue& e) {
    multiply_item(Product{m, n, k, PairRows{x, k}, weight, out, ld, e}, grid, item);
  }
};

}  // namespace kd::bf16

#endif
