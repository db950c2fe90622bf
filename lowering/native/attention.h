// Scaled dot product attention without a matrix of scores, as torch's operator defines it.
#pragma once

#include "attention_items.h"
#include "attention_shape.h"
#include "elements.h"

namespace kd {

// Elements are float, BFloat16 or Half. Masks are floats; so is all arithmetic.
template <class Element>
static inline void attention(const AttentionShape& shape, const Element* q, const Element* k,
                             const Element* v, Element* o, int threads) {
  if (shape.batch <= 0 || shape.kv_heads <= 0 || shape.heads <= 0 || shape.lq <= 0) return;
  const int64_t parts = attending::parts_of_keys(shape);
  if (parts > 1)
    attending::attend_by_keys(shape, q, k, v, o, parts, threads);
  else
    attending::attend_by_rows(shape, q, k, v, o, threads);
}

}  // namespace kd
