// The first lanes of a vector, where a row ends within it: memory beyond them is not touched.
#pragma once

#include "vec.h"

namespace kd {

#if defined(__AVX512F__)
static inline __mmask16 first_lanes(int count) { return (__mmask16)((1u << count) - 1); }
#elif defined(__AVX2__)
static inline __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// 0 < count <= kLanes; the other lanes are zero.
static inline vec load_first(const float* p, int count) {
#if defined(__AVX512F__)
  return (vec)_mm512_maskz_loadu_ps(first_lanes(count), p);
#elif defined(__AVX2__)
  return (vec)_mm256_maskload_ps(p, first_lanes(count));
#else
  vec v{};
  for (int i = 0; i < count; i++) v[i] = p[i];
  return v;
#endif
}

static inline void store_first(float* p, vec v, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, first_lanes(count), (__m512)v);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(p, first_lanes(count), (__m256)v);
#else
  for (int i = 0; i < count; i++) p[i] = v[i];
#endif
}

static inline void copy_row(float* to, const float* from, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i));
  if (i < size) store_first(to + i, load_first(from + i, (int)(size - i)), (int)(size - i));
}

}  // namespace kd
