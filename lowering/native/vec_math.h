// Elementary functions on a whole vector, within 2 ulp of the exact value over the whole range.
// Not a number stays one; infinities give the limits. Coefficients are minimax fits whose values
// were rounded to float one at a time, the rest being fitted again.
#pragma once

#include "vec.h"

namespace kd {

// What x86's own max and min do: the second operand where either is not a number. One instruction.
static inline vec greater_or_second(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

static inline vec lesser_or_second(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// torch.maximum and torch.minimum: not a number where either operand is none.
static inline vec maximum(vec a, vec b) { return a != a ? a : greater_or_second(a, b); }
static inline vec minimum(vec a, vec b) { return a != a ? a : lesser_or_second(a, b); }

static inline vec absolute(vec x) { return (vec)((ivec)x & 0x7fffffff); }
static inline vec with_sign_of(vec magnitude, vec sign) {
  return (vec)((ivec)magnitude | ((ivec)sign & (int32_t)0x80000000));
}

// To the nearest integer, halves to the even one. The generic form holds for |x| < 2^22.
static inline vec nearest_integer(vec x) {
#if defined(__AVX512F__)
  return (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vec)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vec shift = splat(12582912.0f);  // 1.5 * 2^23: the sum has no bits left for a fraction
  return (x + shift) - shift;
#endif
}

// x * 2^n for integers n in [-160, 160], rounded once where the result is denormal.
static inline vec times_power_of_two(vec x, vec n) {
#if defined(__AVX512F__)
  return (vec)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
  const ivec power = __builtin_convertvector(n, ivec);
  const ivec half = power >> 1;  // two steps, as neither 2^128 nor 2^-150 is a normal float
  return x * (vec)((half + 127) << 23) * (vec)((power - half + 127) << 23);
#endif
}

// 2^f for |f| <= 1/2, to 1e-7.
static inline vec power_of_fraction(vec f) {
  vec p = fma(splat(0x1.5bda7ap-10f), f, splat(0x1.3ce8bp-7f));
  p = fma(p, f, splat(0x1.c6b6d8p-5f));
  p = fma(p, f, splat(0x1.ebf9c2p-3f));
  p = fma(p, f, splat(0x1.62e42ap-1f));
  return fma(p, f, splat(1.0f));
}

// 2^x for x <= 0, to 1e-7, for sums of exponentials, which need no better. What would be denormal is
// 0: masked scores are far below the others, and Intel's CPUs take a hundred times as long to make
// a denormal number, and to multiply by it.
static inline vec exp2_of_nonpositive(vec x) {
  const vec least = splat(-126.0f), at_least = greater_or_second(least, x);
  const vec n = nearest_integer(at_least), p = power_of_fraction(at_least - n);
#if defined(__AVX512F__)
  const vec power = times_power_of_two(p, n);
#else
  const vec power = (vec)((ivec)p + (__builtin_convertvector(n, ivec) << 23));
#endif
  return x < least ? vec{} : power;
}

static inline vec exp(vec x) {
  // Beyond these the result is infinite or zero anyway, and infinity minus infinity is avoided.
  x = lesser_or_second(splat(89.0f), greater_or_second(splat(-104.0f), x));
  const vec n = nearest_integer(x * splat(0x1.715476p+0f));
  vec r = fma(n, splat(-0x1.62e4p-1f), x);  // log(2) in two parts: the first times n is exact
  r = fma(n, splat(-0x1.7f7d1cp-20f), r);
  vec p = fma(splat(0x1.6a495cp-10f), r, splat(0x1.1239ap-7f));
  p = fma(p, r, splat(0x1.5558b4p-5f));
  p = fma(p, r, splat(0x1.555492p-3f));
  p = fma(p, r, splat(0x1.fffffcp-2f));
  p = fma(p, r, splat(1.0f));
  return times_power_of_two(fma(p, r, splat(1.0f)), n);
}

// 0 below -88.7, where the exponential is infinite; so does torch.
static inline vec sigmoid(vec x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

static inline vec tanh(vec x) {
  const vec a = absolute(x), square = x * x;
  vec p = fma(splat(-0x1.9454f2p-8f), square, splat(0x1.5811f6p-6f));
  p = fma(p, square, splat(-0x1.b905c4p-5f));
  p = fma(p, square, splat(0x1.110c5ep-3f));
  p = fma(p, square, splat(-0x1.555548p-2f));
  const vec small = fma(p * square, x, x);
  const vec large = splat(1.0f) - splat(2.0f) / (exp(a + a) + splat(1.0f));
  return a < splat(0.55f) ? small : with_sign_of(large, x);
}

static inline vec erf(vec x) {
  const vec a = lesser_or_second(splat(4.0f), absolute(x)), square = x * x;
  vec p = fma(splat(0x1.4771fep-14f), square, splat(-0x1.a3515ep-11f));
  p = fma(p, square, splat(0x1.53f224p-8f));
  p = fma(p, square, splat(-0x1.b7f71ap-6f));
  p = fma(p, square, splat(0x1.ce2ce6p-4f));
  p = fma(p, square, splat(-0x1.81273ep-2f));
  p = fma(p, square, splat(0x1.06eba8p-3f));
  const vec small = fma(p, x, x);
  vec q = fma(splat(0x1.1e2778p-12f), a, splat(-0x1.196044p-8f));  // log2(1 - erf(a))
  q = fma(q, a, splat(0x1.037c76p-5f));
  q = fma(q, a, splat(-0x1.3165d4p-3f));
  q = fma(q, a, splat(-0x1.d72590p-1f));
  q = fma(q, a, splat(-0x1.a0568ap+0f));
  q = fma(q, a, splat(-0x1.bb489ap-12f));
  const vec large = splat(1.0f) - exp2_of_nonpositive(q);
  return a < splat(1.0f) ? small : with_sign_of(large, x);
}

// Halves are added to halves, so the order is the same on every machine with these lanes.
static inline float horizontal_sum(vec v) {
#pragma GCC unroll 4
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}

// Not a number where a lane is none.
static inline float horizontal_maximum(vec v) {
  float m = v[0];
  for (int i = 1; i < kLanes; i++) m = (m != m || m > v[i]) ? m : v[i];
  return m;
}

static inline float horizontal_minimum(vec v) {
  float m = v[0];
  for (int i = 1; i < kLanes; i++) m = (m != m || m < v[i]) ? m : v[i];
  return m;
}

}  // namespace kd
