// Products of halves: by tiles where the CPU has them, else, of bfloat16, by its products of pairs.
#pragma once

#include <type_traits>

#include "amx_lines.h"
#include "bf16_gemm.h"
#include "elements.h"

#if defined(__AVX512BF16__)

namespace kd::halves {

template <class Number>
bool in_tiles() {
#if defined(KD_AMX)
  return amx::multiplies<Number>();
#else
  return false;
#endif
}

// Can they be multiplied as they are?
template <class Number>
bool multiplied() {
  return std::is_same_v<Number, BFloat16> || in_tiles<Number>();
}

template <class Rows, class Element>
void multiply(const Product<Rows, Element>& product, const Grid& grid, int64_t item) {
  using Number = typename Rows::Number;
#if defined(KD_AMX)
  if (amx::multiplies<Number>()) return amx::multiply_item(product, grid, item);
  if constexpr (!std::is_same_v<Rows, amx::ImageLines<Number>>)  // which are for tiles only
#endif
    if constexpr (std::is_same_v<Number, BFloat16>) halves::multiply_item(product, grid, item);
}

}  // namespace kd::halves

#else

namespace kd::halves {

template <class Number>
bool multiplied() {
  return false;
}

}  // namespace kd::halves

#endif
