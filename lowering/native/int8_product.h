// Products of rows of bytes with a weight of bytes. Sums are integers, so they are exact in any order.
#pragma once

#include <utility>

#include "amx_gemm.h"
#include "int8_words.h"

namespace kd::int8 {

// Two vectors of words, multiplied byte by byte; the products of a word are added to its sum.
#if defined(__AVX512VNNI__)
struct Fours {
  static inline vec multiply_add(vec a, vec b, vec sum) {
    return (vec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
  }
};
constexpr int kWidth = 4, kRows = 6;
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
struct Fours {
  static inline vec multiply_add(vec a, vec b, vec sum) {
    return (vec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
  }
};
constexpr int kWidth = 2, kRows = 6;
#elif defined(__AVX2__) && (!defined(__AVX512F__) || defined(__AVX512BW__))
typedef int16_t svec __attribute__((vector_size(kLanes * 4)));
// Neighbours multiplied, and both products added up.
static inline ivec pair_products(svec a, svec b) {
#if defined(__AVX512BW__)
  return (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
struct Fours {  // with their sign in 16 bits: the even ones of a word, then the odd ones
  static inline svec even(vec v) { return ((svec)v << 8) >> 8; }
  static inline svec odd(vec v) { return (svec)v >> 8; }
  static inline vec multiply_add(vec a, vec b, vec sum) {
    return (vec)((ivec)sum + pair_products(even(a), even(b)) + pair_products(odd(a), odd(b)));
  }
};
constexpr int kWidth = 2, kRows = kLanes == 16 ? 6 : 3;
#else
struct Fours {
  static inline ivec at(vec v, int place) { return ((ivec)v << (24 - 8 * place)) >> 24; }
  static inline vec multiply_add(vec a, vec b, vec sum) {
    ivec total = (ivec)sum;
    for (int place = 0; place < 4; place++) total += at(a, place) * at(b, place);
    return (vec)total;
  }
};
constexpr int kWidth = 2, kRows = 3;
#endif
constexpr int64_t kStrip = kWidth * kLanes;
// Of a block of rows, so that it stays in the second cache beside a strip of panels.
constexpr int64_t kRowsBytes = 128 << 10;

// Of bytes, each row in whole words.
struct Rows {
  const int8_t* a;
  int64_t lda, k;
  bool flipped = false;  // with 128 added, which flips the sign

  static int64_t buffer(int64_t rows, int64_t k) { return rows * spread_out(words_of(k)); }

  // As they are where that is possible.
  Block block(int64_t row, int64_t rows, float* buffer) const {
    const int64_t words = words_of(k);
    if (!flipped && k == 4 * words && lda % 4 == 0 && !crowded(lda / 4))
      return {reinterpret_cast<const float*>(a + row * lda), lda / 4, 1};
    const int64_t ld = spread_out(words);
    for (int64_t i = 0; i < rows; i++) {
      copy_filled_up(buffer + i * ld, words, a + (row + i) * lda, k);
      auto* const to = reinterpret_cast<int8_t*>(buffer + i * ld);
      for (int64_t p = 0; flipped && p < k; p++) to[p] = static_cast<int8_t>(to[p] ^ -128);
    }
    return {buffer, ld, 1};
  }
};

// c = epilogue((a @ b) * of_rows * scale + shift), of which an item computes some rows and panels.
template <class Of>
struct Product {
  using Element = Of;
  using Number = Int8;
  using ToFinish = Unfinished<int32_t, Element>;
  int64_t m, n, k;
  Rows a;
  Words b;
  Element* c;
  int64_t ldc;
  EpilogueOf<Element> e;
  const float* of_rows;
  OfColumns own;

  // Where an instruction wants it, the rows are shifted.
  void prepare_for_vectors() { a.flipped = kShifted; }
  int64_t pairs() const { return b.depth(); }
  int64_t rows_buffer(int64_t rows) const { return Rows::buffer(rows, k); }
  Block panel(int64_t index, int64_t from) const {
    return {b.panel(index) + from * kLanes, kLanes * b.depth(), kLanes};
  }
  ToFinish unfinished(const float* sums, int64_t ld, int64_t row, int64_t rows, int64_t column,
                      int64_t columns) const {
    return {sums, ld, rows, columns, c + row * ldc + column, ldc, e.at(row, column), own.from(column),
            of_rows ? of_rows + row : nullptr, a.flipped ? b.column_sums() + column : nullptr};
  }
};

// --- without tiles --------------------------------------------------------------------------------

using SumTile = void (*)(int64_t words, const Block& left, const Block& right, float* sums);

template <int rows, int width>
void sum_tile(int64_t words, const Block& left, const Block& right, float* sums) {
  const Sums<rows, width, Fours> tile(words, left, right, {right.data, 0});
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < width; j++) store(sums + i * kStrip + j * kLanes, tile.at[i][j]);
}

template <int width, int... rows_less_one>
static inline SumTile of_width(int rows, std::integer_sequence<int, rows_less_one...>) {
  static constexpr SumTile tiles[] = {sum_tile<rows_less_one + 1, width>...};
  return tiles[rows - 1];
}

template <int width = kWidth>
static inline SumTile sum_tile_of(int rows, int wide) {
  if constexpr (width > 1)
    if (wide < width) return sum_tile_of<width - 1>(rows, wide);
  return of_width<width>(rows, std::make_integer_sequence<int, kRows>());
}

template <class AProduct>
void multiply_in_vectors(AProduct p, const Grid& grid, int64_t item) {
  const Range rows = part_of(p.m, item / grid.across, grid.down);
  const Range panels = part_of(panels_of(p.n), item % grid.across, grid.across);
  if (rows.size() == 0 || panels.size() == 0) return;
  p.prepare_for_vectors();
  const int64_t words = p.pairs();
  const int64_t most = std::max<int64_t>(kRowsBytes / 4 / std::max<int64_t>(words, 1), 2 * kRows);
  const int64_t blocks = ceil_div(rows.size(), most), strips = ceil_div(panels.size(), kWidth);
  float* const buffer = scratch<0>(p.rows_buffer(std::min(most, rows.size())));
  for (int64_t i = 0; i < blocks; i++) {
    const Range some = part_of(rows.size(), i, blocks);
    const Block left = p.a.block(rows.begin + some.begin, some.size(), buffer);
    for (int64_t s = 0; s < strips; s++) {
      const Range strip = part_of(panels.size(), s, strips);
      const int64_t column = (panels.begin + strip.begin) * kLanes;
      const int64_t columns = std::min<int64_t>(p.n - column, strip.size() * kLanes);
      const int64_t tiles = ceil_div(some.size(), kRows);
      for (int64_t t = 0; t < tiles; t++) {
        const Range high = part_of(some.size(), t, tiles);
        alignas(64) float sums[kRows * kStrip];
        sum_tile_of(static_cast<int>(high.size()), static_cast<int>(strip.size()))(
            words, {left.data + high.begin * left.across, left.across, 1},
            p.panel(panels.begin + strip.begin, 0), sums);
        const auto rest = p.unfinished(sums, kStrip, rows.begin + some.begin + high.begin,
                                       high.size(), column, columns);
        AProduct::ToFinish::finisher(p.e.act)(rest, {0, high.size()});
      }
    }
  }
}

static inline bool in_tiles() {
#if defined(KD_AMX)
  return amx::multiplies<Int8>();  // and those without a sign
#else
  return false;
#endif
}

constexpr int64_t kFewRowsOfBytes = 6;  // which vectors multiply while the weight is read

// All of it, by threads; of Product, or what looks like it.
template <class AProduct>
void multiply(const AProduct& p, int threads) {
  const bool tiles = in_tiles() && p.m > kFewRowsOfBytes;
  // Tiles multiply many times as fast as vectors, and reading operands weighs as much more beside it.
  const double reading_rows = tiles ? 100 : 48, reading_columns = tiles ? 200 : 24;
  const double rows = static_cast<double>(p.m) + (tiles ? reading_columns : 0);
  const double work = (tiles ? 0.1 : 1) * rows * static_cast<double>(p.n * p.pairs());
  threads = useful_threads(threads, work, kWorkPerThread);
  const Grid grid = grid_of(p.m, p.n, p.pairs(), threads, reading_rows, reading_columns);
  for_each_item(grid.items(), threads, [&](int64_t item) {
#if defined(KD_AMX)
    if (tiles) return amx::multiply_item(p, grid, item);
#endif
    multiply_in_vectors(p, grid, item);
  });
}

}  // namespace kd::int8
