// Operands and results of products of halves, bfloat16 or float16 numbers: pairs of neighbours along k,
// which is what the CPU's instructions multiply. Sums are floats until the epilogue is done, and rounded once.
#pragma once

#if defined(__AVX512BF16__)

#include "amx.h"
#include "blocked.h"
#include "elements.h"
#include "gemm.h"
#include "unfinished.h"

namespace kd::halves {

// Pairs are moved about as if they were one float. What is missing of the last of them, or of the
// last tile's row, are zeros.
#if defined(KD_AMX)
constexpr int64_t kWholePairs = amx::kTilePairs;
#else
constexpr int64_t kWholePairs = 1;
#endif
static constexpr int64_t pairs_of(int64_t k) {
  return ceil_div(k, 2 * kWholePairs) * kWholePairs;
}

// --- the right operand: panels of kLanes columns, in each of them row after row of pairs ----------

static inline int64_t packed_size_of(int64_t k, int64_t n) { return packed_size(pairs_of(k), n); }

// `b` is (n, k), its rows with zeros up to 2 * pairs_of(k).
template <class Number>
void pack(float* packed, const Number* b, int64_t k, int64_t n, int threads) {
  const int64_t pairs = pairs_of(k);
  pack_b(packed, reinterpret_cast<const float*>(b), pairs, n, 1, pairs, threads);
}

// --- the left operand: rows as they are -----------------------------------------------------------

// So much a block of rows may take where it is copied, `spread_out` as it is.
static inline int64_t rows_buffer_size(int64_t rows, int64_t k) { return rows * (pairs_of(k) + 48); }

// Rows that do not end with a whole pair, or tile, are copied, with zeros behind them.
template <class Of>
struct PairRows {
  using Number = Of;
  const Number* a;
  int64_t lda, k;

  Block block(int64_t row, int64_t rows, float* buffer) const {
    const int64_t pairs = pairs_of(k);
    if (k == 2 * pairs && lda % 2 == 0)
      return MatrixRows{reinterpret_cast<const float*>(a), lda / 2}.block(row, rows, 0, pairs,
                                                                          buffer);
    const int64_t ld = spread_out(pairs);
    for (int64_t i = 0; i < rows; i++)
      copy_filled_up(buffer + i * ld, pairs, a + (row + i) * lda, k * static_cast<int64_t>(sizeof(Number)));
    return {buffer, ld, 1};
  }
};

// --- the product ----------------------------------------------------------------------------------

template <class Element>
using Unfinished = kd::Unfinished<float, Element>;

// c = epilogue(scale * (a @ b) + shift), of which an item computes some rows and panels.
template <class Rows, class Of>
struct Product {
  using Element = Of;
  using Number = typename Rows::Number;
  using ToFinish = Unfinished<Element>;
  int64_t m, n, k;
  Rows a;
  const float* b;  // packed
  Element* c;
  int64_t ldc;
  EpilogueOf<Element> e;
  OfColumns own = {};

  int64_t pairs() const { return pairs_of(k); }
  int64_t rows_buffer(int64_t rows) const { return rows_buffer_size(rows, k); }
  Block panel(int64_t index, int64_t from) const {
    return {b + index * kLanes * pairs() + from * kLanes, kLanes * pairs(), kLanes};
  }
  // The sums of some rows, from one of its elements on.
  Unfinished<Element> unfinished(const float* sums, int64_t ld, int64_t row, int64_t rows,
                                 int64_t column, int64_t columns) const {
    return {sums, ld,  rows, columns, c + row * ldc + column,
            ldc,  e.at(row, column), own.from(column)};
  }
};

}  // namespace kd::halves

#endif
