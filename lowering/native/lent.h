// Tensors that somebody else holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace kd {

// Such a tensor, or none. To count who holds it would cost an access to memory each, of weights that
// were driven out of the caches.
class Lent {
 public:
  Lent() = default;
  Lent(const at::Tensor& tensor) : tensor_(&tensor) {}
  Lent(const std::optional<at::Tensor>& tensor) : tensor_(tensor.has_value() ? &*tensor : &none()) {}
  Lent(at::Tensor&&) = delete;
  Lent(std::optional<at::Tensor>&&) = delete;

  operator const at::Tensor&() const { return *tensor_; }
  const at::Tensor& operator*() const { return *tensor_; }
  const at::Tensor* operator->() const { return tensor_; }
  bool defined() const { return tensor_->defined(); }

 private:
  static const at::Tensor& none() {
    static const auto* const tensor = new at::Tensor;
    return *tensor;
  }

  const at::Tensor* tensor_ = &none();
};

}  // namespace kd
