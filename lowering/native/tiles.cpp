// The tiles of every size, compiled once for all kinds of products.

#include <utility>

#include "microkernel.h"

namespace kd {
namespace {

// How a vector of the output, or of what lies beside it, is read and written.
struct WholeVectors {
  __attribute__((always_inline)) vec get(const float* p) const { return load(p); }
  __attribute__((always_inline)) void put(float* p, vec v) const { store(p, v); }
};
struct CutVectors {
  int lanes;
  __attribute__((always_inline)) vec get(const float* p) const { return load_first(p, lanes); }
  __attribute__((always_inline)) void put(float* p, vec v) const { store_first(p, v, lanes); }
};

// Some columns of the sums: the epilogue, if it is due, and to memory.
template <int first, int count, class Memory, int rows, int width, bool half>
__attribute__((always_inline)) static inline void finish_columns(
    Sums<rows, width, Floats, half>& sums, float* c, int64_t ldc, const Epilogue& e,
    const Finish& finish, const Memory& memory) {
  const auto each = [&](const auto& change) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
      for (int j = first; j < first + count; j++)
        sums.at[i][j] = change(sums.at[i][j], i, j * kLanes);
  };
  if (finish.accumulate)
    each([&](vec v, int i, int j) { return v + memory.get(c + i * ldc + j); });
  if (finish.last) {
    if (e.bias) each([&](vec v, int, int j) { return v + memory.get(e.bias + j); });
    if (e.before)
      each([&](vec v, int i, int j) { return v + memory.get(e.before + i * e.ld_before + j); });
    const vec low = splat(finish.low), high = splat(finish.high);
    each([&](vec v, int, int) { return clamp(v, low, high); });
    if (e.times)
      each([&](vec v, int i, int j) { return v * memory.get(e.times + i * e.ld_times + j); });
    if (e.after)
      each([&](vec v, int i, int j) { return v + memory.get(e.after + i * e.ld_after + j); });
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = first; j < first + count; j++) memory.put(c + i * ldc + j * kLanes, sums.at[i][j]);
}

// The activation of the epilogue, if it is due, is no more than the limits in `finish`.
template <int rows, int width, bool half>
void multiply_tile(int64_t depth, const Block& left, const Block& right, float* c, int64_t ldc,
                   const Epilogue& e, const Finish& finish) {
  Sums<rows, width, Floats, half> sums(depth, left, right, finish.ahead);
  if (finish.last_lanes == kLanes) {
    finish_columns<0, width>(sums, c, ldc, e, finish, WholeVectors{});
  } else {
    finish_columns<0, width - 1>(sums, c, ldc, e, finish, WholeVectors{});
    finish_columns<width - 1, 1>(sums, c, ldc, e, finish, CutVectors{finish.last_lanes});
  }
}

template <int width, bool half, int... rows_less_one>
static inline Tile tile_of_width(int rows, std::integer_sequence<int, rows_less_one...>) {
  static constexpr Tile tiles[] = {multiply_tile<rows_less_one + 1, width, half>...};
  return tiles[rows - 1];
}

template <int width>
static inline Tile tile_of_width(int rows, bool half) {
  constexpr auto heights = std::make_integer_sequence<int, kTileRows[width]>();
  if constexpr (kHalfLanes > 0)
    if (half) return tile_of_width<width, true>(rows, heights);
  return tile_of_width<width, false>(rows, heights);
}

// The same for each vector of sums that were stored. `accumulate`, `last`: as in Finish.
struct Stored {
  const float* sums;
  int64_t ld;
  int rows, columns;
  float* c;
  int64_t ldc;
  const Epilogue& e;

  template <Act act, bool accumulate, bool last>
  void finish() const {
    for (int i = 0; i < rows; i++) {
      int j = 0;
      for (; j + kLanes <= columns; j += kLanes) finish<act, accumulate, last>(i, j, WholeVectors{});
      if (j < columns) finish<act, accumulate, last>(i, j, CutVectors{columns - j});
    }
  }

 private:
  template <Act act, bool accumulate, bool last, class Memory>
  __attribute__((always_inline)) void finish(int i, int j, const Memory& memory) const {
    vec v = memory.get(sums + i * ld + j);
    float* to = c + i * ldc + j;
    if (accumulate) v += memory.get(to);
    if (last) {
      if (e.bias) v += memory.get(e.bias + j);
      if (e.before) v += memory.get(e.before + i * e.ld_before + j);
      v = activate(act, v, e.a, e.b);
      if (e.times) v *= memory.get(e.times + i * e.ld_times + j);
      if (e.after) v += memory.get(e.after + i * e.ld_after + j);
    }
    memory.put(to, v);
  }
};

}  // namespace

void finish_stored(const float* sums, int64_t ld, int rows, int columns, float* c, int64_t ldc,
                   const Epilogue& e, const Finish& finish) {
  const Stored stored{sums, ld, rows, columns, c, ldc, e};
  if (!finish.last)
    return finish.accumulate ? stored.finish<Act::none, true, false>()
                             : stored.finish<Act::none, false, false>();
  with_activation(e.act, [&](auto act) {
    finish.accumulate ? stored.finish<act(), true, true>() : stored.finish<act(), false, true>();
  });
}

Tile tile_of(int rows, int width, bool half) {
  switch (width) {
    case 1:
      return tile_of_width<1>(rows, half);
    case 2:
      return tile_of_width<2>(rows, half);
#if defined(__AVX2__) || defined(__aarch64__)
    case 3:
      return tile_of_width<3>(rows, half);
#endif
    default:
      return tile_of_width<kTileWidth>(rows, half);
  }
}

}  // namespace kd
