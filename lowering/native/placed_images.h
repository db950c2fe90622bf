// Where images lie: several may be the channels of one, which nobody has to put together then.
#pragma once

#include <ATen/EmptyTensor.h>

#include <vector>

#include "elements.h"
#include "image_tensors.h"
#include "kept_in_halves.h"

namespace kd {

// Channels last. Some channels of a larger image lie as they do there.
struct PlacedImage {
  Tensor memory;
  float* data = nullptr;
  void* halves = nullptr;  // instead of floats
  std::array<int64_t, 4> sizes{};
  int64_t ld = 0;  // numbers from a pixel to the next

  PlacedImage() = default;
  explicit PlacedImage(const Tensor& whole, bool written)
      : memory(whole),
        sizes{whole.size(0), whole.size(1), whole.size(2), whole.size(3)},
        ld(sizes[1]) {
    void* const at = written ? whole.mutable_data_ptr() : const_cast<void*>(whole.const_data_ptr());
    if (whole.scalar_type() == at::kFloat)
      data = static_cast<float*>(at);
    else
      halves = at;
  }

  template <class Element>
  Element* numbers() const {
    if constexpr (std::is_same_v<Element, float>)
      return data;
    else
      return static_cast<Element*>(halves);
  }

  int64_t channels() const { return sizes[1]; }
  int64_t pixels() const { return sizes[0] * sizes[2] * sizes[3]; }

  // Of an image of floats.
  PlacedImage some(int64_t first, int64_t count) const {
    TORCH_CHECK(first >= 0 && count >= 0 && first + count <= channels(), "channels ", first, " to ",
                first + count, " of an image that has ", channels());
    PlacedImage part = *this;
    part.data += first;
    part.sizes[1] = count;
    return part;
  }
};

// The values that layers read: images that are given, then what each layer makes.
class Values {
 public:
  Values(at::ArrayRef<Layer> layers, const std::vector<Tensor>& given, KeptInHalves kept)
      : layers_(layers), given_(given.size()), kept_(std::move(kept)) {
    for (const Tensor& image : given) values_.emplace_back(image, false);
    values_.resize(given_ + layers.size());
    readers_.resize(values_.size());
    part_.resize(values_.size(), kNowhere);
    first_part_.resize(layers.size());
    last_part_.resize(layers.size());
    wholes_.resize(layers.size());
    for (size_t i = 0; i < layers.size(); i++) note(i);
  }

  const PlacedImage& operator[](int64_t value) const { return values_[value]; }
  int64_t number_of(size_t layer) const { return static_cast<int64_t>(given_ + layer); }
  int64_t readers(int64_t value) const { return readers_[value]; }

  // For what a layer makes.
  PlacedImage& make(size_t layer, const std::array<int64_t, 4>& sizes) {
    return values_[number_of(layer)] = place(number_of(layer), sizes);
  }
  void alias(size_t layer, const PlacedImage& image) { values_[number_of(layer)] = image; }

  // Whether a layer may put what it makes where this image is: no other one reads that, it is no part of
  // a larger image, and the layer has not been told where to put it.
  bool may_be_written_over(int64_t value, size_t layer, const std::array<int64_t, 4>& sizes) const {
    const int64_t made = number_of(layer);
    if (value < number_of(0) || readers_[value] != 1 || part_[made] != kNowhere) return false;
    const PlacedImage& image = values_[value];
    return image.sizes == sizes && image.memory.sizes() == at::IntArrayRef(sizes) &&
           image.memory.use_count() == 1 && !kept_[value] && !kept_[made];
  }

  // The larger image that a part of these sizes belongs to.
  PlacedImage whole_of(size_t part, const std::array<int64_t, 4>& sizes) {
    const size_t first = first_part_[part];
    PlacedImage& whole = wholes_[first];
    const auto& [n, c, h, w] = sizes;
    if (!whole.memory.defined())
      whole = place(number_of(last_part_[first]), {n, layers_[first].channels(), h, w});
    TORCH_CHECK(whole.sizes[0] == n && whole.sizes[2] == h && whole.sizes[3] == w &&
                    whole.channels() == layers_[part].channels(),
                "parts of one image have different sizes");
    return whole;
  }
  // Whether a part was made where it belongs.
  bool in_place(size_t part) const {
    return part_[layers_[part].image] == static_cast<int64_t>(part);
  }

  // Forgets what this was the last one to read.
  void release(size_t layer) {
    for (const int64_t value : layers_[layer].reads())
      if (value >= 0 && --readers_[value] == 0) values_[value] = PlacedImage();
    if (layers_[layer].is(Kind::part) && last_part_[first_part_[layer]] == layer)
      wholes_[first_part_[layer]] = PlacedImage();
  }

 private:
  static constexpr int64_t kNowhere = -1;

  void note(size_t index) {
    const Layer& layer = layers_[index];
    for (const int64_t value : layer.reads())
      if (value >= 0) readers_[value]++;
    if (!layer.is(Kind::part)) return;
    const bool continues = layer.before >= 0;
    const int64_t previous = layer.before - static_cast<int64_t>(given_);
    TORCH_CHECK(!continues || (previous >= 0 && layers_[previous].is(Kind::part)),
                "a part follows what is none: ", layer.before);
    first_part_[index] = continues ? first_part_[previous] : index;
    last_part_[first_part_[index]] = index;
    if (is_made(layer.image) && part_[layer.image] == kNowhere)
      part_[layer.image] = static_cast<int64_t>(index);
  }

  // By a layer, and not just another name for a part of some image.
  bool is_made(int64_t value) const {
    return value >= number_of(0) && !layers_[value - number_of(0)].is(Kind::slice);
  }

  PlacedImage place(int64_t value, const std::array<int64_t, 4>& sizes) {
    if (part_[value] == kNowhere) {
      const auto dtype = kept_.dtype(value);
      return PlacedImage(Tensor(at::detail::empty_cpu(sizes, dtype, false, kChannelsLast)), true);
    }
    const auto part = static_cast<size_t>(part_[value]);
    return whole_of(part, sizes).some(layers_[part].first_channel(), sizes[1]);
  }

  at::ArrayRef<Layer> layers_;
  size_t given_;
  KeptInHalves kept_;
  std::vector<PlacedImage> values_;
  std::vector<int64_t> readers_;
  std::vector<int64_t> part_;  // of each value: the layer that wants it as a part
  std::vector<size_t> first_part_, last_part_;  // of each part: the first of its image; of that, the last
  std::vector<PlacedImage> wholes_;             // of each first part
};

}  // namespace kd
