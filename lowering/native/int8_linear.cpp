// Linear layers with a weight of bytes: of rows of bytes as well, or of floats and halves.
//   act((x @ weight.T) * row_scale * scale + bias + before) * times + after

#include <ATen/EmptyTensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "counters.h"
#include "from_python.h"
#include "int8_product.h"
#include "int8_weight.h"
#include "tensors.h"
#include "weights.h"

namespace kd {
namespace {

// The weight is (out, in), or (in, out) as in `x @ weight`.
PackedPtr packed_bytes(const Tensor& weight, bool in_out) {
  return weights().get({weight}, 6 + in_out, [&] {
    const Tensor out_in = in_out ? weight.detach().t() : weight.detach();
    const int64_t n = out_in.size(0), k = out_in.size(1);
    const Tensor rows = at::zeros({n, 4 * int8::words_of(k)}, weight.options());
    rows.narrow(1, 0, k).copy_(out_in);
    auto packed = std::make_shared<Packed>(int8::packed_size_of(k, n));
    int8::pack(packed->weight.data(), rows.const_data_ptr<int8_t>(), k, n, threads());
    return packed;
  });
}

const float* floats_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

// What is beside the product, in the form in which it is read.
template <class Element>
struct Around {
  Tensor scale, bias;
  BesideOf<Element> before, times, after;
  EpilogueOf<Element> epilogue;

  Around(const OptionalTensor& scale_, const OptionalTensor& bias_, const OptionalTensor& before_,
         const OptionalTensor& times_, const OptionalTensor& after_, int64_t n, int64_t act, double a,
         double b)
      : scale(as_float(or_undefined(scale_))), bias(as_float(or_undefined(bias_))),
        before(before_, at::MemoryFormat::Contiguous), times(times_, at::MemoryFormat::Contiguous),
        after(after_, at::MemoryFormat::Contiguous),
        epilogue(epilogue_of<Element>(nullptr, before, times, after, n, act, a, b)) {}

  // The bias may be of another dtype than the result: it is added in floats.
  OfColumns own() const { return {floats_of(scale), floats_of(bias)}; }
};

void check(const Tensor& x, const Tensor& weight, bool in_out, const OptionalTensor& row_scale,
           at::ArrayRef<const OptionalTensor*> of_columns, at::ArrayRef<const OptionalTensor*> whole) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kChar && x.dim() > 0 &&
                  x.size(-1) == weight.size(in_out ? 0 : 1),
              "a linear layer of ", x.sizes(), " has a weight of bytes of ", weight.sizes());
  const int64_t n = weight.size(in_out ? 1 : 0);
  const int64_t m = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  TORCH_CHECK(!row_scale || row_scale->numel() == m, row_scale->sizes(), " factors of ", m, " rows");
  for (const OptionalTensor* one : of_columns)
    TORCH_CHECK(!one->has_value() || (*one)->numel() == n, (*one)->sizes(), " numbers for ", n,
                " outputs");
  for (const OptionalTensor* one : whole)
    TORCH_CHECK(!one->has_value() || (*one)->numel() == m * n, "a tensor of ", (*one)->sizes(),
                " beside ", m, " rows of ", n, " outputs");
}

struct Sizes {
  int64_t m, n, k;
};

template <class Element>
void of_bytes(const Tensor& x, const int8::Words& words, const Sizes& s, const Tensor& row_scale,
              const Around<Element>& around, Tensor& out) {
  const Tensor rows = x.contiguous();
  const Tensor factors = as_float(row_scale);
  const int8::Product<Element> product{
      s.m, s.n, s.k, {rows.const_data_ptr<int8_t>(), s.k, s.k}, words,
      static_cast<Element*>(out.mutable_data_ptr()), s.n, around.epilogue,
      floats_of(factors), around.own()};
  int8::multiply(product, threads());
}

template <class Element>
void of_floats(const Tensor& x, const int8::Words& words, const Sizes& s, const Around<Element>& around,
               Tensor& out) {
  const Tensor rows = x.contiguous();
  const int8::Widening<Element> product{s.m,
                                        numbers_of<Element>(rows),
                                        words,
                                        around.own(),
                                        static_cast<Element*>(out.mutable_data_ptr()),
                                        around.epilogue};
  int8::multiply(product, threads());
}

// `dtype`: of the result.
constexpr at::ScalarType kResults[] = {at::kFloat, at::kBFloat16, at::kHalf};

Tensor int8_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& row_scale,
                   const OptionalTensor& scale, const OptionalTensor& bias, const OptionalTensor& before,
                   const OptionalTensor& times, const OptionalTensor& after, int64_t act, double a,
                   double b, int64_t dtype, bool in_out) {
  check(x, weight, in_out, row_scale, {&scale, &bias}, {&before, &times, &after});
  TORCH_CHECK(dtype >= 0 && dtype < 3, "a result is of kind 0 to 2, not ", dtype);
  at::DimVector shape(x.sizes());
  const Sizes s{c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), weight.size(in_out ? 1 : 0),
                x.size(-1)};
  shape.back() = s.n;
  Tensor out = at::detail::empty_cpu(shape, kResults[dtype], false, std::nullopt);
  if (out.numel() == 0) return out;
  const PackedPtr packed = packed_bytes(weight, in_out);
  const int8::Words words{packed->weight.data(), s.k, s.n};
  const auto around = [&](auto element) {
    return Around<decltype(element)>(scale, bias, before, times, after, s.n, act, a, b);
  };
  const bool bytes = x.scalar_type() == at::kChar;
  const auto compute = [&](auto element) {
    using Element = decltype(element);
    if (bytes) return of_bytes<Element>(x, words, s, or_undefined(row_scale), around(element), out);
    if constexpr (std::is_same_v<Element, float>)
      of_floats<float>(x, words, s, around(element), out);
#if defined(__AVX512BF16__)
    else
      of_floats<Element>(x, words, s, around(element), out);
#endif
  };
  TORCH_CHECK(bytes || (x.scalar_type() == kResults[dtype] && !row_scale), "rows of ", x.scalar_type(),
              " give such rows without factors of their own");
  switch (kResults[dtype]) {
    case at::kFloat:
      compute(float());
      break;
    case at::kBFloat16:
      TORCH_CHECK(bytes || halves::multiplied<BFloat16>(), "bfloat16 has no products here");
      compute(BFloat16());
      break;
    default:
      TORCH_CHECK(bytes || halves::multiplied<Half>(), "float16 has no products here");
      compute(Half());
  }
  count(kInt8Linear);
  return out;
}

const from_python::Offered offered("openmp_int8_linear", from_python::entry<int8_linear>);

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def(
      "openmp_int8_linear(Tensor x, Tensor weight, Tensor? row_scale, Tensor? scale, Tensor? bias, "
      "Tensor? before, Tensor? times, Tensor? after, int act, float a, float b, int dtype, "
      "bool in_out=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) { library.impl("openmp_int8_linear", int8_linear); }

}  // namespace kd
