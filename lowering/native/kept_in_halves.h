// Which images that layers read and make lie in half precision: those of which only products of such
// numbers are made. All others are floats.
#pragma once

#include "half_convolution.h"
#include "layers.h"

namespace kd {

// As it is wished, where the shape is one for that.
inline Way way_of(const Layer& layer, [[maybe_unused]] const ConvShape& s) {
  if (!by_halves(layer.way)) return layer.way;
#if defined(__AVX512BF16__)
  if (halves::suits(s)) return layer.way;
#endif
  return Way::plain;
}

class KeptInHalves {
 public:
  // `given`: which of the images that are given may be; `result`: whether the last one may.
  KeptInHalves(at::ArrayRef<Layer> layers, const std::vector<bool>& given, bool result)
      : layers_(layers), given_(given.size()), kept_(given) {
    for (const Layer& layer : layers)
      if (layer.way == Way::float16) dtype_ = at::kHalf;
    for (size_t i = 0; i < layers.size(); i++)
      kept_.push_back(may_make(i) && (result || i + 1 < layers.size()));
    for (size_t i = 0; i < layers.size(); i++) note_readers(i);
    while (made_equal()) {
    }
  }

  bool operator[](int64_t value) const { return kept_[value]; }
  at::ScalarType dtype(int64_t value) const { return kept_[value] ? dtype_ : at::kFloat; }

 private:
  // Neighbours of which one is of each channel by itself are computed together, in floats.
  bool by_products(size_t i, size_t neighbour) const {
    if (!multiplies(i)) return false;
    return neighbour >= layers_.size() || !of_each_channel(layers_[neighbour]);
  }
  bool multiplies(size_t i) const {
    const Layer& layer = layers_[i];
    return layer.is_convolution() && by_halves(way_of(layer, sizeless(layer)));
  }
  static bool of_each_channel(const Layer& layer) {
    return layer.is_convolution() && layer.groups > 1 && layer.groups == layer.weight->size(0);
  }
  // Its channels and taps; there is no image yet.
  static ConvShape sizeless(const Layer& layer) {
    return shape_of({1, layer.weight->size(1) * layer.groups, 1, 1}, layer);
  }

  bool may_make(size_t i) const {
    return by_products(i, i - 1) && layers_[i].weight->size(0) % 2 == 0;
  }

  void note_readers(size_t i) {
    const Layer& layer = layers_[i];
    const bool multiplied = by_products(i, i + 1) && layer.factors < 0 &&
                            layer.weight->size(1) % 2 == 0;
    if (!multiplied) kept_[layer.image] = false;
    for (const int64_t value : {layer.before, layer.times, layer.after, layer.factors})
      if (value >= 0 && (value == layer.factors || !multiplies(i))) kept_[value] = false;
  }

  // An epilogue reads and writes numbers of one kind. Says whether something changed.
  bool made_equal() {
    bool changed = false;
    for (size_t i = 0; i < layers_.size(); i++) {
      const Layer& layer = layers_[i];
      const auto made = static_cast<int64_t>(given_ + i);
      bool all = kept_[made];
      for (const int64_t value : {layer.before, layer.times, layer.after})
        all = all && (value < 0 || kept_[value]);
      for (const int64_t value : {made, layer.before, layer.times, layer.after}) {
        if (value < 0 || all || !kept_[value]) continue;
        kept_[value] = false;
        changed = true;
      }
    }
    return changed;
  }

  at::ArrayRef<Layer> layers_;
  size_t given_;
  std::vector<bool> kept_;
  at::ScalarType dtype_ = at::kBFloat16;  // all layers of a graph multiply the same kind
};

}  // namespace kd
