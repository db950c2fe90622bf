// Linear layers in bfloat16: by tiles where the CPU has them, else by its products of pairs.
#pragma once

#include "amx_gemm.h"
#include "bf16_gemm.h"
#include "linear_group.h"

#if defined(__AVX512BF16__)

namespace kd {

struct InBFloat16 {
  using Element = BFloat16;

  static bool in_tiles() {
#if defined(KD_AMX)
    return amx::allowed();
#else
    return false;
#endif
  }

  static int64_t depth(int64_t k) { return bf16::pairs_of(k); }

  // Tiles multiply many times as fast, and reading operands weighs as much more beside it.
  static Reading reading() { return in_tiles() ? Reading{100, 200} : InFloats::reading(); }
  static double work(int64_t m, int64_t n, int64_t depth) {
    if (!in_tiles()) return InFloats::work(m, n, depth);
    return 0.1 * (static_cast<double>(m) + reading().columns) * static_cast<double>(n * depth);
  }

  static void multiply(const Grid& grid, int64_t item, int64_t m, int64_t n, int64_t k,
                       const BFloat16* x, const float* weight, BFloat16* out, int64_t ld,
                       const bf16::PairEpilogue& e) {
    const bf16::Product product{m, n, k, {x, k}, weight, out, ld, e};
#if defined(KD_AMX)
    if (amx::allowed()) return amx::multiply_item(product, grid, item);
#endif
    bf16::multiply_item(product, grid, item);
  }
};

}  // namespace kd

#endif
