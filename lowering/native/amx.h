// The tiles of Intel's AMX: eight registers of up to 16 rows of 64 bytes, and the instructions that
// add the product of two of them, of bfloat16 or float16 numbers or of bytes, to a third.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__) && defined(__x86_64__)
#define KD_AMX 1

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "elements.h"

namespace kd::amx {

constexpr int kTileRows = 16;
constexpr int64_t kTilePairs = 16;  // of neighbours along k (fours, of bytes), in a row of either operand

// A process has to ask Linux for these registers, which may refuse: they enlarge what it saves of a
// thread. Threads that are started later have the permission as well.
static inline bool allowed() {
  static const bool granted = [] {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, its number in XCR0
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return granted;
}

// CPUs multiply float16 in tiles a generation later than bfloat16 (Granite Rapids); older compilers, and
// Linux's list of what a CPU has, do not know it.
static inline bool has_float16() {
  static const bool there = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 21 & 1) != 0;
  }();
  return there;
}

// All CPUs with tiles have those of bytes, but a virtual machine may show some features only.
static inline bool has_bytes() {
  static const bool there = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> 25 & 1) != 0;
  }();
  return there;
}

template <class Number>
constexpr bool kOfBytes = std::is_same_v<Number, Int8> || std::is_same_v<Number, Uint8>;

template <class Number>
bool multiplies() {
  if (kOfBytes<Number>) return allowed() && has_bytes();
  return allowed() && (std::is_same_v<Number, BFloat16> || has_float16());
}

// Registers `to` += `left` * `right`. Assemblers that know TDPBF16PS need not know TDPFP16PS, which
// differs from it in one bit, nor TDPBSSD and TDPBUSD, of bytes, the left ones with a sign or without: so
// all are spelled out. They name no registers, as GCC's own do not; Clang 19 leaves the loads before them
// where they are, too (the tests of halves pass; those of bytes were not run with it).
template <class Number, int to, int left, int right>
__attribute__((always_inline)) static inline void add_product() {
  constexpr int prefix = std::is_same_v<Number, BFloat16> ? 2 : std::is_same_v<Number, Uint8> ? 1 : 3;
  constexpr int operation = kOfBytes<Number> ? 0x5e : 0x5c;
  asm volatile(".byte 0xc4, 0xe2, %c0, %c1, %c2" ::"i"((~right & 15) << 3 | prefix), "i"(operation),
               "i"(0xc0 | to << 3 | left));
}

// Two blocks of rows against two panels of columns:
//   sums   0 1    left  4    right  6 7
//          2 3          5
// The shapes of the registers stay with the thread until it is done. Nothing may be left to whoever
// uses them next, oneDNN or torch: they load their own before they begin, as is done here.
class Registers {
 public:
  Registers() = default;
  ~Registers() {
    if (upper_ > 0) _tile_release();
  }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

  // So many rows in the upper and in the lower block; loading shapes clears all registers.
  void shape(int upper, int lower) {
    if (upper == upper_ && lower == lower_) return;
    upper_ = upper, lower_ = lower;
    Shapes shapes{};
    shapes.palette = 1;
    for (const int tile : {0, 1, 4}) shapes.set(tile, upper);
    for (const int tile : {2, 3, 5}) shapes.set(tile, lower > 0 ? lower : upper);
    for (const int tile : {6, 7}) shapes.set(tile, kTilePairs);
    _tile_loadconfig(&shapes);
  }

 private:
  struct alignas(64) Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];

    void set(int tile, int64_t count) {
      bytes[tile] = 64;
      rows[tile] = static_cast<uint8_t>(count);
    }
  };

  int upper_ = 0, lower_ = 0;
};

// The compiler does not know that tiles read memory.
static inline void memory_is_written() { asm volatile("" ::: "memory"); }

}  // namespace kd::amx

#endif
