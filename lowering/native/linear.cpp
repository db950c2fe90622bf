// act(x @ weight.T + bias + before) * times + after, for rows of float32 and of bfloat16.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "bf16_gemm.h"
#include "counters.h"
#include "gemm.h"
#include "tensors.h"
#include "weights.h"

namespace kd {
namespace {

// The weight is (out, in), or (in, out) as in `x @ weight`.
PackedPtr packed_linear(const Tensor& weight, bool in_out) {
  return weights().get({weight}, in_out ? 1 : 0, [&] {
    const int out = in_out ? 1 : 0, in = 1 - out;
    const int64_t n = weight.size(out), k = weight.size(in);
    const Tensor floats = weight.detach().to(at::kFloat);
    auto packed = std::make_shared<Packed>(packed_size(k, n));
    pack_b(packed->weight.data(), floats.const_data_ptr<float>(), k, n, floats.stride(in),
           floats.stride(out), threads());
    return packed;
  });
}

// What a linear layer of one kind of numbers is made of.
struct InFloats {
  using Element = float;
  static Tensor converted(const Tensor& bias) { return as_float(bias); }
  static constexpr auto packed = packed_linear;
  static void compute(int64_t m, int64_t n, int64_t k, const float* x, const float* weight,
                      float* out, const Epilogue& epilogue) {
    gemm(m, n, k, x, k, weight, out, n, epilogue, threads());
  }
};

template <class Kind>
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              const OptionalTensor& before, const OptionalTensor& times,
              const OptionalTensor& after, int64_t act, double a, double b, bool in_out) {
  using Element = typename Kind::Element;
  using Rows = BesideOf<Element>;
  const int64_t k = weight.size(in_out ? 0 : 1), n = weight.size(in_out ? 1 : 0);
  const Tensor rows = x.contiguous();
  at::DimVector shape(x.sizes());
  shape.back() = n;
  Tensor out = at::empty(shape, x.options());
  if (out.numel() == 0) return out;
  const int64_t m = out.numel() / n;
  const auto plain = at::MemoryFormat::Contiguous;
  const Rows left(before, plain), factor(times, plain), right(after, plain);
  const Tensor columns = Kind::converted(or_undefined(bias));
  const Element* bias_data = columns.defined() ? numbers_of<Element>(columns) : nullptr;
  const auto packed = Kind::packed(weight, in_out);
  Kind::compute(m, n, k, numbers_of<Element>(rows), packed->weight.data(),
                static_cast<Element*>(out.mutable_data_ptr()),
                epilogue_of(bias_data, left, factor, right, n, act, a, b));
  count(kLinear);
  return out;
}

#if defined(__AVX512BF16__)
// A wider weight is rounded, as a graph that casts it (autocast) would do in every call.
PackedPtr packed_linear_bf16(const Tensor& weight, bool in_out) {
  return weights().get({weight}, in_out ? 3 : 2, [&] {
    const Tensor out_in = in_out ? weight.detach().t() : weight.detach();
    const int64_t n = out_in.size(0), k = out_in.size(1);
    Tensor rows = at::zeros({n, 2 * bf16::pairs_of(k)}, weight.options().dtype(at::kBFloat16));
    rows.narrow(1, 0, k).copy_(out_in);
    auto packed = std::make_shared<Packed>(bf16::packed_size_of(k, n));
    bf16::pack(packed->weight.data(), numbers_of<BFloat16>(rows), k, n, threads());
    return packed;
  });
}

struct InBFloat16 {
  using Element = BFloat16;
  static Tensor converted(const Tensor& bias) {
    return bias.defined() ? bias.to(at::kBFloat16).contiguous() : bias;
  }
  static constexpr auto packed = packed_linear_bf16;
  static void compute(int64_t m, int64_t n, int64_t k, const Element* x, const float* weight,
                      Element* out, const EpilogueOf<Element>& epilogue) {
    bf16::gemm(m, n, k, x, weight, out, epilogue, threads());
  }
};
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def(
      "openmp_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? times, "
      "Tensor? after, int act, float a, float b, bool in_out=False) -> Tensor");
#if defined(__AVX512BF16__)
  library.def(
      "openmp_linear_bf16(Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? times, "
      "Tensor? after, int act, float a, float b, bool in_out=False) -> Tensor");
#endif
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_linear", linear<InFloats>);
#if defined(__AVX512BF16__)
  library.impl("openmp_linear_bf16", linear<InBFloat16>);
#endif
}

}  // namespace kd
