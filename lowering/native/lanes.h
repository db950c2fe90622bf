// Reductions of kLanes vectors at once, each to one lane.
#pragma once

#include <utility>

#include "vec.h"

namespace kd {

#if defined(__clang__) || __GNUC__ >= 12
template <int... lane>
static inline vec interleaved_low(vec a, vec b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane / 2 + (lane % 2) * kLanes)...);
}

template <int... lane>
static inline vec interleaved_high(vec a, vec b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (kLanes / 2 + lane / 2 + (lane % 2) * kLanes)...);
}
#else
template <int... lane>
static inline vec interleaved_low(vec a, vec b, std::integer_sequence<int, lane...>) {
  return __builtin_shuffle(a, b, ivec{(lane / 2 + (lane % 2) * kLanes)...});
}

template <int... lane>
static inline vec interleaved_high(vec a, vec b, std::integer_sequence<int, lane...>) {
  return __builtin_shuffle(a, b, ivec{(kLanes / 2 + lane / 2 + (lane % 2) * kLanes)...});
}
#endif

// a0 b0 a1 b1 ... of the lower and of the upper halves.
static inline vec interleave_low(vec a, vec b) {
  return interleaved_low(a, b, std::make_integer_sequence<int, kLanes>());
}
static inline vec interleave_high(vec a, vec b) {
  return interleaved_high(a, b, std::make_integer_sequence<int, kLanes>());
}

// A vector whose lane i is all lanes of v[i] combined, in an order that is the same for each i.
template <int count = kLanes, class Combine>
__attribute__((always_inline)) static inline vec reduce_lanes(vec (&v)[kLanes],
                                                              const Combine& combine) {
  if constexpr (count == 1) {
    return v[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < count / 2; i++)
      v[i] = combine(interleave_low(v[i], v[i + count / 2]),
                     interleave_high(v[i], v[i + count / 2]));
    return reduce_lanes<count / 2>(v, combine);
  }
}

}  // namespace kd
