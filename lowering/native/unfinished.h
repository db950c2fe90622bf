// Sums of a product that were stored, and what is left to do with them: all of it in floats, and at most
// one rounding.
#pragma once

#include "elements.h"
#include "epilogue.h"
#include "parallel.h"

namespace kd {

#if defined(__AVX512BF16__)
// By the CPU's instruction, which takes numbers below the normal ones for zeros, as products do.
static inline hvec rounded(vec v, BFloat16) { return (hvec)_mm512_cvtneps_pbh((__m512)v); }
static inline hvec rounded(vec v, Half) { return from_floats(v, Half()); }

template <class Number>
__attribute__((always_inline)) static inline void put(Number* to, vec v, int count) {
  const auto first = static_cast<__mmask16>((1u << count) - 1);
  _mm256_mask_storeu_epi16(to, first, (__m256i)rounded(v, Number()));
}
#else
template <class Number>
__attribute__((always_inline)) static inline void put(Number* to, vec v, int count) {
  if (count == kLanes)
    store_floats(to, v);
  else
    store_floats_first(to, v, count);
}
#endif
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

// Sums of `Sum`, float or int32_t. Those of integers may have a factor for each row, and more in them than
// they should: 128 times what there is in each column of `excess`.
template <class Sum, class Element>
struct Unfinished {
  const float* sums;
  int64_t ld, rows, columns;
  Element* c;
  int64_t ldc;
  EpilogueOf<Element> e;
  OfColumns own;
  const float* of_rows = nullptr;
  const int32_t* excess = nullptr;

  using Finish = void (*)(const Unfinished& of, Range rows);
  static Finish finisher(Act act);

  // From [i, j] on, as many as a vector has.
  vec floats(int64_t i, int64_t j) const {
    const float* const at = sums + i * ld + j;
    if constexpr (std::is_same_v<Sum, float>) {
      return load(at);
    } else {
      ivec whole = (ivec)load(at);
      if (excess) whole -= (ivec)load(reinterpret_cast<const float*>(excess) + j) << 7;
      const vec v = __builtin_convertvector(whole, vec);
      return of_rows ? v * splat(of_rows[i]) : v;
    }
  }
};

template <Act act, class Sum, class Element>
static void finish_with(const Unfinished<Sum, Element>& of, Range rows) {
  const EpilogueOf<Element>& e = of.e;
  const auto some = [&](int64_t i, int64_t j, auto count) __attribute__((always_inline)) {
    const auto get = [&](const auto* p) {
      return count == kLanes ? load_floats(p + j) : load_floats_first(p + j, count);
    };
    vec v = of.floats(i, j);
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

template <class Sum, class Element>
typename Unfinished<Sum, Element>::Finish Unfinished<Sum, Element>::finisher(Act act) {
  Finish found = nullptr;
  with_activation(act, [&](auto constant) { found = finish_with<constant.value, Sum, Element>; });
  return found;
}

}  // namespace kd
