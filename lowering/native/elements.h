// Elements of tensors as floats: what is read is widened, and what is written is rounded.
#pragma once

#include <cstring>

#include "partial.h"
#include "vec.h"

namespace kd {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct Int8 {
  int8_t value;
};
struct Uint8 {
  uint8_t value;
};

typedef uint16_t hvec __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

// Spelled out: GCC takes three instructions for each.
static inline ivec widened(hvec v) {
#if defined(__AVX512F__)
  return (ivec)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
  return (ivec)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, ivec);
#endif
}

static inline hvec narrowed(ivec v) {
#if defined(__AVX512F__)
  return (hvec)_mm512_cvtepi32_epi16((__m512i)v);
#else
  return __builtin_convertvector(v, hvec);
#endif
}

static inline vec to_floats(hvec v, BFloat16) { return (vec)(widened(v) << 16); }

static inline hvec from_floats(vec v, BFloat16) {
  const ivec bits = (ivec)v;
  const ivec to_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return narrowed(v != v ? ivec{} + 0x7fc0 : to_even);
}

static inline vec to_floats(hvec v, Half) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps((__m256i)v);
#elif defined(__AVX2__) && defined(__F16C__)
  return (vec)_mm256_cvtph_ps((__m128i)v);
#else
  const ivec bits = widened(v), sign = (bits & 0x8000) << 16, magnitude = (bits & 0x7fff) << 13;
  const ivec scaled = (ivec)((vec)magnitude * splat(0x1p112f));  // right for denormal halves too
  const ivec special = magnitude | 0x7f800000;
  return (vec)(sign | (magnitude >= (0x7c00 << 13) ? special : scaled));
#endif
}

static inline hvec from_floats(vec v, Half) {
#if defined(__AVX512F__)
  return (hvec)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__) && defined(__F16C__)
  return (hvec)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const ivec bits = (ivec)v, sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  const vec a = (vec)magnitude;
  const ivec normal = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112 << 10);
  // Added to 1/2, whose last bit is worth as much as the last bit of a denormal half.
  const ivec denormal = (ivec)(a + splat(0.5f)) - 0x3f000000;
  ivec r = a < splat(0x1p-14f) ? denormal : normal;
  r = a >= splat(65520.0f) ? ivec{} + 0x7c00 : r;
  r = a != a ? ivec{} + 0x7e00 : r;
  return narrowed(r | sign);
#endif
}

static inline vec load_floats(const float* p) { return load(p); }
static inline vec load_floats_first(const float* p, int count) { return load_first(p, count); }
static inline void store_floats(float* p, vec v) { store(p, v); }
static inline void store_floats_first(float* p, vec v, int count) { store_first(p, v, count); }

template <class Element>
static inline vec load_floats(const Element* p) {
  return to_floats(*reinterpret_cast<const hvec*>(p), Element());
}

template <class Element>
static inline vec load_floats_first(const Element* p, int count) {
  hvec v{};
  std::memcpy(&v, p, static_cast<size_t>(count) * sizeof(Element));
  return to_floats(v, Element());
}

template <class Element>
static inline void store_floats(Element* p, vec v) {
  *reinterpret_cast<hvec*>(p) = from_floats(v, Element());
}

template <class Element>
static inline void store_floats_first(Element* p, vec v, int count) {
  const hvec rounded = from_floats(v, Element());
  std::memcpy(p, &rounded, static_cast<size_t>(count) * sizeof(Element));
}

}  // namespace kd
