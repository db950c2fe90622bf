// How often each kind of region ran on this thread; Python reads it before and after a graph.
#pragma once

#include <cstdint>

namespace kd {

enum Region : int {
  kLinear,
  kConvolution,
  kAttention,
  kProduct,
  kTransposedConvolution,
  kRecurrent,
  kRandom,
  kBatchNorm,
  kSoftmax,
  kGroupNorm,
  kMklLinear,
  kTrainingConvolution,
  kWeightGradient,
  kInt8Linear,
  kQuantizedConvolution,
  kQuantizedLinear,
  kGroupedLinear,
  kEmbeddingBag,
  kRegions
};

inline int64_t* counters() {
  static thread_local int64_t counts[kRegions] = {};
  return counts;
}

inline void count(Region region, int64_t times = 1) { counters()[region] += times; }

}  // namespace kd
