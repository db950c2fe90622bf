// Tensors that Python made something from: have they changed since?
#pragma once

#include <mutex>
#include <unordered_map>
#include <vector>

#include "weights.h"

namespace kd {

class Watched {
 public:
  int64_t add(at::TensorList tensors) {
    std::vector<Source> sources(tensors.begin(), tensors.end());
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.emplace(++last_, std::move(sources));
    return last_;
  }

  bool unchanged(int64_t number, at::TensorList tensors) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = all_.find(number);
    if (found == all_.end() || found->second.size() != tensors.size()) return false;
    for (size_t i = 0; i < tensors.size(); i++)
      if (!found->second[i].unchanged(tensors[i])) return false;
    return true;
  }

  void remove(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.erase(number);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::vector<Source>> all_;
  int64_t last_ = 0;
};

// Never destroyed: Python lets go of what it watches while the interpreter shuts down.
inline Watched& watched() {
  static Watched* all = new Watched;
  return *all;
}

}  // namespace kd
