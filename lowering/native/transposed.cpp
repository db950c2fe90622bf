// Transposed convolutions of one and two dimensions, with the BatchNorm behind them folded in.

#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "convolution_norm.h"
#include "counters.h"
#include "from_python.h"
#include "image_tensors.h"
#include "transposed.h"
#include "weights.h"

namespace kd {
namespace {

PackedPtr packed_transposed(const Tensor& weight, const Tensor& bias, const Norm& norm,
                            const TransposedShape& s) {
  const Lent from[] = {weight, bias, norm.weight, norm.bias, norm.mean, norm.var};
  const uint64_t form = 1ull << 40 | static_cast<uint64_t>(s.sh) << 20 | static_cast<uint64_t>(s.sw);
  return weights().get(from, norm.recipe(form), [&] {
    auto packed = std::make_shared<Packed>(transposed_packed_size(s));
    const Tensor floats = as_float(weight.detach());
    FoldedNorm folded(bias, norm, s.co);
    transposed_pack(packed->weight.data(), floats.const_data_ptr<float>(), folded.scales(), s,
                    threads());
    packed->bias = std::move(folded.bias);
    return packed;
  });
}

// A 1-D convolution is a 2-D one on images with one row.
TransposedShape shape_of(const Tensor& image, const Tensor& weight, at::IntArrayRef stride,
                         at::IntArrayRef padding, at::IntArrayRef more) {
  const bool flat = weight.dim() == 3;
  TransposedShape s{};
  s.n = image.size(0), s.ci = image.size(1), s.h = image.size(2), s.w = image.size(3);
  s.co = weight.size(1);
  s.kh = flat ? 1 : weight.size(2), s.kw = weight.size(-1);
  s.sh = flat ? 1 : stride.front(), s.sw = stride.back();
  s.ph = flat ? 0 : padding.front(), s.pw = padding.back();
  s.oh = (s.h - 1) * s.sh - 2 * s.ph + s.kh + (flat ? 0 : more.front());
  s.ow = (s.w - 1) * s.sw - 2 * s.pw + s.kw + more.back();
  return s;
}

Tensor transposed_convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                              const OptionalTensor& mean, const OptionalTensor& var, double eps,
                              at::IntArrayRef stride, at::IntArrayRef padding,
                              at::IntArrayRef output_padding, int64_t act, double a, double b) {
  const bool flat = x.dim() == 3;
  const auto format = at::MemoryFormat::ChannelsLast;
  if (x.numel() == 0) {  // an empty output, or eager's own error
    const std::vector<int64_t> ones(stride.size(), 1);
    const Tensor own = as_float(weight);
    const Tensor out = at::convolution(x, own, {}, stride, padding, ones, true, output_padding, 1);
    return flat ? out.unsqueeze(2).contiguous(format).squeeze(2) : out.contiguous(format);
  }
  const Tensor image = channels_last(image_of(x));
  const TransposedShape s = shape_of(image, weight, stride, padding, output_padding);
  const Norm norm{norm_weight, norm_bias, mean, var, eps};
  TORCH_CHECK(s.oh > 0 && s.ow > 0, "the padding leaves an output of ", s.oh, "x", s.ow);
  const Tensor out = at::empty({s.n, s.co, s.oh, s.ow}, image.options().memory_format(format));
  if (out.numel() > 0) {
    const PackedPtr packed = packed_transposed(weight, Lent(bias), norm, s);
    Epilogue epilogue;
    epilogue.bias = packed->bias.empty() ? nullptr : packed->bias.data();
    epilogue.act = static_cast<Act>(act);
    epilogue.a = static_cast<float>(a), epilogue.b = static_cast<float>(b);
    transposed(s, image.const_data_ptr<float>(), packed->weight.data(),
               out.mutable_data_ptr<float>(), epilogue, threads());
    count(kTransposedConvolution);
  }
  return flat ? out.squeeze(2) : out;
}

const from_python::Offered offered("openmp_transposed_convolution",
                                   from_python::entry<transposed_convolution>);

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  // So that Inductor writes images as the graph says they lie: channels last.
  const std::vector<at::Tag> as_in_the_graph{at::Tag::needs_fixed_stride_order};
  library.def(
      "openmp_transposed_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, "
      "Tensor? norm_bias, Tensor? mean, Tensor? var, float eps, int[] stride, int[] padding, "
      "int[] output_padding, int act, float a, float b) -> Tensor",
      as_in_the_graph);
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_transposed_convolution", transposed_convolution);
}

}  // namespace kd
