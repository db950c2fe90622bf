// Uniform and normal random numbers for compiled graphs, from a seed that the graph drew.

#include "random.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "box_muller.h"
#include "counters.h"
#include "tensors.h"

namespace kd {
namespace {

// A thread is worth waking for some 20 microseconds of work.
constexpr double kNumbersPerThread = 1 << 14;

Tensor random(at::IntArrayRef size, const Tensor& seed, bool normal) {
  const Tensor out = at::empty(size, seed.options().dtype(at::kFloat));
  const uint64_t key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  float* const numbers = out.mutable_data_ptr<float>();
  const int64_t count_of = out.numel();
  const int team = useful_threads(threads(), static_cast<double>(count_of), kNumbersPerThread);
  if (normal)
    draw(numbers, count_of, team, [&](float* to, uint64_t at) { draw_normal(to, at, key); });
  else
    draw(numbers, count_of, team, [&](float* to, uint64_t at) { draw_uniform(to, at, key); });
  count(kRandom);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def("openmp_random(SymInt[] size, Tensor seed, bool normal) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) { library.impl("openmp_random", random); }

}  // namespace kd
