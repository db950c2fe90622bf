// Softmax of rows, and its logarithm.
#pragma once

#include <cmath>

#include "lanes.h"
#include "parallel.h"
#include "partial.h"
#include "vec_math.h"

namespace kd {

// Rows up to this size are taken kLanes at a time, so that their maxima and sums are found by one
// transposition instead of one chain of shuffles each. So many of them stay in the second cache.
constexpr int64_t kShortRow = 1024;
constexpr int kSums = 4;  // chains of additions in a row: more than that wait for nothing

// f(place, lanes) for each vector of a row.
template <class Body>
static inline void over_row(int64_t size, const Body& body) {
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) body(at, kLanes);
  if (at < size) body(at, static_cast<int>(size - at));
}

static inline vec first_or(vec v, int lanes, vec other) {
  ivec lane;
  for (int i = 0; i < kLanes; i++) lane[i] = i;
  return lane < lanes ? v : other;
}

static inline vec load_or(const float* p, int lanes, vec other) {
  return lanes == kLanes ? load(p) : first_or(load_first(p, lanes), lanes, other);
}

static inline void store_lanes(float* p, vec v, int lanes) {
  if (lanes == kLanes)
    store(p, v);
  else
    store_first(p, v, lanes);
}

static inline vec maxima_of_row(const float* x, int64_t size) {
  vec greatest = splat(-INFINITY);
  over_row(size, [&](int64_t at, int lanes) {
    greatest = greater_or_second(greatest, load_or(x + at, lanes, splat(-INFINITY)));
  });
  return greatest;
}

// Writes what it adds up if `out` is given.
static inline vec exponentials_of_row(const float* x, float* out, int64_t size, vec greatest) {
  vec sums[kSums] = {};
  int64_t at = 0;
  for (; at + kSums * kLanes <= size; at += kSums * kLanes)
#pragma GCC unroll 4
    for (int i = 0; i < kSums; i++) {
      const vec e = exp(load(x + at + i * kLanes) - greatest);
      if (out) store(out + at + i * kLanes, e);
      sums[i] += e;
    }
  over_row(size - at, [&](int64_t more, int lanes) {
    // Not with minus infinity in the lanes beyond: Intel's CPUs take a hundred times as long to
    // make a number that is almost zero.
    const vec e = exp(load_or(x + at + more, lanes, greatest) - greatest);
    if (out) store_lanes(out + at + more, e, lanes);
    sums[0] += first_or(e, lanes, vec{});
  });
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// kRowsTaken rows behind each other.
template <int kRowsTaken>
static inline void softmax_rows(const float* x, float* out, int64_t size, bool logarithm) {
  vec each[kLanes] = {};
  float greatest[kLanes], sum[kLanes];
  for (int r = 0; r < kRowsTaken; r++) each[r] = maxima_of_row(x + r * size, size);
  store(greatest, reduce_lanes(each, greater_or_second));
  for (int r = 0; r < kRowsTaken; r++)
    each[r] = exponentials_of_row(x + r * size, logarithm ? nullptr : out + r * size, size,
                                  splat(greatest[r]));
  store(sum, reduce_lanes(each, [](vec a, vec b) { return a + b; }));
  for (int r = 0; r < kRowsTaken; r++) {
    const float *const from = x + r * size, log = logarithm ? std::log(sum[r]) : 0;
    float* const to = out + r * size;
    const vec times = splat(1 / sum[r]);
    over_row(size, [&](int64_t at, int lanes) {
      const vec v = logarithm ? load_or(from + at, lanes, vec{}) - splat(greatest[r]) - splat(log)
                              : load_or(to + at, lanes, vec{}) * times;
      store_lanes(to + at, v, lanes);
    });
  }
}

static inline void softmax(const float* x, float* out, int64_t rows, int64_t size, bool logarithm,
                           int team) {
  const int64_t taken = size <= kShortRow ? kLanes : 1;
  const int64_t parts = ceil_div(rows, taken);
  in_parallel(team, [&](int thread, int threads) {
    const Range mine = part_of(parts, thread, threads);
    for (int64_t part = mine.begin; part < mine.end; part++) {
      const int64_t row = part * taken;
      if (taken > 1 && row + taken <= rows) {
        softmax_rows<kLanes>(x + row * size, out + row * size, size, logarithm);
        continue;
      }
      for (int64_t r = row; r < std::min(row + taken, rows); r++)
        softmax_rows<1>(x + r * size, out + r * size, size, logarithm);
    }
  });
}

}  // namespace kd
