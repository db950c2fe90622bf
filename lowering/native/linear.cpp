// act(x @ weight.T + bias + before) * times + after, for rows of float32 and of halves.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "counters.h"
#include "from_python.h"
#include "half_linear.h"
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

#if defined(__AVX512BF16__)
// A wider weight is rounded, as a graph that casts it (autocast) would do in every call.
template <class Number>
PackedPtr packed_linear_of_halves(const Tensor& weight, bool in_out) {
  const int form = std::is_same_v<Number, BFloat16> ? 2 : 4;
  return weights().get({weight}, form + in_out, [&] {
    const Tensor out_in = in_out ? weight.detach().t() : weight.detach();
    const int64_t n = out_in.size(0), k = out_in.size(1);
    Tensor rows = at::zeros({n, 2 * halves::pairs_of(k)}, weight.options().dtype(type_of<Number>));
    rows.narrow(1, 0, k).copy_(out_in);
    auto packed = std::make_shared<Packed>(halves::packed_size_of(k, n));
    halves::pack(packed->weight.data(), numbers_of<Number>(rows), k, n, threads());
    return packed;
  });
}
#endif

// A kind of numbers, with what the weights and biases of such layers become.
struct LinearInFloats : InFloats {
  static Tensor converted(const Tensor& bias) { return as_float(bias); }
  static constexpr auto packed = packed_linear;
};

#if defined(__AVX512BF16__)
template <class Number>
struct LinearInHalves : InHalves<Number> {
  static Tensor converted(const Tensor& bias) {
    return bias.defined() ? bias.to(type_of<Number>).contiguous() : bias;
  }
  static constexpr auto packed = packed_linear_of_halves<Number>;
};
#endif

// One layer, as the graph describes it.
struct Described {
  Tensor weight;
  OptionalTensor bias, before, times, after;
  int64_t act = 0;
  double a = 0, b = 0;
  bool in_out = false;
  std::optional<size_t> gate = std::nullopt;  // the layer that `times` is, which is no result then

  int64_t inner() const { return weight.size(in_out ? 0 : 1); }
  int64_t outer() const { return weight.size(in_out ? 1 : 0); }
};

// A layer with its weight packed and what it reads in the form in which it is read.
template <class Kind>
struct Prepared {
  using Element = typename Kind::Element;
  using Rows = BesideOf<Element>;
  static constexpr auto kPlain = at::MemoryFormat::Contiguous;
  int64_t n;
  Rows before, times, after;
  Tensor bias;
  PackedPtr packed;
  EpilogueOf<Element> epilogue;

  explicit Prepared(const Described& layer)
      : n(layer.outer()), before(layer.before, kPlain), times(layer.times, kPlain),
        after(layer.after, kPlain), bias(Kind::converted(or_undefined(layer.bias))),
        packed(Kind::packed(layer.weight, layer.in_out)),
        epilogue(epilogue_of(bias.defined() ? numbers_of<Element>(bias) : nullptr, before, times,
                             after, n, layer.act, layer.a, layer.b)) {}
};

// Generated code does not compare sizes for us (lowering/input_checks.py).
void check(const Tensor& x, const Described& layer) {
  TORCH_CHECK(layer.weight.dim() == 2 && x.size(-1) == layer.inner(), "a linear layer of ", x.sizes(),
              " has a weight of ", layer.weight.sizes());
  const int64_t values = layer.inner() > 0 ? x.numel() / layer.inner() * layer.outer() : -1;
  TORCH_CHECK(!layer.bias || layer.bias->numel() == layer.outer(), "a bias of ",
              layer.bias->sizes(), " for ", layer.outer(), " outputs");
  for (const OptionalTensor* beside : {&layer.before, &layer.times, &layer.after})
    TORCH_CHECK(!beside->has_value() || values < 0 || (*beside)->numel() == values, "a tensor of ",
                (*beside)->sizes(), " beside ", values, " outputs of a linear layer");
}

template <class Kind>
std::vector<Tensor> computed(const Tensor& x, at::ArrayRef<Described> layers) {
  using Element = typename Kind::Element;
  for (const Described& layer : layers) check(x, layer);
  const Tensor rows = x.contiguous();
  const int64_t m = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  std::vector<bool> is_gate(layers.size());
  for (const Described& layer : layers)
    if (layer.gate) is_gate[*layer.gate] = true;
  std::vector<Prepared<Kind>> prepared(layers.begin(), layers.end());
  std::vector<LinearLayer<Element>> group;
  std::vector<Tensor> results;
  at::DimVector shape(x.sizes());
  for (size_t i = 0; i < layers.size(); i++) {
    if (is_gate[i]) continue;
    const Prepared<Kind>& layer = prepared[i];
    shape.back() = layer.n;
    results.emplace_back(at::detail::empty_cpu(shape, x.scalar_type(), false, std::nullopt));
    auto* const out = static_cast<Element*>(results.back().mutable_data_ptr());
    if (results.back().numel() == 0) continue;
    group.push_back({layer.n, layer.packed->weight.data(), layer.epilogue, out});
    if (!layers[i].gate) continue;
    group.back().gate = prepared[*layers[i].gate].packed->weight.data();
    group.back().gate_epilogue = prepared[*layers[i].gate].epilogue;
  }
  if (group.empty()) return results;
  linear_group<Kind>(m, layers.front().inner(), numbers_of<Element>(rows), group, threads());
  count(kLinear, static_cast<int64_t>(layers.size()));
  return results;
}

template <class Kind>
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              const OptionalTensor& before, const OptionalTensor& times,
              const OptionalTensor& after, int64_t act, double a, double b, bool in_out) {
  const Described layer{weight, bias, before, times, after, act, a, b, in_out};
  return computed<Kind>(x, layer).front();
}

