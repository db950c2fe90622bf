// Linear layers by MKL, through torch's own operators. From Python it takes 12 us, and 30 where caches are
// cold, to find the packed weight and to get there (measured: Xeon, 128 rows of 768 to 768 take 550).

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include "counters.h"
#include "from_python.h"
#include "tensors.h"
#include "weights.h"

namespace kd {
namespace {

template <class Signature>
c10::TypedOperatorHandle<Signature> torchs(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensor pack(const Tensor& out_in, int64_t rows) {
  static const auto pack = torchs<Tensor(const Tensor&, int64_t)>("mkl::_mkl_reorder_linear_weight");
  return pack.call(out_in.detach().contiguous(), rows);
}

Tensor multiply(const Tensor& input, const Tensor& packed, const Tensor& out_in, const OptionalTensor& bias,
                int64_t rows) {
  static const auto multiply = torchs<Tensor(const Tensor&, const Tensor&, const Tensor&,
                                             const OptionalTensor&, int64_t)>("mkl::_mkl_linear");
  return multiply.call(input, packed, out_in, bias, rows);
}

// The form is made for one number of rows.
PackedPtr packed_for(const Tensor& weight, const Tensor& out_in, bool in_out, int64_t rows) {
  constexpr uint64_t of_mkl = uint64_t{1} << 62;  // no other form of a matrix has it
  const uint64_t recipe = of_mkl | static_cast<uint64_t>(rows) << 1 | (in_out ? 1 : 0);
  return weights().get({weight}, recipe, [&] {
    auto packed = std::make_shared<Packed>(0);
    packed->of_library = pack(out_in, rows);
    packed->bytes_of_library = static_cast<int64_t>(weight.nbytes());
    return packed;
  });
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, bool in_out) {
  const Tensor out_in = in_out ? weight.t() : weight;
  // MKL forgets the bias of an empty product.
  if (input.numel() == 0 || weight.numel() == 0) return at::linear(input, out_in, bias);
  const int64_t rows = input.numel() / input.size(-1);
  const PackedPtr packed = packed_for(weight, out_in, in_out, rows);
  count(kMklLinear);
  return multiply(input.contiguous(), packed->of_library, out_in, bias, rows);
}

const from_python::Offered offered("mkl_linear_native", from_python::entry<linear>);

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def("mkl_linear_native(Tensor input, Tensor weight, Tensor? bias, bool in_out=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) { library.impl("mkl_linear_native", linear); }

}  // namespace kd
