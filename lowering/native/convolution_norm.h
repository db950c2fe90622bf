// A BatchNorm behind a convolution as a factor and a shift of each of its outputs.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "tensors.h"

namespace kd {

struct Norm {
  Lent weight, bias, mean, var;
  double eps;

  // Without statistics it is a factor and a shift of each channel, or of all of them.
  bool there() const { return mean.defined() || weight.defined() || bias.defined(); }

  // One weight may stand before several norms, each of which gives a form of its own.
  uint64_t recipe(uint64_t form) const {
    if (!there()) return form;
    uint64_t bits;
    std::memcpy(&bits, &eps, sizeof bits);
    return ((bits * 31 + reinterpret_cast<uint64_t>(mean->unsafeGetTensorImpl())) * 31 + form) |
           1ull << 63;
  }
};

struct FoldedNorm {
  std::vector<float> scale, bias;  // each empty where there is nothing to do

  FoldedNorm(const Tensor& own_bias, const Norm& norm, int64_t outputs) {
    const Tensor shift = as_float(own_bias);
    if (norm.there()) {
      const Tensor mean = as_float(norm.mean), var = as_float(norm.var);
      const Tensor gain = as_float(norm.weight), offset = as_float(norm.bias);
      scale.resize(outputs);
      bias.resize(outputs);
      for (int64_t c = 0; c < outputs; c++) {
        const auto at = [c](const Tensor& t, double otherwise) {
          if (!t.defined()) return otherwise;
          return static_cast<double>(t.const_data_ptr<float>()[t.numel() == 1 ? 0 : c]);
        };
        const double factor = at(gain, 1.0) / std::sqrt(at(var, 1.0) + norm.eps);
        scale[c] = static_cast<float>(factor);
        bias[c] = static_cast<float>((at(shift, 0.0) - at(mean, 0.0)) * factor + at(offset, 0.0));
      }
    } else if (shift.defined()) {
      const float* data = shift.const_data_ptr<float>();
      bias.assign(data, data + outputs);
    }
  }
  const float* scales() const { return scale.empty() ? nullptr : scale.data(); }
};

}  // namespace kd
