// Group norm of images as they lie, in rows or channels last.

#include "group_norm.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "counters.h"
#include "from_python.h"
#include "tensors.h"

namespace kd {
namespace {

// A thread is worth waking for some 20 microseconds of work.
constexpr double kNumbersPerThread = 1 << 15;

bool lies_channels_last(const Tensor& x) { return x.movedim(1, -1).is_contiguous(); }

template <class Element>
void norm(const GroupNorm& n, const Tensor& x, const Tensor& out, bool in_rows) {
  const int team = useful_threads(threads(), static_cast<double>(x.numel()), kNumbersPerThread);
  auto* const to = static_cast<Element*>(out.mutable_data_ptr());
  if (in_rows)
    norm_in_rows(n, numbers_of<Element>(x), to, team);
  else
    norm_channels_last(n, numbers_of<Element>(x), to, team);
}

const float* floats_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

Tensor group_norm(const Tensor& given, const OptionalTensor& weight, const OptionalTensor& bias,
                  int64_t groups, double eps, int64_t act, double a, double b) {
  Tensor out = at::empty_like(given);  // dense, and otherwise laid as what is given
  const bool in_rows = out.is_contiguous();
  if (!in_rows && !lies_channels_last(out))
    return out.copy_(group_norm(given.contiguous(), weight, bias, groups, eps, act, a, b));
  count(kGroupNorm);
  if (out.numel() == 0) return out;
  const Tensor x = given.strides() == out.strides() ? given : at::empty_like(given).copy_(given);
  const Tensor weights = as_float(or_undefined(weight)), biases = as_float(or_undefined(bias));
  const int64_t images = x.size(0), channels = x.size(1);
  const GroupNorm n{images,
                    groups,
                    channels / groups,
                    x.numel() / (images * channels),
                    floats_or_null(weights),
                    floats_or_null(biases),
                    eps,
                    static_cast<Act>(act),
                    static_cast<float>(a),
                    static_cast<float>(b)};
  switch (x.scalar_type()) {
    case at::kFloat:
      norm<float>(n, x, out, in_rows);
      break;
    case at::kBFloat16:
      norm<BFloat16>(n, x, out, in_rows);
      break;
    default:
      TORCH_CHECK(x.scalar_type() == at::kHalf, "group norm of ", x.scalar_type());
      norm<Half>(n, x, out, in_rows);
  }
  return out;
}

const from_python::Offered offered("openmp_group_norm", from_python::entry<group_norm>);

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  // So that Inductor writes images as the graph says they lie: the result lies as they do.
  const std::vector<at::Tag> as_in_the_graph{at::Tag::needs_fixed_stride_order};
  library.def(
      "openmp_group_norm(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, int act, "
      "float a, float b) -> Tensor",
      as_in_the_graph);
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_group_norm", group_norm);
}

}  // namespace kd
