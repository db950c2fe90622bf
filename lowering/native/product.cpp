// Products of two activations, and those of training: no operand is known ahead.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "counters.h"
#include "from_python.h"
#include "gemm_unpacked.h"
#include "tensors.h"

namespace kd {
namespace {

Tensor product(const Tensor& left, const Tensor& right, const OptionalTensor& bias) {
  const bool batched = left.dim() == 3;
  const int64_t m = left.size(-2), k = left.size(-1), n = right.size(-1);
  Tensor out = batched ? at::empty({left.size(0), m, n}, left.options())
                       : at::empty({m, n}, left.options());
  if (out.numel() == 0) return out;
  const float *a = left.const_data_ptr<float>(), *b = right.const_data_ptr<float>();
  float* c = out.mutable_data_ptr<float>();
  if (batched) {
    bmm(left.size(0), m, n, k, {a, left.stride(0), left.stride(1), left.stride(2)},
        {b, right.stride(0), right.stride(1), right.stride(2)}, c, m * n, n, 1.0f, threads());
  } else {
    const Tensor columns = bias.has_value() ? bias->contiguous() : Tensor();
    Epilogue epilogue;
    if (columns.defined()) epilogue.bias = columns.const_data_ptr<float>();
    gemm_unpacked(m, n, k, a, left.stride(0), left.stride(1), b, right.stride(0),
                  right.stride(1), c, n, epilogue, threads());
  }
  count(kProduct);
  return out;
}

const from_python::Offered offered("openmp_product", from_python::entry<product>);

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def("openmp_product(Tensor left, Tensor right, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) { library.impl("openmp_product", product); }

}  // namespace kd
