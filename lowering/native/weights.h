// Weights in the form that the kernels want: made once, and made again when a weight changed.
//
// A form is keyed by the weight tensor and by what was done to it. On each use every tensor that it
// was made from is compared with what it was: version counter, storage, sizes and strides (which
// `weight.data = weight.data.t()` changes alone), and two words of its values that are not zero (writes
// through `weight.data` move nothing else).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "lent.h"
#include "pages.h"

namespace kd {

// Floats, aligned to a cache line at least.
class Buffer {
 public:
  explicit Buffer(int64_t size) : size_(size) {
    const size_t bytes = static_cast<size_t>(size) * sizeof(float);
    if (bytes >= kHugePage) {
      pages_ = pages_for(bytes);
      data_ = static_cast<float*>(take_pages(pages_));
    } else {
      data_ = static_cast<float*>(std::aligned_alloc(64, rounded_up(bytes + 1, 64)));
    }
    TORCH_CHECK_WITH(OutOfMemoryError, data_ != nullptr, "no memory for ", bytes, " bytes");
  }
  ~Buffer() {
    if (pages_ != 0)
      give_pages_back(data_, pages_);
    else
      std::free(data_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  float* data_;
  int64_t size_;
  size_t pages_ = 0;  // bytes that came from the system; 0: from malloc
};

struct Packed {
  explicit Packed(int64_t size) : weight(size) {}
  Buffer weight;
  std::vector<float> bias;   // empty: the caller's own bias is used as it is
  std::vector<float> scale;  // of outputs, where it is not in the weight
  at::Tensor of_library;     // in the form of a library that torch calls
  int64_t bytes_of_library = 0;
};

using PackedPtr = std::shared_ptr<const Packed>;

// One tensor that a packed form was made from.
class Source {
 public:
  explicit Source(const at::Tensor& tensor)
      : impl_(tensor.getIntrusivePtr()),
        raw_(tensor.unsafeGetTensorImpl()),
        version_(raw_->version_counter().current_version()),
        data_(tensor.const_data_ptr()),
        sizes_(tensor.sizes()),
        strides_(tensor.strides()) {
    const bool dense = tensor.is_non_overlapping_and_dense();
    const int64_t words = dense ? static_cast<int64_t>(tensor.nbytes()) / 4 : 1;
    first_at_ = not_zero(0, words);
    first_ = word(first_at_);
    second_at_ = not_zero(words > 3 ? words - words / 3 : 0, words);
    second_ = word(second_at_);
  }

  bool unchanged(const at::Tensor& tensor) const {
    return tensor.unsafeGetTensorImpl() == raw_ &&
           raw_->version_counter().current_version() == version_ &&
           tensor.const_data_ptr() == data_ && tensor.sizes().equals(sizes_) &&
           tensor.strides().equals(strides_) && word(first_at_) == first_ &&
           word(second_at_) == second_;
  }
  bool gone() const { return impl_.expired(); }

 private:
  // The first word from there on, among some, that a factor changes.
  int64_t not_zero(int64_t from, int64_t words) const {
    constexpr int64_t kSome = 256;
    for (int64_t at = from; at < std::min(words, from + kSome); at++)
      if (word(at) != 0) return at;
    return from;
  }
  uint32_t word(int64_t index) const {
    uint32_t value;
    std::memcpy(&value, static_cast<const char*>(data_) + 4 * index, sizeof value);
    return value;
  }

  c10::weak_intrusive_ptr<c10::TensorImpl> impl_;  // keeps the address from being used again
  c10::TensorImpl* raw_;
  uint32_t version_;
  const void* data_;
  c10::DimVector sizes_, strides_;
  int64_t first_at_ = 0, second_at_ = 0;
  uint32_t first_ = 0, second_ = 0;
};

class Weights {
 public:
  // The packed form of `tensors[0]`, which `make` builds from all of them. `recipe` tells apart
  // several forms of one weight. Undefined tensors are skipped.
  template <class Make>
  PackedPtr get(at::ArrayRef<Lent> tensors, uint64_t recipe, const Make& make) {
    if (!trackable(tensors)) return make();
    const Key key{tensors[0]->unsafeGetTensorImpl(), recipe};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = entries_.find(key);
      if (found != entries_.end() && found->second.current(tensors)) return found->second.packed;
    }
    Entry entry;
    for (const Lent& tensor : tensors) {
      if (tensor.defined()) entry.sources.emplace_back(tensor);
    }
    entry.packed = make();
    const PackedPtr result = entry.packed;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = entries_.begin(); it != entries_.end();) {
      it = it->second.gone() ? entries_.erase(it) : std::next(it);
    }
    entries_.insert_or_assign(key, std::move(entry));
    made_++;
    return result;
  }

  void forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_.clear();
  }

  int64_t bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t sum = 0;
    for (const auto& entry : entries_) sum += bytes_of(*entry.second.packed);
    return sum;
  }

  int64_t made() const { return made_; }

 private:
  static int64_t bytes_of(const Packed& packed) {
    return packed.weight.size() * 4 + packed.bytes_of_library;
  }

  struct Key {
    const void* weight;
    uint64_t recipe;
    bool operator==(const Key& other) const {
      return weight == other.weight && recipe == other.recipe;
    }
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      return reinterpret_cast<size_t>(key.weight) / 64 * 0x9E3779B97F4A7C15ull ^ key.recipe;
    }
  };
  struct Entry {
    std::vector<Source> sources;
    PackedPtr packed;

    bool current(at::ArrayRef<Lent> tensors) const {
      size_t index = 0;
      for (const Lent& tensor : tensors) {
        if (!tensor.defined()) continue;
        if (index == sources.size() || !sources[index++].unchanged(tensor)) return false;
      }
      return index == sources.size();
    }
    bool gone() const { return sources.front().gone(); }
  };

  // An inference tensor has no version counter, so a change in place could not be seen.
  static bool trackable(at::ArrayRef<Lent> tensors) {
    for (const Lent& tensor : tensors) {
      if (tensor.defined() && (tensor->is_inference() || tensor->nbytes() < 4)) return false;
    }
    return true;
  }

  std::mutex mutex_;
  std::unordered_map<Key, Entry, Hash> entries_;
  int64_t made_ = 0;
};

// Never destroyed: compiled graphs may still run while the interpreter shuts down.
inline Weights& weights() {
  static Weights* all = new Weights;
  return *all;
}

}  // namespace kd
