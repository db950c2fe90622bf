// Linear layers in half precision.
#pragma once

#include "half_product.h"
#include "linear_group.h"

#if defined(__AVX512BF16__)

namespace kd {

template <class Number>
struct InHalves {
  using Element = Number;

  static int64_t depth(int64_t k) { return halves::pairs_of(k); }

  // Tiles multiply many times as fast, and reading operands weighs as much more beside it.
  static Reading reading() { return halves::in_tiles<Number>() ? Reading{100, 200} : InFloats::reading(); }
  static double work(int64_t m, int64_t n, int64_t depth) {
    if (!halves::in_tiles<Number>()) return InFloats::work(m, n, depth);
    return 0.1 * (static_cast<double>(m) + reading().columns) * static_cast<double>(n * depth);
  }

  static void multiply(const Grid& grid, int64_t item, int64_t m, int64_t n, int64_t k,
                       const Number* x, const float* weight, Number* out, int64_t ld,
                       const EpilogueOf<Number>& e) {
    const halves::Product<halves::PairRows<Number>, Number> product{m,      n,   k,  {x, k, k},
                                                                    weight, out, ld, e};
    halves::multiply(product, grid, item);
  }
};

}  // namespace kd

#endif
