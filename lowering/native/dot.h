// Products of a few rows with columns that are each in one piece in memory, as a weight of a linear
// layer or the keys of an attention are: sums of vectors, which are added up at the end.
#pragma once

#include "blocked.h"

namespace kd {

constexpr int kMostDotRows = 4;

// Lane r * (kLanes / rows) + j is row r of `a` times column j of `b`. The last column stands in for
// those that are missing.
template <int rows>
static inline vec dot_group(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                            int columns) {
  constexpr int group = kLanes / rows;
  vec sums[kLanes] = {};
  const float* column[group];
#pragma GCC unroll 16
  for (int j = 0; j < group; j++) column[j] = b + std::min(j, columns - 1) * ldb;
  const auto add = [&](const auto& get, int64_t p) __attribute__((always_inline)) {
    vec factors[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) factors[r] = get(a + r * lda + p);
#pragma GCC unroll 16
    for (int j = 0; j < group; j++) {
      const vec values = get(column[j] + p);
#pragma GCC unroll 16
      for (int r = 0; r < rows; r++)
        sums[r * group + j] = multiply_add(factors[r], values, sums[r * group + j]);
    }
  };
  int64_t p = 0;
  for (; p + kLanes <= k; p += kLanes) add([](const float* from) { return load(from); }, p);
  const int rest = static_cast<int>(k - p);
  if (rest > 0) add([rest](const float* from) { return load_first(from, rest); }, p);
  transpose(sums);
#pragma GCC unroll 4
  for (int width = kLanes / 2; width > 0; width /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < width; i++) sums[i] += sums[i + width];
  return sums[0];
}

// `rows` rows of one panel's sums.
template <int rows>
static inline void dot_panel(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                             int columns, float* sums) {
  constexpr int group = kLanes / rows;
  for (int j = 0; j < columns; j += group) {
    alignas(64) float lanes[kLanes];
    store(lanes, dot_group<rows>(k, a, lda, b + j * ldb, ldb, columns - j));
    for (int r = 0; r < rows; r++)
      std::copy(lanes + r * group, lanes + (r + 1) * group, sums + r * kLanes + j);
  }
}

// The given panels of a product of no more than kMostDotRows rows.
static inline void dot_panels(Range panels, int64_t m, int64_t n, int64_t k, const float* a,
                              int64_t lda, const float* b, int64_t ldb, float alpha, float* c,
                              int64_t ldc, const Epilogue& e) {
  for (int64_t panel = panels.begin; panel < panels.end; panel++) {
    alignas(64) float sums[kMostDotRows * kLanes] = {};
    const float* right = b + panel * kLanes * ldb;
    const int columns = columns_of_panel(n, panel);
    int64_t row = 0;
    if (m == 4) dot_panel<4>(k, a, lda, right, ldb, columns, sums), row = 4;
    if (m == 2 || m == 3) dot_panel<2>(k, a, lda, right, ldb, columns, sums), row = 2;
    if (row < m)
      dot_panel<1>(k, a + row * lda, lda, right, ldb, columns, sums + row * kLanes);
    for (int64_t i = 0; i < m; i++)
      store(sums + i * kLanes, load(sums + i * kLanes) * splat(alpha));
    finish_stored(sums, kLanes, static_cast<int>(m), columns, c + panel * kLanes, ldc,
                e.at(0, panel * kLanes), Finish{false, true, 0, 0});
  }
}

}  // namespace kd
