// Weights of bytes: words of four neighbours along k, in panels of kLanes columns.
#pragma once

#include "amx.h"
#include "elements.h"
#include "gemm.h"
#include "unfinished.h"

namespace kd::int8 {

// Where an instruction multiplies bytes without a sign by bytes with one, the rows have 128 added.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool kShifted = true;
#else
constexpr bool kShifted = false;
#endif

// Words are moved about as if they were one float. What is missing of the last of them, or of the
// last tile's row, are zeros.
#if defined(KD_AMX)
constexpr int64_t kWholeWords = amx::kTilePairs;
#else
constexpr int64_t kWholeWords = 1;
#endif
static constexpr int64_t words_of(int64_t k) { return ceil_div(k, 4 * kWholeWords) * kWholeWords; }

// In floats: the panels, and behind them the sum of each column, an integer: what a number that was added
// to all of a row adds to its products.
static inline int64_t packed_size_of(int64_t k, int64_t n) {
  return packed_size(words_of(k), n) + panels_of(n) * kLanes;
}

// A weight as it was packed.
struct Words {
  const float* data;
  int64_t k, n;

  int64_t depth() const { return words_of(k); }
  const float* panel(int64_t index) const { return data + index * kLanes * depth(); }
  const int32_t* column_sums() const {
    return reinterpret_cast<const int32_t*>(data + packed_size(depth(), n));
  }
};

// `b` is (n, k), its rows with zeros up to 4 * words_of(k).
static inline void pack(float* packed, const int8_t* b, int64_t k, int64_t n, int threads) {
  const int64_t words = words_of(k);
  pack_b(packed, reinterpret_cast<const float*>(b), words, n, 1, words, threads);
  auto* const sums = reinterpret_cast<int32_t*>(packed + packed_size(words, n));
  for (int64_t i = 0; i < n; i++) {
    int32_t sum = 0;
    for (int64_t p = 0; p < k; p++) sum += b[i * 4 * words + p];
    sums[i] = sum;
  }
  for (int64_t i = n; i < panels_of(n) * kLanes; i++) sums[i] = 0;
}

// The bytes of one place in the words of a vector, which are numbers of its lanes.
static inline vec bytes_at(ivec words, int place) {
  return __builtin_convertvector((words << (24 - 8 * place)) >> 24, vec);
}

}  // namespace kd::int8
