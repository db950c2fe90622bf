// The innermost loop of the most common tiles with AVX2, in assembly: four products deep at a time,
// and in between nothing but loads. GCC unrolls it with sums that go to the stack and back, or not at
// all: then a fourth of its instructions count and compare. That is 3% where a core is alone, and a
// sixth where it shares its decoders with a busy neighbour (two machines on a core of Zen 3).
#pragma once

#include "vec.h"

namespace kd {

// Are these tiles of sums made here?
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
template <int rows, int width>
constexpr bool kByHand = (rows == 4 && width == 3) || (rows == 3 && width == 3) ||
                         (rows == 6 && width == 2);
#else
template <int rows, int width>
constexpr bool kByHand = false;
#endif

// What is multiplied: runs of some fours of numbers. How far apart what is read is, is in bytes.
struct Walk {
  const float *left, *right, *ahead;
  int64_t row, panel;
  int64_t ahead_step;  // for two products
  int64_t fours, runs, jump;
};

// Clang looks at names of registers in templates that nobody uses, too.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)

// `a`, `b`: bytes from where a row and a panel are read.
#define KD_VECTOR(b, place, to) "vmovups " #b place ", %%ymm" #to "\n"
#define KD_FACTOR(a, place) "vbroadcastss " #a place ", %%ymm15\n"
#define KD_ADD(vector, sum) "vfmadd231ps %%ymm" #vector ", %%ymm15, %" #sum "\n"
#define KD_TWO(a, place, s, t) KD_FACTOR(a, place) KD_ADD(12, s) KD_ADD(13, t)
#define KD_THREE(a, place, s, t, u) KD_TWO(a, place, s, t) KD_ADD(14, u)

#define KD_3X3(a, b)                                                              \
  KD_VECTOR(b, "(%[right])", 12) KD_VECTOR(b, "(%[right],%[panel])", 13)          \
  KD_VECTOR(b, "(%[right],%[panel],2)", 14) KD_THREE(a, "(%[row0])", 0, 1, 2)     \
  KD_THREE(a, "(%[row0],%[row])", 3, 4, 5) KD_THREE(a, "(%[row0],%[row],2)", 6, 7, 8)
#define KD_4X3(a, b) KD_3X3(a, b) KD_THREE(a, "(%[row3])", 9, 10, 11)
#define KD_6X2(a, b)                                                              \
  KD_VECTOR(b, "(%[right])", 12) KD_VECTOR(b, "(%[right],%[panel])", 13)          \
  KD_TWO(a, "(%[row0])", 0, 1) KD_TWO(a, "(%[row0],%[row])", 2, 3)                \
  KD_TWO(a, "(%[row0],%[row],2)", 4, 5) KD_TWO(a, "(%[row3])", 6, 7)              \
  KD_TWO(a, "(%[row3],%[row])", 8, 9) KD_TWO(a, "(%[row3],%[row],2)", 10, 11)

#define KD_ZERO(sum) "vxorps %x" #sum ", %x" #sum ", %x" #sum "\n"
#define KD_LOOP(step)                                                                          \
  asm volatile(                                                                                \
      KD_ZERO(0) KD_ZERO(1) KD_ZERO(2) KD_ZERO(3) KD_ZERO(4) KD_ZERO(5) KD_ZERO(6) KD_ZERO(7)  \
      KD_ZERO(8) KD_ZERO(9) KD_ZERO(10) KD_ZERO(11)                                            \
      "2:\n mov %[fours], %[left]\n .p2align 5\n"                                              \
      "1:\n prefetcht1 (%[ahead])\n prefetcht1 (%[ahead],%[further])\n"                        \
      "lea (%[ahead],%[further],2), %[ahead]\n"                                                \
      step(0, 0) step(4, 32) step(8, 64) step(12, 96)                                          \
      "add $16, %[row0]\n add $16, %[row3]\n sub $-128, %[right]\n dec %[left]\n jne 1b\n"     \
      "add %[jump], %[row0]\n add %[jump], %[row3]\n dec %[runs]\n jne 2b\n"                   \
      : "=&x"(s0), "=&x"(s1), "=&x"(s2), "=&x"(s3), "=&x"(s4), "=&x"(s5), "=&x"(s6),           \
        "=&x"(s7), "=&x"(s8), "=&x"(s9), "=&x"(s10), "=&x"(s11), [row0] "+&r"(row0),           \
        [row3] "+&r"(row3), [right] "+&r"(right), [ahead] "+&r"(ahead), [runs] "+&r"(runs),    \
        [left] "=&r"(left)                                                                     \
      : [fours] "r"(walk.fours), [row] "r"(walk.row), [panel] "r"(walk.panel),                 \
        [further] "r"(walk.ahead_step), [jump] "r"(walk.jump)                                  \
      : "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory")

template <int rows, int width>
__attribute__((always_inline)) static inline void multiply_by_hand(const Walk& walk,
                                                                   vec (&sums)[rows][width]) {
  if constexpr (kByHand<rows, width>) {
    // Single variables, since an array would lie in memory.
    vec s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11;
    const char *row0 = reinterpret_cast<const char*>(walk.left), *row3 = row0 + 3 * walk.row;
    const float *right = walk.right, *ahead = walk.ahead;
    int64_t runs = walk.runs, left;
    if constexpr (width == 2)
      KD_LOOP(KD_6X2);
    else if constexpr (rows == 4)
      KD_LOOP(KD_4X3);
    else
      KD_LOOP(KD_3X3);
    const vec made[12] = {s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11};
#pragma GCC unroll 12
    for (int i = 0; i < rows * width; i++) sums[i / width][i % width] = made[i];
  }
}

#undef KD_VECTOR
#undef KD_FACTOR
#undef KD_ADD
#undef KD_TWO
#undef KD_THREE
#undef KD_3X3
#undef KD_4X3
#undef KD_6X2
#undef KD_ZERO
#undef KD_LOOP

#endif

}  // namespace kd
