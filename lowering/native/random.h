// Random numbers from a counter (Philox4x32-10): each place of a tensor has its own, whatever the
// number of threads and the width of vectors.
#pragma once

#include "parallel.h"
#include "vec.h"

namespace kd {

// Sixteen lanes on every machine, so that all draw the same numbers; compilers split what is wider
// than a register.
constexpr int kDrawn = 16;
typedef uint32_t words __attribute__((vector_size(kDrawn * 4), aligned(4), may_alias));
typedef float floats __attribute__((vector_size(kDrawn * 4), aligned(4), may_alias));
typedef uint64_t halves __attribute__((vector_size(kDrawn * 4)));  // of `words`, twice as wide

struct Product64 {
  words high, low;
};

static inline Product64 multiply(words a, uint32_t factor) {
#if defined(__AVX512F__)
  const __m512i x = (__m512i)a, f = _mm512_set1_epi64(factor);
  const __m512i even = _mm512_mul_epu32(x, f);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), f);
  constexpr __mmask16 odd_lanes = 0xaaaa;
  return {(words)_mm512_mask_blend_epi32(odd_lanes, _mm512_srli_epi64(even, 32), odd),
          (words)_mm512_mask_blend_epi32(odd_lanes, even, _mm512_slli_epi64(odd, 32))};
#else
  // Even and odd lanes apart: each is the lower half of a lane twice as wide.
  const halves x = (halves)a, lower = halves{} + 0xffffffffu;
  const halves even = (x & lower) * factor, odd = (x >> 32) * factor;
  return {(words)(even >> 32 | (odd & ~lower)), (words)((even & lower) | odd << 32)};
#endif
}

struct Drawn {
  words word[4];
};

// Counters first..first+15 under one key: four random words for each.
static inline Drawn philox(uint64_t first, uint64_t key) {
  words lanes;
  for (int i = 0; i < kDrawn; i++) lanes[i] = static_cast<uint32_t>(i);
  const words low = lanes + static_cast<uint32_t>(first);  // `first` is a multiple of 16
  Drawn d{{low, words{} + static_cast<uint32_t>(first >> 32), words{}, words{}}};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    const Product64 p = multiply(d.word[0], 0xd2511f53u), q = multiply(d.word[2], 0xcd9e8d57u);
    d = {{q.high ^ d.word[1] ^ k0, q.low, p.high ^ d.word[3] ^ k1, p.low}};
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return d;
}

// In [0, 1), with the 24 bits that a float holds, as torch draws them.
static inline floats uniform(words w) {
  typedef int32_t integers __attribute__((vector_size(kDrawn * 4)));
  return __builtin_convertvector((integers)(w >> 8), floats) * 0x1p-24f;
}

constexpr int64_t kDrawnAtOnce = 4 * kDrawn;  // of one call to philox()
constexpr int64_t kDrawnPerItem = 64 * kDrawnAtOnce;

static inline void draw_uniform(float* out, uint64_t first, uint64_t key) {
  const Drawn d = philox(first, key);
  for (int i = 0; i < 4; i++) *reinterpret_cast<floats*>(out + i * kDrawn) = uniform(d.word[i]);
}

// fill(out, first counter) writes kDrawnAtOnce numbers.
template <class Fill>
static inline void draw(float* out, int64_t size, int threads, const Fill& fill) {
  for_each_item(ceil_div(size, kDrawnPerItem), threads, [&](int64_t item) {
    const int64_t end = std::min(size, (item + 1) * kDrawnPerItem);
    for (int64_t i = item * kDrawnPerItem; i < end; i += kDrawnAtOnce) {
      const uint64_t first = static_cast<uint64_t>(i) / 4;
      if (i + kDrawnAtOnce <= end) {
        fill(out + i, first);
      } else {
        float last[kDrawnAtOnce];
        fill(last, first);
        std::copy(last, last + (end - i), out + i);
      }
    }
  });
}

}  // namespace kd
