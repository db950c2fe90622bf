// Linear layers in bfloat16.
#pragma once

#include "bf16_product.h"
#include "linear_group.h"

#if defined(__AVX512BF16__)

namespace kd {

struct InBFloat16 {
  using Element = BFloat16;

  static int64_t depth(int64_t k) { return bf16::pairs_of(k); }

  // Tiles multiply many times as fast, and reading operands weighs as much more beside it.
  static Reading reading() { return bf16::in_tiles() ? Reading{100, 200} : InFloats::reading(); }
  static double work(int64_t m, int64_t n, int64_t depth) {
    if (!bf16::in_tiles()) return InFloats::work(m, n, depth);
    return 0.1 * (static_cast<double>(m) + reading().columns) * static_cast<double>(n * depth);
  }

  static void multiply(const Grid& grid, int64_t item, int64_t m, int64_t n, int64_t k,
                       const BFloat16* x, const float* weight, BFloat16* out, int64_t ld,
                       const EpilogueOf<BFloat16>& e) {
    const bf16::Product<bf16::PairRows, BFloat16> product{m, n, k, {x, k, k}, weight, out, ld, e};
    bf16::multiply(product, grid, item);
  }
};

}  // namespace kd

#endif