// Of each layer, one after the other: its weight and, of bias, before, times and after, those that
// its bits say are given; activation, bits and gate (or -1); the activation's two numbers, unless
// those of all layers are 0. Python is quickest with few and plain arguments.
constexpr size_t kIntegers = 3, kNumbers = 2;
constexpr int64_t kInOut = 16;  // above the bits of the four tensors

template <class Kind>
std::vector<Tensor> linears(const Tensor& x, at::TensorList tensors, at::IntArrayRef integers,
                            at::ArrayRef<double> numbers) {
  const size_t count = integers.size() / kIntegers;
  TORCH_CHECK(count > 0 && integers.size() == count * kIntegers &&
                  (numbers.empty() || numbers.size() == count * kNumbers),
              "linear layers need ", kIntegers, " integers and ", kNumbers,
              " or no numbers each; got ", integers.size(), " and ", numbers.size());
  std::vector<Described> layers;
  const auto next = [&] {
    TORCH_CHECK(!tensors.empty(), count, " linear layers need more tensors");
    const Tensor first = tensors.front();
    tensors = tensors.slice(1);
    return first;
  };
  for (size_t i = 0; i < count; i++) {
    const int64_t* integer = &integers[i * kIntegers];
    const int64_t bits = integer[1], gate = integer[2];
    Described layer{next()};
    OptionalTensor* const beside[] = {&layer.bias, &layer.before, &layer.times, &layer.after};
    for (int which = 0; which < 4; which++)
      if (bits >> which & 1) *beside[which] = next();
    layer.act = integer[0];
    layer.in_out = (bits & kInOut) != 0;
    if (!numbers.empty()) layer.a = numbers[i * kNumbers], layer.b = numbers[i * kNumbers + 1];
    TORCH_CHECK(gate < static_cast<int64_t>(i), "a gate comes before the layer it is for");
    if (gate >= 0) layer.gate = static_cast<size_t>(gate);
    layers.push_back(std::move(layer));
  }
  TORCH_CHECK(tensors.empty(), tensors.size(), " tensors too many for ", count, " linear layers");
  return computed<Kind>(x, layers);
}

// A layer and its gate. Not a list of one result: Inductor's C++ wrapper (torch 2.13) takes that for
// the tensor itself, and the process dies.
template <class Kind>
Tensor gated_linear(const Tensor& x, at::TensorList tensors, at::IntArrayRef integers,
                    at::ArrayRef<double> numbers) {
  const std::vector<Tensor> results = linears<Kind>(x, tensors, integers, numbers);
  TORCH_CHECK(results.size() == 1, "a gated layer has one result, these have ", results.size());
  return results.front();
}

#if defined(__AVX512BF16__)
// For the kind of halves that the rows are of.
template <class Function>
Function* of_kind(const Tensor& x, Function* of_bfloat16, Function* of_float16) {
  if (x.scalar_type() != at::kHalf) return of_bfloat16;
  TORCH_CHECK(halves::multiplied<Half>(),
              "float16 has no products here: the CPU or the process lacks AMX for it");
  return of_float16;
}

Tensor half_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& before, const OptionalTensor& times,
                   const OptionalTensor& after, int64_t act, double a, double b, bool in_out) {
  const auto compute = of_kind(x, linear<LinearInHalves<BFloat16>>, linear<LinearInHalves<Half>>);
  return compute(x, weight, bias, before, times, after, act, a, b, in_out);
}

std::vector<Tensor> half_linears(const Tensor& x, at::TensorList tensors,
                                 at::IntArrayRef integers, at::ArrayRef<double> numbers) {
  const auto compute = of_kind(x, linears<LinearInHalves<BFloat16>>, linears<LinearInHalves<Half>>);
  return compute(x, tensors, integers, numbers);
}

Tensor gated_half_linear(const Tensor& x, at::TensorList tensors, at::IntArrayRef integers,
                         at::ArrayRef<double> numbers) {
  const auto compute =
      of_kind(x, gated_linear<LinearInHalves<BFloat16>>, gated_linear<LinearInHalves<Half>>);
  return compute(x, tensors, integers, numbers);
}
#endif

const from_python::Offered offered[] = {
    {"openmp_linear", from_python::entry<linear<LinearInFloats>>},
    {"openmp_linears", from_python::entry<linears<LinearInFloats>>},
    {"openmp_gated_linear", from_python::entry<gated_linear<LinearInFloats>>},
#if defined(__AVX512BF16__)
    {"openmp_linear_half", from_python::entry<half_linear>},
    {"openmp_linears_half", from_python::entry<half_linears>},
    {"openmp_gated_linear_half", from_python::entry<gated_half_linear>},
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  const std::string one =
      "(Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? times, Tensor? after, "
      "int act, float a, float b, bool in_out=False) -> Tensor";
  const std::string several = "(Tensor x, Tensor[] tensors, int[] integers, float[] numbers) -> ";
  library.def(("openmp_linear" + one).c_str());
  library.def(("openmp_linears" + several + "Tensor[]").c_str());
  library.def(("openmp_gated_linear" + several + "Tensor").c_str());
#if defined(__AVX512BF16__)
  library.def(("openmp_linear_half" + one).c_str());
  library.def(("openmp_linears_half" + several + "Tensor[]").c_str());
  library.def(("openmp_gated_linear_half" + several + "Tensor").c_str());
#endif
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_linear", linear<LinearInFloats>);
  library.impl("openmp_linears", linears<LinearInFloats>);
  library.impl("openmp_gated_linear", gated_linear<LinearInFloats>);
#if defined(__AVX512BF16__)
  library.impl("openmp_linear_half", half_linear);
  library.impl("openmp_linears_half", half_linears);
  library.impl("openmp_gated_linear_half", gated_half_linear);
#endif
}

}  // namespace kd
