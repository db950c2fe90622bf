// Sums of products of bytes that were stored, and what is left to do with them: they become bytes again, or
// floats.
#pragma once

#include <algorithm>
#include <limits>

#include "epilogue.h"
#include "parallel.h"

namespace kd {

// As many bytes as a vector has lanes.
template <class Byte>
struct Bytes;
template <>
struct Bytes<uint8_t> {
  typedef uint8_t vector __attribute__((vector_size(kLanes), aligned(1), may_alias));
};
template <>
struct Bytes<int8_t> {
  typedef int8_t vector __attribute__((vector_size(kLanes), aligned(1), may_alias));
};

// The numbers that bytes stand for: (byte - zero) * step.
struct ByteGrid {
  float step = 1;
  int32_t zero = 0;
};

template <class Byte>
static inline vec bytes_as_floats(const Byte* p, int count) {
  typename Bytes<Byte>::vector v{};
  if (count == kLanes)
    v = *reinterpret_cast<const typename Bytes<Byte>::vector*>(p);
  else
    std::memcpy(&v, p, static_cast<size_t>(count));
  return __builtin_convertvector(__builtin_convertvector(v, ivec), vec);
}

// Of integers within the bytes' range.
template <class Byte>
static inline void put_bytes(Byte* to, ivec v, int count) {
  const auto narrow = __builtin_convertvector(v, typename Bytes<Byte>::vector);
  if (count == kLanes)
    *reinterpret_cast<typename Bytes<Byte>::vector*>(to) = narrow;
  else
    std::memcpy(to, &narrow, static_cast<size_t>(count));
}

// The nearest integer, the even one of two: of numbers that are small beside 2^22.
static inline ivec to_nearest(vec v) {
  constexpr float kWhole = 0x1.8p23f;  // numbers of this size have no fraction
  return (ivec)(v + splat(kWhole)) - (ivec)splat(kWhole);
}

// What columns need, worked out once for a call:
//   act((sum - excess) * factor + shift + other * of_other)
// Where the activation is no more than limits, all of it is in steps of the result.
struct ColumnNumbers {
  const float *factor, *shift;
  const int32_t* excess;

  ColumnNumbers from(int64_t column) const {
    return {factor + column, shift + column, excess + column};
  }
};

template <class Out>
struct Requantized {
  static constexpr bool kToBytes = !std::is_same_v<Out, float>;
  struct Activation {
    Act act = Act::none;
    float a = 0, b = 0;

    Limits limits() const {
      Epilogue epilogue;
      epilogue.act = act, epilogue.a = a, epilogue.b = b;
      return Limits(epilogue);
    }
  };

  const float* sums = nullptr;  // integers
  int64_t ld = 0, rows = 0, columns = 0;
  Out* c = nullptr;
  int64_t ldc = 0;
  Activation e;
  ColumnNumbers own{};
  const Out* other = nullptr;
  float of_other = 1;    // a factor
  ByteGrid of_result{};

  using Finish = void (*)(const Requantized& of, Range rows);
  static Finish finisher(Act act);

  // What numbers are multiplied by ahead, with what is added to them.
  float to_units() const { return kToBytes && e.limits().enough ? 1.0f / of_result.step : 1.0f; }

  // The part of it from there on.
  Requantized at(const float* sums_, int64_t ld_, int64_t row, int64_t rows_, int64_t column,
                 int64_t columns_) const {
    Requantized part = *this;
    part.sums = sums_, part.ld = ld_, part.rows = rows_, part.columns = columns_;
    part.c += row * ldc + column;
    if (other) part.other += row * ldc + column;
    part.own = own.from(column);
    return part;
  }
};

// Numbers of columns, in whole panels; `one`: the step of all, where they have none of their own.
struct Columns {
  int64_t n, padded;
  float one;
  const float *step, *bias;
  const int32_t* sums;

  // In `memory`, which holds three numbers for each. `zero`: of the input, in the form that was multiplied.
  // `unit`: what the result is counted in; `constant`: what is added to all.
  ColumnNumbers numbers(float* memory, float input_step, int32_t zero, float unit, float constant) const {
    float *const factor = memory, *const shift = memory + padded;
    auto* const excess = reinterpret_cast<int32_t*>(memory + 2 * padded);
    for (int64_t j = 0; j < n; j++) {
      factor[j] = (step ? step[j] : one) * input_step * unit;
      shift[j] = ((bias ? bias[j] : 0.0f) + constant) * unit;
      excess[j] = sums[j] * zero;
    }
    for (int64_t j = n; j < padded; j++) factor[j] = shift[j] = 0, excess[j] = 0;
    return {factor, shift, excess};
  }
};

template <bool limits_only, class Out>
static void requantize(const Requantized<Out>& of, Range rows) {
  constexpr bool to_bytes = Requantized<Out>::kToBytes;
  using Number = std::conditional_t<to_bytes, Out, int8_t>;
  const float zero = static_cast<float>(of.of_result.zero), unit = 1.0f / of.of_result.step;
  const vec inverse = splat(unit), of_other = splat(of.of_other);
  float low = std::numeric_limits<Number>::min() - zero, high = std::numeric_limits<Number>::max() - zero;
  if constexpr (limits_only) {
    const Limits limits = of.e.limits();
    const float least_of_grid = low, most_of_grid = high;
    low = to_bytes ? std::clamp(limits.low * unit, least_of_grid, most_of_grid) : limits.low;
    high = to_bytes ? std::clamp(limits.high * unit, least_of_grid, most_of_grid) : limits.high;
  }
  const vec least = splat(low), most = splat(high);
  const auto some = [&](int64_t i, int64_t j, auto count) __attribute__((always_inline)) {
    const ivec excess = (ivec)load(reinterpret_cast<const float*>(of.own.excess) + j);
    const ivec whole = (ivec)load(of.sums + i * of.ld + j) - excess;
    vec v = fma(__builtin_convertvector(whole, vec), load(of.own.factor + j), load(of.own.shift + j));
    if (of.other) {
      const Out* const other = of.other + i * of.ldc + j;
      if constexpr (to_bytes)
        v = fma(bytes_as_floats(other, count), of_other, v);
      else
        v += count == kLanes ? load(other) : load_first(other, count);
    }
    if constexpr (!limits_only) v = activate(of.e.act, v, of.e.a, of.e.b);
    if constexpr (to_bytes && !limits_only) v *= inverse;
    if constexpr (to_bytes || limits_only) v = clamp(v, least, most);
    Out* const to = of.c + i * of.ldc + j;
    if constexpr (to_bytes)
      put_bytes(to, to_nearest(v) + of.of_result.zero, count);
    else
      store_first(to, v, count);
  };
  const int64_t whole = of.columns / kLanes * kLanes;
  const int left = static_cast<int>(of.columns - whole);
  for (int64_t i = rows.begin; i < rows.end; i++) {
    for (int64_t j = 0; j < whole; j += kLanes) some(i, j, std::integral_constant<int, kLanes>{});
    if (left > 0) some(i, whole, left);
  }
}

template <class Out>
typename Requantized<Out>::Finish Requantized<Out>::finisher(Act act) {
  const bool limits = act == Act::none || act == Act::relu || act == Act::clamp;
  return limits ? requantize<true, Out> : requantize<false, Out>;
}

}  // namespace kd
