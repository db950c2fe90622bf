// Convolutions of one and two dimensions, with the BatchNorm behind them folded into the weight.

#include <torch/library.h>

#include "convolution_rows.h"
#include "counters.h"

namespace kd {
namespace {

Tensor computed(at::ArrayRef<Layer> layers, const Tensor& x, const Operands& beside, bool rows) {
  const Tensor image = image_of(x);
  const Tensor out = rows ? all_in_rows(layers, image, beside)
                          : all_of(layers, channels_last(image), beside);
  if (out.numel() > 0) count(kConvolution, static_cast<int64_t>(layers.size()));
  return x.dim() == 3 ? out.squeeze(2) : out;
}

Tensor convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                   const OptionalTensor& mean, const OptionalTensor& var, double eps,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   int64_t groups, const OptionalTensor& before, const OptionalTensor& times,
                   const OptionalTensor& after, int64_t act, double a, double b, bool winograd,
                   bool rows) {
  const Norm norm{or_undefined(norm_weight), or_undefined(norm_bias), or_undefined(mean),
                  or_undefined(var), eps};
  const Layer layer{weight, or_undefined(bias), norm, stride, padding, dilation, groups, act, a, b,
                    winograd};
  return computed(layer, x, {before, times, after}, rows);
}

// Tensors, integers and numbers of each layer, one layer after the other.
constexpr size_t kTensors = 6, kIntegers = 11, kNumbers = 3;

Tensor convolutions(const Tensor& x, const c10::List<OptionalTensor>& tensors,
                    at::IntArrayRef integers, at::ArrayRef<double> numbers,
                    const OptionalTensor& before, const OptionalTensor& times,
                    const OptionalTensor& after, bool rows) {
  const size_t count = numbers.size() / kNumbers;
  TORCH_CHECK(tensors.size() == count * kTensors && integers.size() == count * kIntegers,
              "each of ", count, " convolutions needs ", kTensors, " tensors and ", kIntegers,
              " integers");
  std::vector<Layer> layers;
  for (size_t i = 0; i < count; i++) {
    const auto tensor = [&](size_t which) {
      return or_undefined(tensors.get(i * kTensors + which));
    };
    const auto of_layer = integers.slice(i * kIntegers, kIntegers);
    const double* number = &numbers[i * kNumbers];
    layers.push_back({tensor(0), tensor(1), {tensor(2), tensor(3), tensor(4), tensor(5), number[0]},
                      of_layer.slice(0, 2), of_layer.slice(2, 4), of_layer.slice(6, 2), of_layer[8],
                      of_layer[9], number[1], number[2], of_layer[10] != 0});
  }
  return computed(layers, x, {before, times, after}, rows);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  // So that Inductor writes images as the graph says they lie: channels last. `rows`: the output is
  // wanted in rows.
  const std::vector<at::Tag> as_in_the_graph{at::Tag::needs_fixed_stride_order};
  library.def(
      "openmp_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, "
      "Tensor? norm_bias, Tensor? mean, Tensor? var, float eps, int[] stride, int[] padding, "
      "int[] dilation, int groups, Tensor? before, Tensor? times, Tensor? after, int act, float a, "
      "float b, bool winograd=False, *, bool rows=False) -> Tensor",
      as_in_the_graph);
  library.def(
      "openmp_convolutions(Tensor x, Tensor?[] tensors, int[] integers, float[] numbers, "
      "Tensor? before, Tensor? times, Tensor? after, *, bool rows=False) -> Tensor",
      as_in_the_graph);
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_convolution", convolution);
  library.impl("openmp_convolutions", convolutions);
}

}  // namespace kd
