// The innermost loops of a matrix product: a tile of the output that stays in registers.
#pragma once

#include <cstring>

#include "epilogue.h"
#include "sums_avx2.h"

namespace kd {

// The most vectors that a tile is wide, and the most rows that it has for each width: as many
// accumulators as the registers hold beside the operands. Wide tiles load less per multiplication.
#if defined(__AVX512F__)
constexpr int kTileWidth = 4;
constexpr int kTileRows[kTileWidth + 1] = {0, 12, 14, 8, 6};
#elif defined(__AVX2__)
constexpr int kTileWidth = 3;
constexpr int kTileRows[kTileWidth + 1] = {0, 10, 6, 4};
#elif defined(__aarch64__)
constexpr int kTileWidth = 4;
constexpr int kTileRows[kTileWidth + 1] = {0, 12, 12, 8, 6};
#else
constexpr int kTileWidth = 2;
constexpr int kTileRows[kTileWidth + 1] = {0, 6, 4};
#endif
// Tiles of long sums are this wide at most. Four panels of a block's depth do not fit into the first
// cache, and three are faster on a Xeon with AMX; not measured on AMD. A compiler that is older than
// the CPU takes every AMD with AVX-512 for a Zen 3.
#if defined(__AVX512F__) && !defined(__znver3__) && !defined(__znver4__) && !defined(__znver5__)
constexpr int kStripWidth = 3;
#else
constexpr int kStripWidth = kTileWidth;
#endif
constexpr int kMostTileRows = kTileRows[1] > kTileRows[2] ? kTileRows[1] : kTileRows[2];

// What will be needed soon is fetched while a tile is computed: a line of the cache at a time, `step`
// numbers further with each number that is summed up.
struct Ahead {
  const float* from = nullptr;
  int64_t step = 0;
};

// What a tile does with its sums while they are in registers. Whatever takes longer works on sums
// that were stored.
struct Finish {
  bool accumulate;  // onto what earlier parts of the sum left in the output
  bool last;        // nothing more is to be added, so the epilogue is due
  float low, high;
  Ahead ahead = {};
  int last_lanes = kLanes;  // of each row's last vector that are within the output
};

// The same in every lane, bit by bit: it need not be a float. An addition to zero, as in splat, would cost
// an instruction here.
static inline vec broadcast(const float* p) {
#if defined(__AVX512F__)
  return (vec)_mm512_set1_ps(*p);
#elif defined(__AVX2__)
  return (vec)_mm256_broadcast_ss(p);
#else
  int32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return (vec)(ivec{} + bits);
#endif
}

// In one rounding where that is an instruction; a call of a function it must not be.
static inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

// Keeps the compiler from loading a value again at each of its uses.
template <class Vector>
static inline void hold_in_register(Vector& v) {
#if defined(__AVX2__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#else
  (void)v;
#endif
}

// Half a vector: enough for the last panel of 24 or 40 columns. Zen 4 computes a vector of 64 bytes in
// two halves, so the half that is left out is half of the time; other CPUs lose nothing by it.
#if defined(__AVX512F__)
constexpr int kHalfLanes = kLanes / 2;
typedef float half_vec __attribute__((vector_size(kHalfLanes * 4), aligned(4), may_alias));

static inline half_vec load_half(const float* p) { return *reinterpret_cast<const half_vec*>(p); }
static inline half_vec broadcast_half(const float* p) {
  return (half_vec)_mm256_broadcast_ss(p);
}
static inline half_vec low_half(vec v) { return (half_vec)_mm512_castps512_ps256((__m512)v); }
static inline vec with_zeros(half_vec v) { return (vec)_mm512_zextps256_ps512((__m256)v); }
static inline half_vec multiply_add(half_vec a, half_vec b, half_vec c) {
  return (half_vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#else
constexpr int kHalfLanes = 0;  // no tile ends with a half
typedef vec half_vec;

static inline half_vec load_half(const float* p) { return load(p); }
static inline half_vec broadcast_half(const float* p) { return broadcast(p); }
static inline half_vec low_half(vec v) { return v; }
static inline vec with_zeros(half_vec v) { return v; }
#endif

// Part of an operand: data[i * across + p * along], where p runs over what is summed up. For a
// left operand i is a row, for a right one a panel of kLanes columns. A left one may be several runs
// of equal length, `jump` from the end of one to the next; the right one goes on where it was.
struct Block {
  const float* data;
  int64_t across, along;
  int64_t runs = 1, jump = 0;
};

// What 32 bits of an operand are: one number, or whatever `Numbers` of another kind makes of them.
struct Floats {
  static inline vec multiply_add(vec a, vec b, vec c) { return kd::multiply_add(a, b, c); }
};

// rows x (width * kLanes) sums over k of a[row][k] * b[panel][k][lane]; depth: of one run. `half`:
// of the last panel only the first kHalfLanes.
template <int rows, int width, class Numbers = Floats, bool half = false>
struct Sums {
  vec at[rows][width];

  __attribute__((always_inline)) Sums(int64_t depth, const Block& left, const Block& right,
                                      Ahead ahead) {
    constexpr int whole_panels = width - half;
    half_vec halves[half ? rows : 1] = {};
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < width; j++) at[i][j] = vec{};
    const int64_t done = by_hand(depth, left, right, ahead);
    // One pointer for three rows: x86 adds no more than one register to it, once or twice.
    constexpr int threes = (rows + 2) / 3;
    const float* a[threes];
    for (int g = 0; g < threes; g++) a[g] = left.data + 3 * g * left.across + done;
    const float* b = right.data + done * kLanes;
    const int64_t row = left.across, panel = right.across, a_step = left.along,
                  b_step = right.along;
    // One loop: between two of them the sums would not stay in registers.
    const int64_t whole = depth * left.runs;
    int64_t of_run = depth - done;
    for (int64_t p = done; p < whole; p++, b += b_step) {
      if (rows > 2 && width > 1) {
        __builtin_prefetch(ahead.from, 0, 2);
        ahead.from += ahead.step;
      }
      vec loaded[width];
#pragma GCC unroll 4
      for (int j = 0; j < whole_panels; j++) {
        loaded[j] = load(b + j * panel);
        if (rows > 1) hold_in_register(loaded[j]);
      }
      half_vec loaded_half{};
      if constexpr (half) {
        loaded_half = load_half(b + whole_panels * panel);
        if (rows > 1) hold_in_register(loaded_half);
      }
#pragma GCC unroll 16
      for (int i = 0; i < rows; i++) {
        const float* const from = a[i / 3] + i % 3 * row;
        if constexpr (whole_panels == 0) {
          halves[i] = multiply_add(broadcast_half(from), loaded_half, halves[i]);
          continue;
        }
        const vec factor = broadcast(from);
#pragma GCC unroll 4
        for (int j = 0; j < whole_panels; j++)
          at[i][j] = Numbers::multiply_add(factor, loaded[j], at[i][j]);
        if constexpr (half) halves[i] = multiply_add(low_half(factor), loaded_half, halves[i]);
      }
#pragma GCC unroll 8
      for (int g = 0; g < threes; g++) a[g] += a_step;
      if (__builtin_expect(--of_run == 0, 0)) {
        of_run = depth;
#pragma GCC unroll 8
        for (int g = 0; g < threes; g++) a[g] += left.jump;
      }
    }
    if constexpr (half)
      for (int i = 0; i < rows; i++) at[i][whole_panels] = with_zeros(halves[i]);
  }

 private:
  // How many of the products, from the first on. With one that is left over, a run ends elsewhere.
  __attribute__((always_inline)) int64_t by_hand(int64_t depth, const Block& left,
                                                 const Block& right, Ahead ahead) {
    if constexpr (kByHand<rows, width> && std::is_same_v<Numbers, Floats> && !half) {
      const bool whole_runs = depth % 4 == 0 || left.runs == 1;
      if (depth < 4 || !whole_runs || left.along != 1 || right.along != kLanes) return 0;
      constexpr int64_t bytes = sizeof(float);
      const Walk walk{left.data,
                      right.data,
                      ahead.from,
                      left.across * bytes,
                      right.across * bytes,
                      ahead.step * 2 * bytes,
                      depth / 4,
                      left.runs,
                      left.jump * bytes};
      multiply_by_hand(walk, at);
      return depth / 4 * 4 * left.runs;
    }
    return 0;
  }
};

// The activation of the epilogue, if it is due, is no more than the limits in `finish`.
using Tile = void (*)(int64_t depth, const Block& left, const Block& right, float* c, int64_t ldc,
                      const Epilogue& e, const Finish& finish);

// Of so many rows and vectors, both within the limits above; `half`: the last vector is half a one.
Tile tile_of(int rows, int width, bool half);

// Adds up and finishes sums that were stored, because their activation takes more registers than
// a tile leaves. `sums` and `c` may be the same.
void finish_stored(const float* sums, int64_t ld, int rows, int columns, float* c, int64_t ldc,
                   const Epilogue& e, const Finish& finish);

}  // namespace kd
