// Operands and results of products of halves, bfloat16 or float16 numbers: pairs of neighbours along k,
// which is what the CPU's instructions multiply. Sums are floats until the epilogue is done, and rounded once.
#pragma once

#if defined(__AVX512BF16__)

#include <cstring>

#include "amx.h"
#include "blocked.h"
#include "elements.h"
#include "gemm.h"

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
    const auto bytes = static_cast<size_t>(k) * sizeof(Number);
    for (int64_t i = 0; i < rows; i++) {
      auto* const to = reinterpret_cast<char*>(buffer + i * ld);
      std::memcpy(to, a + (row + i) * lda, bytes);
      std::memset(to + bytes, 0, static_cast<size_t>(pairs) * 4 - bytes);
    }
    return {buffer, ld, 1};
  }
};

// --- the results ----------------------------------------------------------------------------------

// By the CPU's instruction, which takes numbers below the normal ones for zeros, as products do.
static inline hvec rounded(vec v, BFloat16) { return (hvec)_mm512_cvtneps_pbh((__m512)v); }
static inline hvec rounded(vec v, Half) { return from_floats(v, Half()); }

template <class Number>
__attribute__((always_inline)) static inline void put(Number* to, vec v, int count) {
  const auto first = static_cast<__mmask16>((1u << count) - 1);
  _mm256_mask_storeu_epi16(to, first, (__m256i)rounded(v, Number()));
}
__attribute__((always_inline)) static inline void put(float* to, vec v, int count) {
  store_first(to, v, count);
}

// A factor and an addend for each column, in floats; nullptr: none.
struct OfColumns {
  const float *scale = nullptr, *shift = nullptr;
  OfColumns from(int64_t column) const {
    return {scale ? scale + column : nullptr, shift ? shift + column : nullptr};
  }
};

template <class Element>
struct Unfinished;
template <class Element>
using FinishRows = void (*)(const Unfinished<Element>& of, Range rows);
template <class Element>
FinishRows<Element> finish_rows_of(Act act);

// Sums of a product, and what is left to do with them: all of it in floats, and at most one rounding.
template <class Element>
struct Unfinished {
  const float* sums;
  int64_t ld, rows, columns;
  Element* c;
  int64_t ldc;
  EpilogueOf<Element> e;
  OfColumns own;

  static FinishRows<Element> finisher(Act act) { return finish_rows_of<Element>(act); }
};

template <Act act, class Element>
static void finish_with(const Unfinished<Element>& of, Range rows) {
  const EpilogueOf<Element>& e = of.e;
  const auto some = [&](int64_t i, int64_t j, auto count) __attribute__((always_inline)) {
    const auto get = [&](const auto* p) {
      return count == kLanes ? load_floats(p + j) : load_floats_first(p + j, count);
    };
    vec v = load(of.sums + i * of.ld + j);
    if (of.own.scale) v *= get(of.own.scale);
    if (of.own.shift) v += get(of.own.shift);
    if (e.bias) v += get(e.bias);
    if (e.before) v += get(e.before + i * e.ld_before);
    v = activate(act, v, e.a, e.b);
    if (e.times) v *= get(e.times + i * e.ld_times);
    if (e.after) v += get(e.after + i * e.ld_after);
    put(of.c + i * of.ldc + j, v, count);
  };
  const int64_t whole = of.columns / kLanes * kLanes;
  const int left = static_cast<int>(of.columns - whole);
  for (int64_t i = rows.begin; i < rows.end; i++) {
    for (int64_t j = 0; j < whole; j += kLanes) some(i, j, std::integral_constant<int, kLanes>{});
    if (left > 0) some(i, whole, left);
  }
}

template <class Element>
FinishRows<Element> finish_rows_of(Act act) {
  FinishRows<Element> found = nullptr;
  with_activation(act, [&](auto constant) { found = finish_with<constant.value, Element>; });
  return found;
}

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
