// What Python asks of the tensors that it made something from.

#include "watched.h"

#include <torch/library.h>

namespace kd {
namespace {

int64_t watch(at::TensorList tensors) { return watched().add(tensors); }
bool unchanged(int64_t number, at::TensorList tensors) {
  return watched().unchanged(number, tensors);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def("watch(Tensor[] tensors) -> int", watch);
  library.def("unchanged(int number, Tensor[] tensors) -> bool", unchanged);
}

}  // namespace kd
