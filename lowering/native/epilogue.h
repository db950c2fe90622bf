// What happens to a product before it is stored: bias, addend, activation, factor, addend.
#pragma once

#include <limits>
#include <type_traits>

#include "partial.h"
#include "vec_math.h"

namespace kd {

enum class Act : int {
  none,
  relu,
  gelu_erf,
  gelu_tanh,
  silu,
  tanh,
  sigmoid,
  hardswish,
  hardsigmoid,
  clamp,       // to a..b
  leaky_relu,  // slope a
  elu          // alpha a
};

// v = acc + bias[n]; v += before[m, n]; v = act(v); v *= times[m, n]; v += after[m, n]
template <class Element>
struct EpilogueOf {
  const Element* bias = nullptr;
  const Element* before = nullptr;
  const Element* times = nullptr;
  const Element* after = nullptr;
  int64_t ld_before = 0, ld_times = 0, ld_after = 0;  // row strides in elements
  Act act = Act::none;
  float a = 0, b = 0;

  // The same, for the part of the output that starts at [row, column].
  EpilogueOf at(int64_t row, int64_t column) const {
    EpilogueOf part = *this;
    if (bias) part.bias += column;
    if (before) part.before += row * ld_before + column;
    if (times) part.times += row * ld_times + column;
    if (after) part.after += row * ld_after + column;
    return part;
  }
};

using Epilogue = EpilogueOf<float>;

// Not a number stays one: it is always the second operand that is kept then.
static inline vec clamp(vec v, vec low, vec high) {
  return lesser_or_second(high, greater_or_second(low, v));
}

// Activations that are two instructions at most, so cheap that they can be done in every case.
struct Limits {
  bool enough;  // the activation is no more than these limits
  float low = -std::numeric_limits<float>::infinity();
  float high = std::numeric_limits<float>::infinity();

  explicit Limits(const Epilogue& e)
      : enough(e.act == Act::none || e.act == Act::relu || e.act == Act::clamp) {
    if (e.act == Act::relu) low = 0;
    if (e.act == Act::clamp) low = e.a, high = e.b;
  }
};

// Coefficients of the highest power first.
template <class... Floats>
static inline vec polynomial(vec x, float first, Floats... rest) {
  vec p = splat(first);
  ((p = fma(p, x, splat(rest))), ...);
  return p;
}

// exp(x) - 1 for x <= 0, by its series where the subtraction would lose digits.
static inline vec exp_minus_one(vec x) {
  const vec p = polynomial(x, 1.0f / 40320, 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
                           1.0f / 6, 0.5f);
  return x > splat(-0.35f) ? fma(p * x, x, x) : exp(x) - splat(1.0f);
}

// x times the normal distribution's share below x. The share below -|x|, which is never more than a
// half, is fitted as a power of two, so that nothing cancels; it is right to 3e-8.
static inline vec gelu(vec x) {
  const vec a = absolute(x);
  const vec p = polynomial(a, -0x1.9cf48ap-20f, 0x1.a15666p-16f, -0x1.01b2bap-13f,
                           -0x1.2066dap-12f, 0x1.d966fap-8f, -0x1.aed74ap-5f, -0x1.d63370p-2f,
                           -0x1.26af06p+0f, -0x1.fffffep-1f);
  const vec share = exp2_of_nonpositive(p);
  return x * (x < splat(0.0f) ? share : splat(1.0f) - share);
}

__attribute__((always_inline)) static inline vec activate(Act act, vec v, float a, float b) {
  const vec one = splat(1.0f), zero = splat(0.0f);
  switch (act) {
    case Act::none:
      return v;
    case Act::relu:
      return greater_or_second(zero, v);
    case Act::gelu_erf:
      return gelu(v);
    case Act::gelu_tanh: {
      const vec inner = v * fma(v * v, splat(0.044715f), one);
      return v * sigmoid(inner * splat(0x1.988454p+0f));  // (1 + tanh(x)) / 2 = sigmoid(2 x)
    }
    case Act::silu:
      return v * sigmoid(v);
    case Act::tanh:
      return tanh(v);
    case Act::sigmoid:
      return sigmoid(v);
    case Act::hardswish:
      return v * clamp(v + splat(3.0f), zero, splat(6.0f)) / splat(6.0f);
    case Act::hardsigmoid:
      return clamp(v + splat(3.0f), zero, splat(6.0f)) / splat(6.0f);
    case Act::clamp:
      return clamp(v, splat(a), splat(b));
    case Act::leaky_relu:
      return v > zero ? v : v * splat(a);
    case Act::elu:
      return v > zero ? v : splat(a) * exp_minus_one(v);
  }
  return v;
}

// use(constant) with the activation as a constant: loops in it have no choice to make for each vector,
// and keep the numbers of the formula in registers.
template <class Use>
static inline void with_activation(Act act, const Use& use) {
  switch (act) {
    case Act::none:
      return use(std::integral_constant<Act, Act::none>{});
    case Act::relu:
      return use(std::integral_constant<Act, Act::relu>{});
    case Act::gelu_erf:
      return use(std::integral_constant<Act, Act::gelu_erf>{});
    case Act::gelu_tanh:
      return use(std::integral_constant<Act, Act::gelu_tanh>{});
    case Act::silu:
      return use(std::integral_constant<Act, Act::silu>{});
    case Act::tanh:
      return use(std::integral_constant<Act, Act::tanh>{});
    case Act::sigmoid:
      return use(std::integral_constant<Act, Act::sigmoid>{});
    case Act::hardswish:
      return use(std::integral_constant<Act, Act::hardswish>{});
    case Act::hardsigmoid:
      return use(std::integral_constant<Act, Act::hardsigmoid>{});
    case Act::clamp:
      return use(std::integral_constant<Act, Act::clamp>{});
    case Act::leaky_relu:
      return use(std::integral_constant<Act, Act::leaky_relu>{});
    case Act::elu:
      return use(std::integral_constant<Act, Act::elu>{});
  }
}

}  // namespace kd
