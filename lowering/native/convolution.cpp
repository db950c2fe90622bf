// Convolutions of one and two dimensions, with the BatchNorm behind them folded into the weight.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

#include "conv.h"
#include "counters.h"
#include "tensors.h"
#include "weights.h"
#include "winograd.h"

namespace kd {
namespace {

// Channels last, with one row more where the convolution is 1-D.
Tensor as_image(const Tensor& x) {
  const Tensor image = x.dim() == 3 ? x.unsqueeze(2) : x;
  return image.contiguous(at::MemoryFormat::ChannelsLast);
}

struct Norm {
  Tensor weight, bias, mean, var;
  double eps;
};

// One weight may stand before several norms, each of which gives a form of its own.
uint64_t recipe_of(const Norm& norm, int64_t groups, bool winograd) {
  const uint64_t form = static_cast<uint64_t>(groups) * 2 + winograd;
  if (!norm.mean.defined()) return form;
  uint64_t eps;
  std::memcpy(&eps, &norm.eps, sizeof eps);
  const auto mean = reinterpret_cast<uint64_t>(norm.mean.unsafeGetTensorImpl());
  return ((eps * 31 + mean) * 31 + form) | 1ull << 63;
}

PackedPtr packed_convolution(const Tensor& weight, const Tensor& bias, const Norm& norm,
                                 const ConvShape& shape, bool winograd) {
  const uint64_t recipe = recipe_of(norm, shape.groups, winograd);
  const Tensor from[] = {weight, bias, norm.weight, norm.bias, norm.mean, norm.var};
  return weights().get(from, recipe, [&] {
    auto packed = std::make_shared<Packed>(winograd ? winograd::packed_size_of(shape)
                                                    : conv_packed_size(shape));
    const Tensor floats = as_float(weight.detach());
    std::vector<float> scale;
    const Tensor shift = as_float(bias);
    if (norm.mean.defined()) {
      const Tensor mean = as_float(norm.mean), var = as_float(norm.var);
      const Tensor gain = as_float(norm.weight), offset = as_float(norm.bias);
      scale.resize(shape.co);
      packed->bias.resize(shape.co);
      for (int64_t c = 0; c < shape.co; c++) {
        const auto at = [c](const Tensor& t, double otherwise) {
          return t.defined() ? static_cast<double>(t.const_data_ptr<float>()[c]) : otherwise;
        };
        const double factor = at(gain, 1.0) / std::sqrt(at(var, 1.0) + norm.eps);
        scale[c] = static_cast<float>(factor);
        packed->bias[c] =
            static_cast<float>((at(shift, 0.0) - at(mean, 0.0)) * factor + at(offset, 0.0));
      }
    } else if (shift.defined()) {
      const float* data = shift.const_data_ptr<float>();
      packed->bias.assign(data, data + shape.co);
    }
    (winograd ? winograd::pack : conv_pack)(
        packed->weight.data(), floats.const_data_ptr<float>(),
        scale.empty() ? nullptr : scale.data(), shape, threads());
    return packed;
  });
}

// A 1-D convolution is a 2-D one on images with one row.
ConvShape shape_of(const Tensor& image, const Tensor& weight, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  const bool flat = weight.dim() == 3;
  ConvShape s{};
  s.n = image.size(0), s.ci = image.size(1), s.h = image.size(2), s.w = image.size(3);
  s.co = weight.size(0), s.groups = groups;
  s.kh = flat ? 1 : weight.size(2), s.kw = weight.size(-1);
  s.sh = flat ? 1 : stride.front(), s.sw = stride.back();
  s.ph = flat ? 0 : padding.front(), s.pw = padding.back();
  s.dh = flat ? 1 : dilation.front(), s.dw = dilation.back();
  s.oh = (s.h + 2 * s.ph - s.dh * (s.kh - 1) - 1) / s.sh + 1;
  s.ow = (s.w + 2 * s.pw - s.dw * (s.kw - 1) - 1) / s.sw + 1;
  return s;
}

Tensor convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                   const OptionalTensor& mean, const OptionalTensor& var, double eps,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   int64_t groups, const OptionalTensor& before, const OptionalTensor& times,
                   const OptionalTensor& after, int64_t act, double a, double b, bool winograd) {
  const Tensor image = as_image(x);
  const auto s = shape_of(image, weight, stride, padding, dilation, groups);
  const auto format = at::MemoryFormat::ChannelsLast;
  Tensor out = at::empty({s.n, s.co, s.oh, s.ow}, image.options().memory_format(format));
  if (out.numel() != 0) {
    const auto beside = [&](const OptionalTensor& given) {
      return given.has_value() ? OptionalTensor(as_image(*given)) : given;
    };
    const Beside left(beside(before), format), factor(beside(times), format),
        right(beside(after), format);
    const Norm norm{or_undefined(norm_weight), or_undefined(norm_bias), or_undefined(mean),
                    or_undefined(var), eps};
    const auto computed = [&](bool by_winograd) {
      const auto packed = packed_convolution(weight, or_undefined(bias), norm, s, by_winograd);
      const float* bias_data = packed->bias.empty() ? nullptr : packed->bias.data();
      const auto epilogue = epilogue_of(bias_data, left, factor, right, s.co, act, a, b);
      const float* from = image.const_data_ptr<float>();
      float* to = out.mutable_data_ptr<float>();
      if (by_winograd)
        return winograd_conv(s, from, packed->weight.data(), to, epilogue, threads());
      conv(s, from, packed->weight.data(), to, epilogue, threads());
      return true;
    };
    if (!winograd || !computed(true)) computed(false);
    count(kConvolution);
  }
  return x.dim() == 3 ? out.squeeze(2) : out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def(
      "openmp_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, "
      "Tensor? norm_bias, Tensor? mean, Tensor? var, float eps, int[] stride, int[] padding, "
      "int[] dilation, int groups, Tensor? before, Tensor? times, Tensor? after, int act, float a, "
      "float b, bool winograd=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_convolution", convolution);
}

}  // namespace kd
