// Layers that read each other, one behind the other, on images channels last.
#pragma once

#include "conv_by_lines.h"
#include "image_passes.h"
#include "weights.h"
#include "windows.h"
#include "winograd.h"

namespace kd {

inline PackedPtr packed_convolution(const Layer& layer, const ConvShape& shape, Way way) {
  const Tensor &weight = layer.weight, &bias = layer.bias;
  const Norm& norm = layer.norm;
  const uint64_t form = static_cast<uint64_t>(shape.groups) * 4 + static_cast<uint64_t>(way);
  const Lent from[] = {weight, bias, norm.weight, norm.bias, norm.mean, norm.var};
  const auto pack = [&] {
    const Tensor floats = as_float(weight.detach());
    const float* const numbers = floats.const_data_ptr<float>();
    FoldedNorm folded(bias, norm, shape.co);
    const auto packed_as = [&](int64_t size, const auto& pack) {
      auto packed = std::make_shared<Packed>(size);
      pack(packed->weight.data());
      packed->bias = std::move(folded.bias);
      return packed;
    };
#if defined(__AVX512BF16__)
    if (by_halves(way)) {
      const auto pack_halves = way == Way::float16 ? halves::pack_convolution<Half>
                                                   : halves::pack_convolution<BFloat16>;
      auto packed = packed_as(halves::convolution_packed_size(shape), [&](float* to) {
        pack_halves(to, numbers, shape, threads());
      });
      packed->scale = std::move(folded.scale);  // weights that are rounded already stay what they are
      return packed;
    }
#endif
    if (way == Way::winograd)
      return packed_as(winograd::packed_size_of(shape), [&](float* to) {
        winograd::pack(to, numbers, folded.scales(), shape, threads());
      });
    return packed_as(conv_packed_size(shape), [&](float* to) {
      conv_pack(to, numbers, folded.scales(), shape, threads());
    });
  };
  return layer.once ? pack() : weights().get(from, norm.recipe(form), pack);
}

// The factors and shifts of a norm that stands alone.
inline PackedPtr packed_norm(const Norm& norm, int64_t channels) {
  c10::SmallVector<Lent, 4> from;
  uint64_t there = 0;  // a bit each: one tensor alone may be a scale here and a shift there
  for (const Lent& each : {norm.mean, norm.var, norm.weight, norm.bias}) {
    there = there << 1 | each.defined();
    if (!each.defined()) continue;
    TORCH_CHECK(each->numel() == channels || (each->numel() == 1 && !norm.mean.defined()),
                "a tensor of ", each->sizes(), " for a norm of ", channels, " channels");
    from.push_back(each);
  }
  const uint64_t form = (1ull << 42) + static_cast<uint64_t>(channels) * 16 + there;
  return weights().get(from, norm.recipe(form), [&] {
    FoldedNorm folded(Tensor(), norm, channels);
    auto packed = std::make_shared<Packed>(channels);
    std::copy(folded.scale.begin(), folded.scale.end(), packed->weight.data());
    packed->bias = std::move(folded.bias);
    return packed;
  });
}

inline ChannelNorm channel_norm(const PackedPtr& packed) {
  if (packed == nullptr) return {};
  return {packed->weight.data(), packed->bias.data()};
}

inline void check_beside(const Layer& layer, int64_t pixels, int64_t channels,
                         const Values& values) {
  for (const int64_t value : {layer.before, layer.times, layer.after})
    TORCH_CHECK(value < 0 || (values[value].pixels() == pixels && values[value].channels() == channels),
                "an image of ", at::IntArrayRef(values[value].sizes), " beside one of ", channels,
                " channels and ", pixels, " pixels");
}

// Generated code does not compare sizes for us (lowering/input_checks.py).
inline void check(const Layer& layer, const ConvShape& s, const Values& values) {
  TORCH_CHECK(s.groups > 0 && s.co % s.groups == 0 && layer.weight->size(1) * s.groups == s.ci,
              "a convolution of ", s.ci, " channels in ", s.groups, " groups has a weight of ",
              layer.weight->sizes());
  const Norm& norm = layer.norm;
  for (const Lent& each : {layer.bias, norm.weight, norm.bias, norm.mean, norm.var})
    TORCH_CHECK(!each.defined() || each->numel() == s.co, "a tensor of ", each->sizes(), " for ",
                s.co, " outputs");
  check_beside(layer, s.pixels(), s.co, values);
}

inline const float* if_any(const std::vector<float>& numbers) {
  return numbers.empty() ? nullptr : numbers.data();
}

// What lies beside the output and what is done to it. A bias is not there yet.
template <class Element>
EpilogueOf<Element> epilogue_of(const Layer& layer, const Values& values) {
  EpilogueOf<Element> e;
  const auto beside = [&](int64_t value, const Element*& data, int64_t& ld) {
    if (value >= 0) data = values[value].numbers<Element>(), ld = values[value].ld;
  };
  beside(layer.before, e.before, e.ld_before);
  beside(layer.times, e.times, e.ld_times);
  beside(layer.after, e.after, e.ld_after);
  e.act = static_cast<Act>(layer.act);
  e.a = static_cast<float>(layer.a), e.b = static_cast<float>(layer.b);
  return e;
}

// A convolution with its weights at hand.
struct Ready {
  PackedPtr packed;
  ConvStage stage;

