// Convolutions as a graph describes them, one behind the other, on images channels last.
#pragma once

#include <array>

#include "conv_by_lines.h"
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

// One convolution, as the graph describes it; without a weight, the mean of each channel's pixels. What
// it reads besides its weights are numbers of values: first the images that are given, then what
// each layer makes.
struct Layer {
  static constexpr int64_t kNothing = -1;

  Tensor weight, bias;
  Norm norm;
  at::IntArrayRef stride, padding, dilation;
  int64_t groups, act;
  double a, b;
  bool winograd;
  int64_t image = 0, before = kNothing, times = kNothing, after = kNothing;
  int64_t factors = kNothing;  // of the image's channels

  std::array<int64_t, 5> reads() const { return {image, before, times, after, factors}; }
  bool is_mean() const { return !weight.defined(); }
  bool reads_beside() const { return before >= 0 || times >= 0 || after >= 0; }
};

// What an epilogue reads beside the output, lying as the output does.
struct Beside3 {
  Beside before, times, after;

  Beside3(const Layer& layer, at::ArrayRef<Tensor> values, at::MemoryFormat format)
      : before(value(values, layer.before), format), times(value(values, layer.times), format),
        after(value(values, layer.after), format) {}

 private:
  static OptionalTensor value(at::ArrayRef<Tensor> values, int64_t number) {
    return number < 0 ? OptionalTensor() : OptionalTensor(values[number]);
  }
};

inline ConvShape shape_of(at::IntArrayRef image, const Layer& layer) {
  return shape_of(image, layer.weight, layer.stride, layer.padding, layer.dilation, layer.groups);
}

inline std::array<int64_t, 4> sizes_behind(at::IntArrayRef image, const Layer& layer) {
  if (layer.is_mean()) return {image[0], image[1], 1, 1};
  const ConvShape s = shape_of(image, layer);
  return {s.n, s.co, s.oh, s.ow};
}

inline Tensor images_for(at::IntArrayRef sizes, const Tensor& like) {
  return at::empty(sizes, like.options().memory_format(kChannelsLast));
}

// A convolution with its weights at hand.
struct Ready {
  PackedPtr packed;
  Beside3 beside;
  ConvStage stage;

  Ready(const Layer& layer, const ConvShape& shape, bool winograd, at::ArrayRef<Tensor> values)
      : packed(packed_convolution(layer.weight, layer.bias, layer.norm, shape, winograd)),
        beside(layer, values, kChannelsLast) {
    const float* bias = packed->bias.empty() ? nullptr : packed->bias.data();
    stage = {shape, packed->weight.data(),
             epilogue_of(bias, beside.before, beside.times, beside.after, shape.co, layer.act,
                         layer.a, layer.b)};
  }
};

// Convolutions in the order in which they are computed. Neighbours are computed together where that
// pays, and images are freed as soon as nobody is to read them any more.
class Convolutions {
 public:
  // `given`: channels last.
  Convolutions(at::ArrayRef<Layer> layers, std::vector<Tensor> given)
      : layers_(layers), given_(given.size()), values_(std::move(given)) {
    values_.resize(given_ + layers.size());
    readers_.resize(values_.size());
    for (const Layer& layer : layers)
      for (const int64_t value : layer.reads())
        if (value >= 0) readers_[value]++;
  }

  Tensor compute() {
    for (size_t first = 0; first < layers_.size();) {
      const size_t some = from(first);
      for (size_t i = first; i < first + some; i++) release(layers_[i]);
      first += some;
    }
    return values_.back();
  }

 private:
  // Computes one, two or three of them, and says how many.
  size_t from(size_t first) {
    if (layers_[first].is_mean()) return mean(first);
    const size_t behind = how_many_behind(first);
    const ConvShape s = shape_of(values_[layers_[first].image].sizes(), layers_[first]);
    if (behind >= 1) {
      const ConvShape t = shape_of(sizes_of(s), layers_[first + 1]);
      if (behind >= 2) {
        const ConvShape u = shape_of(sizes_of(t), layers_[first + 2]);
        if (bottleneck_suits(s, t, u, threads())) return all_three(first, s, t, u);
      }
      if (lines_suit(s, t, threads()) || pair_suits(s, t)) return both(first, s, t);
    }
    return one(first, s);
  }

