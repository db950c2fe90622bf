// Convolutions as a graph describes them, one behind the other, on images channels last.
#pragma once

#include "conv_pair.h"
#include "convolution_norm.h"
#include "image_tensors.h"
#include "weights.h"
#include "winograd.h"

namespace kd {

inline PackedPtr packed_convolution(const Tensor& weight, const Tensor& bias, const Norm& norm,
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
inline Sides sides_of(at::IntArrayRef padding, bool flat) {
  if (flat) return {0, padding[(padding.size() - 1) / 2], 0, padding.back()};
  if (padding.size() == 4) return {padding[0], padding[1], padding[2], padding[3]};
  return {padding.front(), padding.back(), padding.front(), padding.back()};
}

// A 1-D convolution is a 2-D one on images with one row.
inline ConvShape shape_of(at::IntArrayRef image, const Tensor& weight, at::IntArrayRef stride,
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

// What the last epilogue reads beside the output, as the graph gives it.
struct Operands {
  OptionalTensor before, times, after;

  // Those of some of the images.
  Operands of(int64_t first, int64_t images) const {
    const auto part = [&](const OptionalTensor& whole) {
      return whole.has_value() ? OptionalTensor(whole->narrow(0, first, images)) : whole;
    };
    return {part(before), part(times), part(after)};
  }
};

// The same, lying as the output does.
struct Beside3 {
  Beside before, times, after;

  template <class Lay>
  Beside3(const Operands& given, at::MemoryFormat format, const Lay& lay)
      : before(laid(given.before, lay), format), times(laid(given.times, lay), format),
        after(laid(given.after, lay), format) {}

 private:
  template <class Lay>
  static OptionalTensor laid(const OptionalTensor& given, const Lay& lay) {
    return given.has_value() ? OptionalTensor(lay(image_of(*given))) : given;
  }
};

inline ConvShape shape_of(at::IntArrayRef image, const Layer& layer) {
  return shape_of(image, layer.weight, layer.stride, layer.padding, layer.dilation, layer.groups);
}

inline Tensor images_for(const ConvShape& s, const Tensor& like) {
  return at::empty({s.n, s.co, s.oh, s.ow}, like.options().memory_format(kChannelsLast));
}

// A convolution with its weights at hand.
struct Ready {
  PackedPtr packed;
  ConvStage stage;

  Ready(const Layer& layer, const ConvShape& shape, bool winograd, const Beside3* beside)
      : packed(packed_convolution(layer.weight, layer.bias, layer.norm, shape, winograd)) {
    static const Beside none(std::nullopt, kChannelsLast);
    const float* bias = packed->bias.empty() ? nullptr : packed->bias.data();
    stage = {shape, packed->weight.data(),
             epilogue_of(bias, beside ? beside->before : none, beside ? beside->times : none,
                         beside ? beside->after : none, shape.co, layer.act, layer.a, layer.b)};
  }
};

inline Tensor convolved(const Layer& layer, const Tensor& image, const Beside3* beside) {
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
  return out;
}

// Both at once, or nothing if that does not pay.
inline std::optional<Tensor> convolved_together(const Layer& one, const Layer& two,
                                                const Tensor& image, const Beside3* beside) {
  if (one.winograd || two.winograd) return std::nullopt;
  const ConvShape s = shape_of(image.sizes(), one);
  const int64_t between[] = {s.n, s.co, s.oh, s.ow};
  const ConvShape t = shape_of(between, two);
  if (!pair_suits(s, t)) return std::nullopt;
  const Ready first(one, s, false, nullptr), second(two, t, false, beside);
  Tensor out = images_for(t, image);
  conv_pair(first.stage, second.stage, image.const_data_ptr<float>(),
            out.mutable_data_ptr<float>(), threads());
  return out;
}

// Channels last.
inline Tensor all_of(at::ArrayRef<Layer> layers, Tensor image, const Operands& operands) {
  const Beside3 beside(operands, kChannelsLast, channels_last);
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

}  // namespace kd
