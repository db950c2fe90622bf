// The operands of a product with a weight that was packed ahead.
#pragma once

#include <cstring>

#include "blocked.h"
#include "pack.h"

namespace kd {

// Rows of `a` as they are, or copied where they would push each other out of the cache.
struct MatrixRows {
  static constexpr double kMaking = 6;
  const float* a;
  int64_t lda;

  Block block(int64_t row, int64_t rows, int64_t k, int64_t depth, float* buffer) const {
    const float* from = a + row * lda + k;
    if (!crowded(lda) || rows == 1) return {from, lda, 1};
    const int64_t ld = spread_out(depth);
    for (int64_t i = 0; i < rows; i++) copy_row(buffer + i * ld, from + i * lda, depth);
    return {buffer, ld, 1};
  }
};

// A row of so many bytes as whole floats, with zeros behind it.
static inline void copy_filled_up(float* to, int64_t floats, const void* from, int64_t bytes) {
  auto* const start = reinterpret_cast<char*>(to);
  std::memcpy(start, from, static_cast<size_t>(bytes));
  std::memset(start + bytes, 0, static_cast<size_t>(4 * floats - bytes));
}

struct PackedColumns {
  static constexpr double kMaking = 4;  // to be read from memory
  const float* packed;
  int64_t k;

  bool at_hand() const { return true; }
  Block block(int64_t panel, int64_t, int64_t from, int64_t) const {
    return {packed + panel * kLanes * k + from * kLanes, k * kLanes, kLanes};
  }
};

}  // namespace kd
