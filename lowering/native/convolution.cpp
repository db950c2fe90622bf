// Convolutions of one and two dimensions, with the BatchNorm behind them folded into the weight.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "conv_pair.h"
#include "convolution_norm.h"
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

PackedPtr packed_convolution(const Tensor& weight, const Tensor& bias, const Norm& norm,
                                 const ConvShape& shape, bool winograd) {
  const uint64_t form = static_cast<uint64_t>(shape.groups) * 2 + winograd;
  const Tensor from[] = {weight, bias, norm.weight, norm.bias, norm.mean, norm.var};
  return weights().get(from, norm.recipe(form), [&] {
    auto packed = std::make_shared<Packed>(winograd ? winograd::packed_size_of(shape)
                                                    : conv_packed_size(shape));
    const Tensor floats = as_float(weight.detach());
    FoldedNorm folded(bias, norm, shape.co);
    (winograd ? winograd::pack : conv_pack)(packed->weight.data(), floats.const_data_ptr<float>(),
                                            folded.scales(), shape, threads());
    packed->bias = std::move(folded.bias);
    return packed;
  });
}

struct Sides {
  int64_t top, left, bottom, right;
};

// One number for both sides of a dimension, or first those before it and then those behind it.
Sides sides_of(at::IntArrayRef padding, bool flat) {
  if (flat) return {0, padding[(padding.size() - 1) / 2], 0, padding.back()};
  if (padding.size() == 4) return {padding[0], padding[1], padding[2], padding[3]};
  return {padding.front(), padding.back(), padding.front(), padding.back()};
}

// A 1-D convolution is a 2-D one on images with one row.
ConvShape shape_of(at::IntArrayRef image, const Tensor& weight, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  const bool flat = weight.dim() == 3;
  ConvShape s{};
  s.n = image[0], s.ci = image[1], s.h = image[2], s.w = image[3];
  s.co = weight.size(0), s.groups = groups;
  s.kh = flat ? 1 : weight.size(2), s.kw = weight.size(-1);
  s.sh = flat ? 1 : stride.front(), s.sw = stride.back();
  const Sides sides = sides_of(padding, flat);
  s.ph = sides.top, s.pw = sides.left;
  s.dh = flat ? 1 : dilation.front(), s.dw = dilation.back();
  s.oh = (s.h + sides.top + sides.bottom - s.dh * (s.kh - 1) - 1) / s.sh + 1;
  s.ow = (s.w + sides.left + sides.right - s.dw * (s.kw - 1) - 1) / s.sw + 1;
  return s;
}

// One convolution, as the graph describes it.
struct Layer {
  Tensor weight, bias;
  Norm norm;
  at::IntArrayRef stride, padding, dilation;
  int64_t groups, act;
  double a, b;
  bool winograd;
};

struct Beside3 {
  Beside before, times, after;

  Beside3(const OptionalTensor& before, const OptionalTensor& times, const OptionalTensor& after)
      : before(laid_out(before), kFormat), times(laid_out(times), kFormat),
        after(laid_out(after), kFormat) {}

 private:
  static constexpr auto kFormat = at::MemoryFormat::ChannelsLast;
  static OptionalTensor laid_out(const OptionalTensor& given) {
    return given.has_value() ? OptionalTensor(as_image(*given)) : given;
  }
};

ConvShape shape_of(at::IntArrayRef image, const Layer& layer) {
  return shape_of(image, layer.weight, layer.stride, layer.padding, layer.dilation, layer.groups);
}

Tensor images_for(const ConvShape& s, const Tensor& like) {
  return at::empty({s.n, s.co, s.oh, s.ow},
                   like.options().memory_format(at::MemoryFormat::ChannelsLast));
}

// A convolution with its weights at hand.
struct Ready {
  PackedPtr packed;
  ConvStage stage;

  Ready(const Layer& layer, const ConvShape& shape, bool winograd, const Beside3* beside)
      : packed(packed_convolution(layer.weight, layer.bias, layer.norm, shape, winograd)) {
    static const Beside none(std::nullopt, at::MemoryFormat::ChannelsLast);
    const float* bias = packed->bias.empty() ? nullptr : packed->bias.data();
    stage = {shape, packed->weight.data(),
             epilogue_of(bias, beside ? beside->before : none, beside ? beside->times : none,
                         beside ? beside->after : none, shape.co, layer.act, layer.a, layer.b)};
  }
};

