// Torch's tensors as the kernels take them; for the files that make torch operators of the kernels.
//
// Shapes are validated where a graph is lowered. What the operators check is what may differ from
// call to call: strides, empty tensors.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <optional>

#include "elements.h"
#include "epilogue.h"
#include "lent.h"

namespace kd {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline int threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

inline Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

// Torch's name of a kind of numbers.
template <class Element>
constexpr at::ScalarType type_of = std::is_same_v<Element, float>      ? at::kFloat
                                   : std::is_same_v<Element, BFloat16> ? at::kBFloat16
                                                                       : at::kHalf;

// A tensor's numbers as the kernels call them.
template <class Element>
const Element* numbers_of(const Tensor& tensor) {
  return static_cast<const Element*>(tensor.const_data_ptr());
}

// Rows of a matrix: what an epilogue reads beside the output must lie as the output does.
template <class Element>
struct BesideOf {
  Tensor tensor;
  const Element* data = nullptr;

  BesideOf(const OptionalTensor& given, at::MemoryFormat format) {
    if (!given.has_value()) return;
    tensor = given->contiguous(format);
    data = numbers_of<Element>(tensor);
  }
};
using Beside = BesideOf<float>;

inline Tensor as_float(const Tensor& tensor) {
  return tensor.defined() ? tensor.to(at::kFloat).contiguous() : tensor;
}

template <class Element>
EpilogueOf<Element> epilogue_of(const Element* bias, const BesideOf<Element>& before,
                                const BesideOf<Element>& times, const BesideOf<Element>& after,
                                int64_t row, int64_t act, double a, double b) {
  EpilogueOf<Element> epilogue;
  epilogue.bias = bias;
  epilogue.before = before.data;
  epilogue.times = times.data;
  epilogue.after = after.data;
  epilogue.ld_before = epilogue.ld_times = epilogue.ld_after = row;
  epilogue.act = static_cast<Act>(act);
  epilogue.a = static_cast<float>(a);
  epilogue.b = static_cast<float>(b);
  return epilogue;
}

}  // namespace kd
