// Convolutions whose weights change in every step, and the gradients of their images: those of a
// convolution with stride 1 are a convolution themselves, with inputs for outputs and taps turned around.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "all_layers.h"
#include "counters.h"
#include "from_python.h"
#include "image_tensors.h"

namespace kd {
namespace {

constexpr int64_t kBlock = 16;  // so many numbers are a cache line

// [outputs][inputs][taps] to [inputs][outputs][taps], the last tap first.
void turn(const float* from, float* to, int64_t outputs, int64_t inputs, int64_t taps) {
  for_each_item(ceil_div(inputs, kBlock), threads(), [&](int64_t item) {
    const int64_t last = std::min(inputs, (item + 1) * kBlock);
    for (int64_t first = 0; first < outputs; first += kBlock)
      for (int64_t i = item * kBlock; i < last; i++)
        for (int64_t o = first; o < std::min(outputs, first + kBlock); o++)
          for (int64_t t = 0; t < taps; t++)
            to[(i * outputs + o) * taps + taps - 1 - t] = from[(o * inputs + i) * taps + t];
  });
}

Tensor turned(const Tensor& weight) {
  const Tensor given = as_float(weight.detach());
  std::vector<int64_t> sizes = given.sizes().vec();
  const int64_t outputs = sizes[0], inputs = sizes[1];
  std::swap(sizes[0], sizes[1]);
  const Tensor made = at::empty(sizes, given.options());
  if (made.numel() == 0) return made;
  turn(given.const_data_ptr<float>(), made.mutable_data_ptr<float>(), outputs, inputs,
       given.numel() / (outputs * inputs));
  return made;
}

Tensor training_convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            at::IntArrayRef stride, at::IntArrayRef padding,
                            at::IntArrayRef dilation, bool turns, int64_t way) {
  const Tensor used = turns ? turned(weight) : weight;
  Layer layer{used, bias, Norm{}, stride, padding, dilation, 1, 0, 0.0, 0.0, static_cast<Way>(way)};
  layer.once = true;
  const Tensor out = all_of(layer, {image_of(x)});
  if (out.numel() > 0) count(kTrainingConvolution);
  return x.dim() == 3 ? out.squeeze(2) : out;
}

const from_python::Offered offered[] = {
    {"openmp_training_convolution", from_python::entry<training_convolution>},
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  // No tag: what lowering/image_layouts.py tells Inductor counts.
  library.def(
      "openmp_training_convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, "
      "int[] padding, int[] dilation, bool turns, int way) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_training_convolution", training_convolution);
}

// Part of the forward and the backward that AOTAutograd made, which differentiates neither.
TORCH_LIBRARY_IMPL(kernel_dispatch, Autograd, library) {
  library.impl("openmp_training_convolution", torch::CppFunction::makeFallthrough());
}

}  // namespace kd
