// Normal random numbers, two out of two uniform ones: Box and Muller's way.
#pragma once

#include "random.h"

namespace kd {

typedef int32_t integers __attribute__((vector_size(kDrawn * 4)));

template <int terms>
static inline floats polynomial(floats x, const float (&coefficients)[terms]) {
  floats p = floats{} + coefficients[0];
#pragma GCC unroll 8
  for (int i = 1; i < terms; i++) p = p * x + coefficients[i];
  return p;
}

// The natural logarithm for 0 < x <= 1, to 2e-7.
static inline floats log_of_fraction(floats x) {
  const integers bits = (integers)x;
  const integers exponent = (bits - 0x3f3504f3) >> 23;  // what is left is around 1
  const floats f = (floats)(bits - (exponent << 23)) - 1.0f;
  const floats p = polynomial(f, {-0x1.4bd738p-4f, 0x1.04592ap-3f, -0x1.09abep-3f, 0x1.22dc48p-3f,
                                  -0x1.54d54ep-3f, 0x1.99a14cp-3f, -0x1.0000c8p-2f, 0x1.555552p-2f});
  return f - f * f * 0.5f + f * f * f * p + __builtin_convertvector(exponent, floats) * 0x1.62e43p-1f;
}

struct Direction2 {
  floats cosine, sine;
};

// Of an angle in turns, 0 <= turns < 1.
static inline Direction2 direction_of(floats turns) {
  const integers quarter = __builtin_convertvector(turns * 4.0f + 0.5f, integers);
  const floats r = turns - __builtin_convertvector(quarter, floats) * 0.25f, square = r * r;
  const floats s = r * polynomial(square, {-0x1.2d9b7cp+6f, 0x1.465ec4p+6f, -0x1.4abbbap+5f,
                                           0x1.921fb6p+2f});
  const floats c = polynomial(square, {0x1.d9c326p+5f, -0x1.55c57ap+6f, 0x1.03c1dcp+6f,
                                       -0x1.3bd3ccp+4f, 1.0f});
  const integers turned = -(quarter & 1), swapped = ((integers)s ^ (integers)c) & turned;
  const integers below = (quarter & 2) << 30, left = ((quarter + 1) & 2) << 30;  // sign bits
  return {(floats)((integers)c ^ swapped ^ left), (floats)((integers)s ^ swapped ^ below)};
}

static inline floats square_root(floats x) {
#if defined(__AVX512F__)
  return (floats)_mm512_sqrt_ps((__m512)x);
#else
  for (int i = 0; i < kDrawn; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

static inline void draw_normal(float* out, uint64_t first, uint64_t key) {
  const Drawn d = philox(first, key);
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; pair++) {
    const floats square = log_of_fraction(1.0f - uniform(d.word[2 * pair])) * -2.0f;
    const floats radius = square_root(square);
    const Direction2 at = direction_of(uniform(d.word[2 * pair + 1]));
    *reinterpret_cast<floats*>(out + 2 * pair * kDrawn) = radius * at.cosine;
    *reinterpret_cast<floats*>(out + (2 * pair + 1) * kDrawn) = radius * at.sine;
  }
}

}  // namespace kd
