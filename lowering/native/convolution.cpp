// Convolutions of one and two dimensions, with the BatchNorm behind them folded into the weight.

#include <torch/library.h>

#include <algorithm>

#include "all_layers.h"
#include "counters.h"
#include "from_python.h"
#include "image_tensors.h"
#include "layer_text.h"

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
                   const OptionalTensor& after, int64_t act, double a, double b, int64_t way,
                   bool rows) {
  const Norm norm{norm_weight, norm_bias, mean, var, eps};
  Layer layer{weight, bias, norm, stride, padding, dilation, groups, act, a, b,
              static_cast<Way>(way)};
  std::vector<Tensor> given{x};
  const auto beside = [&](const OptionalTensor& tensor) {
    if (!tensor.has_value()) return Layer::kNothing;
    given.push_back(*tensor);
    return static_cast<int64_t>(given.size()) - 1;
  };
  layer.before = beside(before), layer.times = beside(times), layer.after = beside(after);
  return computed(layer, std::move(given), rows);
}

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

Tensor convolutions(const Tensor& x, at::TensorList tensors, c10::string_view text,
                    at::TensorList others, bool rows) {
  const LayerText& described = LayerText::of({text.data(), text.size()});
  TORCH_CHECK(tensors.size() == described.tensors(), "these layers have ", described.tensors(),
              " tensors, and here are ", tensors.size());
  const std::vector<Layer> layers = described.layers(tensors);
  std::vector<Tensor> given{x};
  given.insert(given.end(), others.begin(), others.end());
  check_order(layers, given.size());
  return computed(layers, std::move(given), rows);
}

const from_python::Offered offered[] = {
    {"openmp_convolution", from_python::entry<convolution>},
    {"openmp_convolutions", from_python::entry<convolutions>},
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  // So that Inductor writes images as the graph says they lie: channels last. `rows`: the output is
  // wanted in rows.
  const std::vector<at::Tag> as_in_the_graph{at::Tag::needs_fixed_stride_order};
  library.def(
      "openmp_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, "
      "Tensor? norm_bias, Tensor? mean, Tensor? var, float eps, int[] stride, int[] padding, "
      "int[] dilation, int groups, Tensor? before, Tensor? times, Tensor? after, int act, float a, "
      "float b, int way=0, *, bool rows=False) -> Tensor",
      as_in_the_graph);
  library.def(
      "openmp_convolutions(Tensor x, Tensor[] tensors, str layers, Tensor[] others, *, "
      "bool rows=False) -> Tensor",
      as_in_the_graph);
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_convolution", convolution);
  library.impl("openmp_convolutions", convolutions);
}

// They are part of inference graphs alone. Torch's own answer for operators without a gradient would
// look at every tensor in every call.
TORCH_LIBRARY_IMPL(kernel_dispatch, Autograd, library) {
  library.impl("openmp_convolution", torch::CppFunction::makeFallthrough());
  library.impl("openmp_convolutions", torch::CppFunction::makeFallthrough());
}

}  // namespace kd
