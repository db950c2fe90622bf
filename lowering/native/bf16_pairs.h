// Operands and results of products of bfloat16 numbers: pairs of neighbours along k, which is what
// the CPU's instructions multiply. Sums are floats until the epilogue is done, and rounded once.
#pragma once

#if defined(__AVX512BF16__)

#include <cstring>

#include "amx.h"
#include "blocked.h"
#include "elements.h"
#include "gemm.h"

namespace kd::bf16 {

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
static inline void pack(float* packed, const BFloat16* b, int64_t k, int64_t n, int threads) {
  const int64_t pairs = pairs_of(k);
  pack_b(packed, reinterpret_cast<const float*>(b), pairs, n, 1, pairs, threads);
}

// --- the left operand: rows as they are -----------------------------------------------------------

// Rows that do not end with a whole pair, or tile, are copied, with zeros behind them.
struct PairRows {
  const BFloat16* a;
  int64_t k;

  static int64_t buffer_size(int64_t rows, int64_t k) { return rows * (pairs_of(k) + 48); }

  Block block(int64_t row, int64_t rows, float* buffer) const {
    const int64_t pairs = pairs_of(k);
    if (k == 2 * pairs)
      return MatrixRows{reinterpret_cast<const float*>(a), pairs}.block(row, rows, 0, pairs,
                                                                        buffer);
    const int64_t ld = spread_out(pairs);
    const auto bytes = static_cast<size_t>(k) * sizeof(BFloat16);
    for (int64_t i = 0; i < rows; i++) {
      auto* const to = reinterpret_cast<char*>(buffer + i * ld);
      std::memcpy(to, a + (row + i) * k, bytes);
      std::memset(to + bytes, 0, static_cast<size_t>(pairs) * 4 - bytes);
    }
    return {buffer, ld, 1};
  }
};

// --- the results ----------------------------------------------------------------------------------

using PairEpilogue = EpilogueOf<BFloat16>;

// By the CPU's instruction, which takes numbers below the normal ones for zeros, as products do.
static inline hvec rounded(vec v) { return (hvec)_mm512_cvtneps_pbh((__m512)v); }

// Sums of a product, and what is left to do with them: all of it in floats, and the one rounding.
struct Unfinished {
  const float* sums;
  int64_t ld, rows, columns;
  BFloat16* c;
  int64_t ldc;
  PairEpilogue e;
};

template <Act act>
static void finish_with(const Unfinished& of, Range rows) {
  const PairEpilogue& e = of.e;
  const auto some = [&](int64_t i, int64_t j, auto count) __attribute__((always_inline)) {
    const auto get = [&](const BFloat16* p) {
      return count == kLanes ? load_floats(p + j) : load_floats_first(p + j, count);
    };
    vec v = load(of.sums + i * of.ld + j);
    if (e.bias) v += get(e.bias);
    if (e.before) v += get(e.before + i * e.ld_before);
    v = activate(act, v, e.a, e.b);
    if (e.times) v *= get(e.times + i * e.ld_times);
    if (e.after) v += get(e.after + i * e.ld_after);
    const hvec result = rounded(v);
    std::memcpy(of.c + i * of.ldc + j, &result, static_cast<size_t>(count) * sizeof(BFloat16));
  };
  const int64_t whole = of.columns / kLanes * kLanes;
  const int left = static_cast<int>(of.columns - whole);
  for (int64_t i = rows.begin; i < rows.end; i++) {
    for (int64_t j = 0; j < whole; j += kLanes) some(i, j, std::integral_constant<int, kLanes>{});
    if (left > 0) some(i, whole, left);
  }
}

using FinishRows = void (*)(const Unfinished& of, Range rows);

static inline FinishRows finish_rows_of(Act act) {
  FinishRows found = nullptr;
  with_activation(act, [&](auto constant) { found = finish_with<constant.value>; });
  return found;
}

static inline void finish(const Unfinished& of) { finish_rows_of(of.e.act)(of, {0, of.rows}); }

// c = epilogue(a @ b), of which an item computes some rows and panels.
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

}  // namespace kd::bf16

#endif