  // How many of the next two read nothing but what the one before them makes, alone.
  size_t how_many_behind(size_t first) const {
    size_t last = first;
    while (last < first + 2 && last + 1 < layers_.size() && is_behind(last)) last++;
    return layers_[first].winograd || layers_[first].factors >= 0 ? 0 : last - first;
  }

  bool is_behind(size_t index) const {
    const int64_t made = static_cast<int64_t>(given_ + index);
    const Layer& next = layers_[index + 1];
    return next.image == made && readers_[made] == 1 && !layers_[index].reads_beside() &&
           !next.winograd && !next.is_mean() && next.factors < 0;
  }

  size_t mean(size_t index) {
    const Tensor& image = values_[layers_[index].image];
    float* to = made(index, sizes_behind(image.sizes(), layers_[index]));
    means_of_pixels(image_of(index), image.size(0), image.size(2) * image.size(3), image.size(1), to,
                    threads());
    return 1;
  }

  size_t one(size_t index, const ConvShape& s) {
    const Layer& layer = layers_[index];
    const float* factors = factors_of(layer, s);
    float* to = made(index, sizes_of(s));
    const auto computed = [&](bool winograd) {
      const Ready ready(layer, s, winograd, values_);
      const auto& [shape, packed, epilogue] = ready.stage;
      if (winograd) return winograd_conv(shape, image_of(index), packed, to, epilogue, threads());
      conv(shape, image_of(index), packed, to, epilogue, threads(), factors);
      return true;
    };
    if (s.values() > 0 && (!layer.winograd || !computed(true))) computed(false);
    return 1;
  }

  size_t both(size_t index, const ConvShape& s, const ConvShape& t) {
    const Ready first(layers_[index], s, false, values_);
    const Ready second(layers_[index + 1], t, false, values_);
    const auto pair = lines_suit(s, t, threads()) ? dense_then_depthwise_lines : conv_pair;
    pair(first.stage, second.stage, image_of(index), made(index + 1, sizes_of(t)), threads());
    return 2;
  }

  size_t all_three(size_t index, const ConvShape& s, const ConvShape& t, const ConvShape& u) {
    const Ready first(layers_[index], s, false, values_);
    const Ready second(layers_[index + 1], t, false, values_);
    const Ready third(layers_[index + 2], u, false, values_);
    bottleneck(first.stage, second.stage, third.stage, image_of(index), made(index + 2, sizes_of(u)),
               threads());
    return 3;
  }

  const float* image_of(size_t index) const {
    return values_[layers_[index].image].const_data_ptr<float>();
  }

  const float* factors_of(const Layer& layer, const ConvShape& s) const {
    if (layer.factors < 0) return nullptr;
    const Tensor& factors = values_[layer.factors];
    TORCH_CHECK(takes_factors(s) && factors.numel() == s.n * s.ci,
                "factors of channels are for ungrouped convolutions of single pixels");
    return factors.const_data_ptr<float>();
  }

  float* made(size_t index, at::IntArrayRef sizes) {
    return (values_[given_ + index] = images_for(sizes, values_[0])).mutable_data_ptr<float>();
  }

  void release(const Layer& layer) {
    for (const int64_t value : layer.reads())
      if (value > 0 && --readers_[value] == 0) values_[value] = Tensor();
  }

  static std::array<int64_t, 4> sizes_of(const ConvShape& s) { return {s.n, s.co, s.oh, s.ow}; }

  at::ArrayRef<Layer> layers_;
  size_t given_;
  std::vector<Tensor> values_;
  std::vector<int64_t> readers_;
};

inline Tensor all_of(at::ArrayRef<Layer> layers, at::ArrayRef<Tensor> given) {
  std::vector<Tensor> laid_out;
  for (const Tensor& image : given) laid_out.push_back(channels_last(image));
  return Convolutions(layers, std::move(laid_out)).compute();
}

}  // namespace kd
