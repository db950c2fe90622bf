// One vector of floats, as wide as this machine has it. The kernels here are built on the machine
// that runs them, so the width is a constant and every loop over it is unrolled.
#pragma once

#include <cstdint>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace kd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // NEON, SSE, VSX: the compiler maps GCC's vectors onto them
#endif

// aligned(4): loads and stores may be unaligned, as tensors are only aligned to their elements.
typedef float vec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

static inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
static inline void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
static inline vec splat(float x) { return vec{} + x; }

// a * b + c in one rounding. Spelled out: torch's builder forbids the compiler to contract.
static inline vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  vec r;
  for (int i = 0; i < kLanes; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

}  // namespace kd