  Ready(const Layer& layer, const ConvShape& shape, Way way, const Values& values)
      : packed((check(layer, shape, values),
                packed_convolution(layer, shape, way))) {
    Epilogue e = epilogue_of<float>(layer, values);
    e.bias = if_any(packed->bias);
    stage = {shape, packed->weight.data(), e};
  }
};

// Layers in the order in which they are computed. Neighbours are computed together where that pays,
// and images are freed as soon as nobody is to read them any more.
class Layers {
 public:
  // `given`: channels last, and in halves where they are kept so.
  Layers(at::ArrayRef<Layer> layers, const std::vector<Tensor>& given, const KeptInHalves& kept)
      : layers_(layers), values_(layers, given, kept) {}

  Tensor compute() {
    for (size_t first = 0; first < layers_.size();) {
      const size_t some = from(first);
      for (size_t i = first; i < first + some; i++) values_.release(i);
      first += some;
    }
    return values_[values_.number_of(layers_.size() - 1)].memory;
  }

 private:
  // Computes one, two or three of them, and says how many.
  size_t from(size_t first) {
    switch (layers_[first].kind) {
      case Kind::convolution:
        return convolutions(first);
      case Kind::mean:
        return mean(first);
      case Kind::part:
        return part(first);
      case Kind::slice:
        values_.alias(first, image(first).some(layers_[first].first_channel(),
                                               layers_[first].channels()));
        return 1;
      case Kind::pointwise:
        return pointwise(first);
      case Kind::enlarged:
        enlarge(image(first), made(first, image(first)), threads());
        return 1;
      default:
        return window(first);
    }
  }

  size_t convolutions(size_t first) {
    const size_t behind = how_many_behind(first);
    const ConvShape s = shape(first, image(first));
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
    return layers_[first].way == Way::winograd || layers_[first].factors >= 0 ? 0 : last - first;
  }

  bool is_behind(size_t index) const {
    const Layer& next = layers_[index + 1];
    return next.is_convolution() && is_read_alone_by_next(index) &&
           !layers_[index].reads_beside() && next.way != Way::winograd && next.factors < 0;
  }

  bool is_read_alone_by_next(size_t index) const {
    const int64_t made = values_.number_of(index);
    return index + 1 < layers_.size() && layers_[index + 1].image == made &&
           values_.readers(made) == 1;
  }

  size_t mean(size_t index) {
    const PlacedImage& x = image(index);
    const PlacedImage& y = made(index, x);
    means_of_pixels(x.data, x.ld, x.sizes[0], x.sizes[2] * x.sizes[3], x.channels(), y.data, y.ld,
                    threads());
    return 1;
  }

  size_t part(size_t index) {
    const PlacedImage& x = image(index);
    const PlacedImage whole = values_.whole_of(index, x.sizes);
    if (!values_.in_place(index))
      copy_pixels(x, whole.some(layers_[index].first_channel(), x.channels()), threads());
    values_.alias(index, whole);
    return 1;
  }

  size_t pointwise(size_t index) {
    const Layer& layer = layers_[index];
    const PlacedImage& x = image(index);
    check_beside(layer, x.pixels(), x.channels(), values_);
    const PackedPtr packed = layer.norm.there() ? packed_norm(layer.norm, x.channels()) : nullptr;
    const Epilogue e = epilogue_of<float>(layer, values_);
    if (packed != nullptr && done_by_next(index, channel_norm(packed), e)) return 2;
    const PlacedImage& y = made_over(index, x.sizes, {layer.image, layer.before, layer.times, layer.after});
    pointwise_pass(x, y, channel_norm(packed), factors_of(index, x), e, threads());
    return 1;
  }

  // A convolution of single pixels can do a norm on the way.
  bool done_by_next(size_t index, const ChannelNorm& norm, const Epilogue& e) {
    const Layer& layer = layers_[index];
    const Limits limits(e);
    if (!limits.enough || layer.reads_beside() || layer.factors >= 0) return false;
    if (!is_read_alone_by_next(index)) return false;
    const Layer& next = layers_[index + 1];
    const PlacedImage& x = image(index);
    if (!next.is_convolution() || next.factors >= 0 || !takes_prologue(shape(index + 1, x)))
      return false;
    one(index + 1, shape(index + 1, x), x, {nullptr, 0, norm, limits.low, limits.high});
    return true;
  }

  // Of the channels of the image that a layer reads.
  ImageFactors factors_of(size_t index, const PlacedImage& x) const {
    if (layers_[index].factors < 0) return {};
    const PlacedImage& factors = values_[layers_[index].factors];
    TORCH_CHECK(factors.pixels() == x.sizes[0] && factors.channels() == x.channels(), "factors of ",
                at::IntArrayRef(factors.sizes), " for an image of ", at::IntArrayRef(x.sizes));
    return {factors.data, factors.ld};
  }

