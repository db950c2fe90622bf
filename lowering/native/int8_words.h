// Weights of bytes: words of four neighbours along k, in panels of kLanes columns. And what is left to do
// with sums of products that such weights are a factor of.
#pragma once

#include <cstring>

#include "amx.h"
#include "elements.h"
#include "gemm.h"

namespace kd::int8 {

// Words are moved about as if they were one float. What is missing of the last of them, or of the
// last tile's row, are zeros.
#if defined(KD_AMX)
constexpr int64_t kWholeWords = amx::kTilePairs;
#else
constexpr int64_t kWholeWords = 1;
#endif
static constexpr int64_t words_of(int64_t k) { return ceil_div(k, 4 * kWholeWords) * kWholeWords; }

// In floats: the panels, and behind them the sum of each column, an integer.
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

// sums of row i and column j become sum * rows[i] * columns[j], then the epilogue is due. The sums may be
// of integers; nullptr: no factor.
template <class Sum, class Element>
struct Unfinished {
  const float* sums;
  int64_t ld, rows, columns;
  Element* c;
  int64_t ldc;
  EpilogueOf<Element> e;
  const float *row_scale = nullptr, *column_scale = nullptr;
  const int32_t* shift = nullptr;  // 128 times this is too much in the sums of a column

  using Finish = void (*)(const Unfinished& of, Range rows);
  static Finish finisher(Act act);
};

// The integers from [i, j] of the sums on, as many as a vector has.
template <class Element>
static inline ivec whole_sums(const Unfinished<int32_t, Element>& of, int64_t i, int64_t j) {
  const auto integers = [](const void* p) { return (ivec)load(static_cast<const float*>(p)); };
  const ivec sums = integers(of.sums + i * of.ld + j);
  return of.shift ? sums - (integers(of.shift + j) << 7) : sums;
}

template <Act act, class Sum, class Element>
static void finish_with(const Unfinished<Sum, Element>& of, Range rows) {
  const EpilogueOf<Element>& e = of.e;
  const auto some = [&](int64_t i, int64_t j, auto count) __attribute__((always_inline)) {
    const auto get = [&](const auto* p) {
      return count == kLanes ? load_floats(p + j) : load_floats_first(p + j, count);
    };
    vec v;
    if constexpr (std::is_same_v<Sum, int32_t>)
      v = __builtin_convertvector(whole_sums(of, i, j), vec);
    else
      v = load(of.sums + i * of.ld + j);
    if (of.row_scale) v *= splat(of.row_scale[i]);
    if (of.column_scale) v *= get(of.column_scale);
    if (e.bias) v += get(e.bias);
    if (e.before) v += get(e.before + i * e.ld_before);
    v = activate(act, v, e.a, e.b);
    if (e.times) v *= get(e.times + i * e.ld_times);
    if (e.after) v += get(e.after + i * e.ld_after);
    Element* const to = of.c + i * of.ldc + j;
    if (count == kLanes)
      store_floats(to, v);
    else
      store_floats_first(to, v, count);
  };
  const int64_t whole = of.columns / kLanes * kLanes;
  const int left = static_cast<int>(of.columns - whole);
  for (int64_t i = rows.begin; i < rows.end; i++) {
    for (int64_t j = 0; j < whole; j += kLanes) some(i, j, std::integral_constant<int, kLanes>{});
    if (left > 0) some(i, whole, left);
  }
}

template <class Sum, class Element>
typename Unfinished<Sum, Element>::Finish Unfinished<Sum, Element>::finisher(Act act) {
  Finish found = nullptr;
  with_activation(act, [&](auto constant) { found = finish_with<constant.value, Sum, Element>; });
  return found;
}

}  // namespace kd::int8
