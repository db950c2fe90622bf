// Layers as a text: what a graph knows of them ahead. A list of some thousand numbers would be taken
// apart by torch in every call; a text is copied, and read once.
#pragma once

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "layers.h"

namespace kd {

// Of each layer: which of its tensors there are (a bit each), integers, and numbers as the bits of
// doubles; all in decimal, in the order of `Step.text` in lowering/convolution_steps.py.
class LayerText {
 public:
  static constexpr size_t kTensors = 6, kIntegers = 19, kNumbers = 3;

  explicit LayerText(const std::string& text) {
    constexpr size_t each = 1 + kIntegers + kNumbers;
    const char* at = text.c_str();
    for (char* end; *at != '\0'; at = end) {
      numbers_.push_back(std::strtoll(at, &end, 10));
      TORCH_CHECK(end != at, "layers are described by integers, not by ", at);
      while (*end == ' ') end++;
    }
    TORCH_CHECK(!numbers_.empty() && numbers_.size() % each == 0, "each layer is described by ", each,
                " integers, and here are ", numbers_.size());
    for (size_t i = 0; i < numbers_.size(); i += each) {
      masks_.push_back(numbers_[i]);
      tensors_ += static_cast<size_t>(__builtin_popcountll(static_cast<uint64_t>(numbers_[i])));
    }
  }

  size_t tensors() const { return tensors_; }

  // Refer to this text, which has to stay.
  std::vector<Layer> layers(at::TensorList tensors) const {
    std::vector<Layer> made;
    made.reserve(masks_.size());
    const at::Tensor* next = tensors.data();
    const int64_t* at = numbers_.data();
    for (size_t i = 0; i < masks_.size(); i++, at += 1 + kIntegers + kNumbers) {
      Lent own[kTensors];
      for (size_t which = 0; which < kTensors; which++)
        if (masks_[i] >> which & 1) own[which] = *next++;
      const int64_t* n = at + 1;
      const auto list = [&](size_t first, size_t count) { return at::IntArrayRef(n + first, count); };
      made.push_back({own[0], own[1], {own[2], own[3], own[4], own[5], real(n[kIntegers])},
                      list(0, 2), list(2, 4), list(6, 2), n[8], n[9], real(n[kIntegers + 1]),
                      real(n[kIntegers + 2]), static_cast<Way>(n[10]), n[11], n[12], n[13], n[14], n[15],
                      static_cast<Kind>(n[16]), {n[17], n[18]}});
    }
    return made;
  }

  // Of a text that was read before, the same object. Texts are as many as there are graphs, and are
  // looked for without being copied.
  static const LayerText& of(std::string_view text) {
    static std::mutex mutex;
    static auto* known = new std::map<std::string, LayerText, std::less<>>;
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = known->find(text);
    if (found == known->end()) {
      const std::string own(text);
      found = known->try_emplace(own, own).first;
    }
    return found->second;
  }

 private:
  static double real(int64_t bits) {
    double number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }

  std::vector<int64_t> numbers_, masks_;
  size_t tensors_ = 0;
};

}  // namespace kd
