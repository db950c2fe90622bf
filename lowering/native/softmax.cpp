// Softmax over the last dimension, and its logarithm.

#include "softmax.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "counters.h"
#include "from_python.h"
#include "tensors.h"

namespace kd {
namespace {

// A thread is worth waking for some 20 microseconds of work.
constexpr double kNumbersPerThread = 1 << 15;

Tensor softmax_of(const Tensor& given, bool logarithm) {
  const Tensor x = given.contiguous(), out = at::empty(x.sizes(), x.options());
  count(kSoftmax);
  if (x.numel() == 0) return out;
  const int64_t size = x.size(-1);
  const int team = useful_threads(threads(), static_cast<double>(x.numel()), kNumbersPerThread);
  softmax(x.const_data_ptr<float>(), out.mutable_data_ptr<float>(), x.numel() / size, size,
          logarithm, team);
  return out;
}

const from_python::Offered offered("openmp_softmax", from_python::entry<softmax_of>);

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def("openmp_softmax(Tensor x, bool logarithm) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) { library.impl("openmp_softmax", softmax_of); }

}  // namespace kd
