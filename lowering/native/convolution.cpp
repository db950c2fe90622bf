// Convolutions of one and two dimensions, with the BatchNorm behind them folded into the weight.

#include <torch/library.h>

#include <algorithm>

#include "convolution_rows.h"
#include "counters.h"

namespace kd {
namespace {

Tensor computed(at::ArrayRef<Layer> layers, std::vector<Tensor> given, bool rows) {
  const bool lines = given.front().dim() == 3;
  for (Tensor& image : given) image = image_of(image);
  const Tensor out = rows ? all_in_rows(layers, given) : all_of(layers, given);
  const auto is_one = [](const Layer& layer) { return layer.is_convolution(); };
  if (out.numel() > 0) count(kConvolution, std::count_if(layers.begin(), layers.end(), is_one));
  return lines ? out.squeeze(2) : out;
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
  Layer layer{weight, or_undefined(bias), norm, stride, padding, dilation, groups, act, a, b,
              winograd};
  std::vector<Tensor> given{x};
  const auto beside = [&](const OptionalTensor& tensor) {
    if (!tensor.has_value()) return Layer::kNothing;
    given.push_back(*tensor);
    return static_cast<int64_t>(given.size()) - 1;
  };
  layer.before = beside(before), layer.times = beside(times), layer.after = beside(after);
  return computed(layer, std::move(given), rows);
}

// Tensors, integers and numbers of each layer, one layer after the other.
constexpr size_t kTensors = 6, kIntegers = 19, kNumbers = 3;

// What a layer reads is there before it. All but the image may be left out. The last one makes memory.
void check_order(at::ArrayRef<Layer> layers, size_t given) {
  TORCH_CHECK(!layers.empty() && !layers.back().is(Kind::slice), "no layer makes the result");
  for (size_t i = 0; i < layers.size(); i++) {
    TORCH_CHECK(layers[i].image >= 0, "layer ", i, " reads no image: ", layers[i].image);
    for (const int64_t value : layers[i].reads())
      TORCH_CHECK(value < static_cast<int64_t>(given + i), "layer ", i, " reads value ", value,
                  ", which is made later");
  }
}

Tensor convolutions(const Tensor& x, const c10::List<OptionalTensor>& tensors,
                    at::IntArrayRef integers, at::ArrayRef<double> numbers,
                    at::TensorList others, bool rows) {
  const size_t count = numbers.size() / kNumbers;
  TORCH_CHECK(tensors.size() == count * kTensors && integers.size() == count * kIntegers,
              "each of ", count, " layers needs ", kTensors, " tensors and ", kIntegers,
              " integers");
  std::vector<Layer> layers;
  layers.reserve(count);
  for (size_t i = 0; i < count; i++) {
    const auto tensor = [&](size_t which) {
      return or_undefined(tensors.get(i * kTensors + which));
    };
    const auto of_layer = integers.slice(i * kIntegers, kIntegers);
    const double* number = &numbers[i * kNumbers];
    layers.push_back({tensor(0), tensor(1), {tensor(2), tensor(3), tensor(4), tensor(5), number[0]},
                      of_layer.slice(0, 2), of_layer.slice(2, 4), of_layer.slice(6, 2), of_layer[8],
                      of_layer[9], number[1], number[2], of_layer[10] != 0, of_layer[11],
                      of_layer[12], of_layer[13], of_layer[14], of_layer[15],
                      static_cast<Kind>(of_layer[16]), {of_layer[17], of_layer[18]}});
  }
  std::vector<Tensor> given{x};
  given.insert(given.end(), others.begin(), others.end());
  check_order(layers, given.size());
  return computed(layers, std::move(given), rows);
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
      "Tensor[] others, *, bool rows=False) -> Tensor",
      as_in_the_graph);
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_convolution", convolution);
  library.impl("openmp_convolutions", convolutions);
}

}  // namespace kd
