// Square blocks of kLanes vectors, turned over in registers.
#pragma once

#include "vec.h"

namespace kd {

// Lanes of a and b: the i-th is number lanes[i] of the two after one another.
static inline vec pick(vec a, vec b, ivec lanes) {
#if defined(__AVX512F__)
  return (vec)_mm512_permutex2var_ps((__m512)a, (__m512i)lanes, (__m512)b);
#elif defined(__clang__)
  vec r;
  for (int i = 0; i < kLanes; i++) r[i] = lanes[i] < kLanes ? a[lanes[i]] : b[lanes[i] - kLanes];
  return r;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

static inline vec pick(vec v, ivec lanes) {
#if defined(__clang__)
  return pick(v, v, lanes);
#else
  return __builtin_shuffle(v, lanes);
#endif
}

// Exchanges the blocks of `width` lanes that are off the diagonal of each block of twice that.
template <int width>
static inline void exchange(vec (&v)[kLanes]) {
  ivec low{}, high{};
  for (int i = 0; i < kLanes; i++) {
    low[i] = i & width ? i - width + kLanes : i;
    high[i] = i & width ? i + kLanes : i + width;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) {
    if (i & width) continue;
    const vec above = v[i], below = v[i + width];
    v[i] = pick(above, below, low);
    v[i + width] = pick(above, below, high);
  }
}

static inline void transpose(vec (&v)[kLanes]) {
  exchange<1>(v);
  exchange<2>(v);
  if constexpr (kLanes > 4) exchange<4>(v);
  if constexpr (kLanes > 8) exchange<8>(v);
}

}  // namespace kd
