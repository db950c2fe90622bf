// Products of bfloat16 numbers: by tiles where the CPU has them, else by its products of pairs.
#pragma once

#include <type_traits>

#include "amx_lines.h"
#include "bf16_gemm.h"

#if defined(__AVX512BF16__)

namespace kd::bf16 {

static inline bool in_tiles() {
#if defined(KD_AMX)
  return amx::allowed();
#else
  return false;
#endif
}

template <class Rows, class Element>
void multiply(const Product<Rows, Element>& product, const Grid& grid, int64_t item) {
#if defined(KD_AMX)
  if (amx::allowed()) return amx::multiply_item(product, grid, item);
  if constexpr (!std::is_same_v<Rows, amx::ImageLines>)  // which are for tiles only
#endif
    bf16::multiply_item(product, grid, item);
}

}  // namespace kd::bf16

#endif
