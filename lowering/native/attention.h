// Scaled dot product attention without a matrix of scores, as torch's operator defines it.
#pragma once

#include "attention_items.h"
#include "attention_shape.h"
#include "elements.h"

namespace kd {

template <class Element>
static inline void attention_of(const AttentionShape& shape, const Element* q, const Element* k,
                                const Element* v, Element* o, int threads) {
  if (shape.batch <= 0 || shape.kv_heads <= 0 || shape.heads <= 0 || shape.lq <= 0) return;
  const int64_t parts = attending::parts_of_keys(shape);
  if (parts > 1)
    attending::attend_by_keys(shape, q, k, v, o, parts, threads);
  else
    attending::attend_by_rows(shape, q, k, v, o, threads);
}

static inline void attention(const AttentionShape& shape, const float* q, const float* k,
                             const float* v, float* o, int threads) {
  attention_of(shape, q, k, v, o, threads);
}

// The bits of bfloat16 and of half precision numbers. Masks are floats; so is all arithmetic.
static inline void attention_bf16(const AttentionShape& shape, const uint16_t* q, const uint16_t* k,
                                  const uint16_t* v, uint16_t* o, int threads) {
  attention_of(shape, reinterpret_cast<const BFloat16*>(q), reinterpret_cast<const BFloat16*>(k),
               reinterpret_cast<const BFloat16*>(v), reinterpret_cast<BFloat16*>(o), threads);
}

static inline void attention_fp16(const AttentionShape& shape, const uint16_t* q, const uint16_t* k,
                                  const uint16_t* v, uint16_t* o, int threads) {
  attention_of(shape, reinterpret_cast<const Half*>(q), reinterpret_cast<const Half*>(k),
               reinterpret_cast<const Half*>(v), reinterpret_cast<Half*>(o), threads);
}

}  // namespace kd