Tensor convolved(const Layer& layer, const Tensor& image, const Beside3* beside) {
  const ConvShape s = shape_of(image.sizes(), layer);
  Tensor out = images_for(s, image);
  if (out.numel() == 0) return out;
  const float* from = image.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const auto computed = [&](bool winograd) {
    const Ready ready(layer, s, winograd, beside);
    const auto& [shape, packed, epilogue] = ready.stage;
    if (winograd) return winograd_conv(shape, from, packed, to, epilogue, threads());
    conv(shape, from, packed, to, epilogue, threads());
    return true;
  };
  if (!layer.winograd || !computed(true)) computed(false);
  count(kConvolution);
  return out;
}

// Both at once, or nothing if that does not pay.
std::optional<Tensor> convolved_together(const Layer& one, const Layer& two, const Tensor& image,
                                         const Beside3* beside) {
  if (one.winograd || two.winograd) return std::nullopt;
  const ConvShape s = shape_of(image.sizes(), one);
  const int64_t between[] = {s.n, s.co, s.oh, s.ow};
  const ConvShape t = shape_of(between, two);
  if (!pair_suits(s, t)) return std::nullopt;
  const Ready first(one, s, false, nullptr), second(two, t, false, beside);
  Tensor out = images_for(t, image);
  conv_pair(first.stage, second.stage, image.const_data_ptr<float>(),
            out.mutable_data_ptr<float>(), threads());
  count(kConvolution, 2);
  return out;
}

// The last one's epilogue reads what lies beside.
Tensor all_of(at::ArrayRef<Layer> layers, Tensor image, const Beside3& beside) {
  while (!layers.empty()) {
    const auto beside_of = [&](size_t index) {
      return index + 1 == layers.size() ? &beside : nullptr;
    };
    if (layers.size() > 1) {
      if (auto both = convolved_together(layers[0], layers[1], image, beside_of(1))) {
        image = *std::move(both);
        layers = layers.slice(2);
        continue;
      }
    }
    image = convolved(layers[0], image, beside_of(0));
    layers = layers.slice(1);
  }
  return image;
}

Tensor like_input(const Tensor& out, const Tensor& x) { return x.dim() == 3 ? out.squeeze(2) : out; }

Tensor convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                   const OptionalTensor& mean, const OptionalTensor& var, double eps,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   int64_t groups, const OptionalTensor& before, const OptionalTensor& times,
                   const OptionalTensor& after, int64_t act, double a, double b, bool winograd) {
  const Norm norm{or_undefined(norm_weight), or_undefined(norm_bias), or_undefined(mean),
                  or_undefined(var), eps};
  const Layer layer{weight, or_undefined(bias), norm, stride, padding, dilation, groups, act, a, b,
                    winograd};
  return like_input(all_of(layer, as_image(x), {before, times, after}), x);
}

// Tensors, integers and numbers of each layer, one layer after the other.
constexpr size_t kTensors = 6, kIntegers = 11, kNumbers = 3;

Tensor convolutions(const Tensor& x, const c10::List<OptionalTensor>& tensors,
                    at::IntArrayRef integers, at::ArrayRef<double> numbers,
                    const OptionalTensor& before, const OptionalTensor& times,
                    const OptionalTensor& after) {
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
  return like_input(all_of(layers, as_image(x), {before, times, after}), x);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  // So that Inductor writes images as the graph says they lie: channels last.
  const std::vector<at::Tag> as_in_the_graph{at::Tag::needs_fixed_stride_order};
  library.def(
      "openmp_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, "
      "Tensor? norm_bias, Tensor? mean, Tensor? var, float eps, int[] stride, int[] padding, "
      "int[] dilation, int groups, Tensor? before, Tensor? times, Tensor? after, int act, float a, "
      "float b, bool winograd=False) -> Tensor",
      as_in_the_graph);
  library.def(
      "openmp_convolutions(Tensor x, Tensor?[] tensors, int[] integers, float[] numbers, "
      "Tensor? before, Tensor? times, Tensor? after) -> Tensor",
      as_in_the_graph);
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_convolution", convolution);
  library.impl("openmp_convolutions", convolutions);
}

}  // namespace kd