  size_t window(size_t index) {
    const Layer& layer = layers_[index];
    const PlacedImage& x = image(index);
    ConvShape s = shape(index, x);
    const PlacedImage& y = made(index, x);
    s.ldy = y.ld;
    if (layer.is(Kind::largest))
      windows<Largest>(s, x.data, y.data, false, threads());
    else
      windows<Average>(s, x.data, y.data, layer.is(Kind::average), threads());
    return 1;
  }

  size_t one(size_t index, const ConvShape& s) {
    const Layer& layer = layers_[index];
    TORCH_CHECK(layer.factors < 0 || takes_prologue(s),
                "factors of channels are for ungrouped convolutions of single pixels");
    const ImageFactors factors = factors_of(index, image(index));
    Prologue before;
    before.factors = factors.data, before.ld_factors = factors.ld;
    one(index, s, image(index), before);
    return 1;
  }

  void one(size_t index, ConvShape s, const PlacedImage& x, const Prologue& before) {
    const Layer& layer = layers_[index];
    const Way way = way_of(layer, s);
    const PlacedImage& y =
        way == Way::plain && stores_once(s)
            ? made_over(index, sizes_of(s), {layer.before, layer.times, layer.after})
            : made(index, x);
    s.ldy = y.ld;
    if (s.values() == 0) return;
#if defined(__AVX512BF16__)
    if (way == Way::bfloat16) return by_products_of<BFloat16>(layer, s, x, y, before);
    if (way == Way::float16) return by_products_of<Half>(layer, s, x, y, before);
#endif
    const auto computed = [&](bool winograd) {
      const Ready ready(layer, s, winograd ? Way::winograd : Way::plain, values_);
      const auto& [shape, packed, epilogue] = ready.stage;
      if (winograd) return winograd_conv(shape, x.data, packed, y.data, epilogue, threads());
      conv(shape, x.data, packed, y.data, epilogue, threads(), before);
      return true;
    };
    if (way != Way::winograd || !computed(true)) computed(false);
  }

#if defined(__AVX512BF16__)
  template <class Number>
  void by_products_of(const Layer& layer, const ConvShape& s, const PlacedImage& x,
                      const PlacedImage& y, const Prologue& before) {
    TORCH_CHECK(halves::multiplied<Number>(), type_of<Number>,
                " has no products here: the CPU or the process lacks AMX for it");
    check(layer, s, values_);
    const PackedPtr packed = packed_convolution(layer, s, layer.way);
    const halves::Weighing weighing{packed->weight.data(),
                                  {if_any(packed->scale), if_any(packed->bias)}};
    const auto into = [&](auto* to) {
      const auto e = epilogue_of<std::remove_pointer_t<decltype(to)>>(layer, values_);
      if (x.halves != nullptr)
        halves::convolution(s, x.numbers<const Number>(), weighing, to, e, threads());
      else
        halves::convolution_of_floats<Number>(s, x.data, weighing, to, e, threads(), before);
    };
    if (y.halves != nullptr)
      into(y.numbers<Number>());
    else
      into(y.data);
  }
#endif

  size_t both(size_t index, const ConvShape& s, ConvShape t) {
    const PlacedImage& y = values_.make(index + 1, sizes_of(t));
    t.ldy = y.ld;
    const Ready first(layers_[index], s, Way::plain, values_);
    const Ready second(layers_[index + 1], t, Way::plain, values_);
    const auto pair = lines_suit(s, t, threads()) ? dense_then_depthwise_lines : conv_pair;
    pair(first.stage, second.stage, image(index).data, y.data, threads());
    return 2;
  }

  size_t all_three(size_t index, const ConvShape& s, const ConvShape& t, ConvShape u) {
    const PlacedImage& y = values_.make(index + 2, sizes_of(u));
    u.ldy = y.ld;
    const Ready first(layers_[index], s, Way::plain, values_);
    const Ready second(layers_[index + 1], t, Way::plain, values_);
    const Ready third(layers_[index + 2], u, Way::plain, values_);
    bottleneck(first.stage, second.stage, third.stage, image(index).data, y.data, threads());
    return 3;
  }

  const PlacedImage& image(size_t index) const { return values_[layers_[index].image]; }

  ConvShape shape(size_t index, const PlacedImage& x) const {
    ConvShape s = shape_of(x.sizes, layers_[index]);
    s.ldx = x.ld;
    return s;
  }

  const PlacedImage& made(size_t index, const PlacedImage& x) {
    return values_.make(index, sizes_behind(x.sizes, layers_[index]));
  }

  // In place of one of these images, where each number of that is read just before one is stored: to
  // read one image and write another takes as long as the products of few channels do.
  const PlacedImage& made_over(size_t index, const std::array<int64_t, 4>& sizes,
                               std::initializer_list<int64_t> images) {
    for (const int64_t image : images)
      if (values_.may_be_written_over(image, index, sizes)) {
        values_.alias(index, values_[image]);
        return values_[values_.number_of(index)];
      }
    return values_.make(index, sizes);
  }

  static std::array<int64_t, 4> sizes_of(const ConvShape& s) { return {s.n, s.co, s.oh, s.ow}; }

  at::ArrayRef<Layer> layers_;
  Values values_;
};

}  // namespace kd
