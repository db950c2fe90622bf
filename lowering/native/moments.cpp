// Means and variances of BatchNorm, and the sums of its gradient.

#include "moments.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "counters.h"
#include "from_python.h"
#include "tensors.h"

namespace kd {
namespace {

// A thread is worth waking for some 20 microseconds of work.
constexpr double kNumbersPerThread = 1 << 16;

at::MemoryFormat channels_last(const Tensor& x) {
  return x.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
}

bool lies_in_rows(const Tensor& x) {
  return x.dim() > 3 && !x.is_contiguous() && x.is_contiguous(channels_last(x));
}

Tensor laid(const Tensor& x, bool in_rows) {
  return in_rows ? x.contiguous(channels_last(x)) : x.contiguous();
}

Channels channels_of(const Tensor& x, bool in_rows) {
  const int64_t channels = x.size(1), places = x.numel() / (x.size(0) * channels);
  if (in_rows) return {x.size(0) * places, channels, 1};
  return {x.size(0), channels, places};
}

int team_for(const Tensor& x) {
  return useful_threads(threads(), static_cast<double>(x.numel()), kNumbersPerThread);
}

// One number for each channel, and 1 for each other dimension.
std::vector<int64_t> broadcast_sizes(const Tensor& x) {
  std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
  sizes[1] = x.size(1);
  return sizes;
}

// The variance, not corrected, and the mean.
std::tuple<Tensor, Tensor> moments(const Tensor& given) {
  const Tensor mean = at::empty(broadcast_sizes(given), given.options());
  const Tensor var = at::empty_like(mean);
  count(kBatchNorm);
  if (given.numel() == 0) return {var.fill_(NAN), mean.fill_(NAN)};
  const bool in_rows = lies_in_rows(given);
  const Tensor x = laid(given, in_rows);
  const Channels s = channels_of(x, in_rows);
  const float* const numbers = x.const_data_ptr<float>();
  const auto found = over_channels<Moments>(
      s, team_for(x),
      [&](Moments* into, int64_t channel, Range rows, int64_t channels) {
        moments_of_rows(into, numbers + channel, s.channels, rows, channels);
      },
      [&](Moments* into, int64_t, int64_t at, const Lines& lines) {
        moments_of_lines(into, numbers + at, lines);
      });
  float* const means = mean.mutable_data_ptr<float>();
  float* const vars = var.mutable_data_ptr<float>();
  for (int64_t c = 0; c < s.channels; c++) {
    Moments all;
    for (size_t i = static_cast<size_t>(c); i < found.size(); i += static_cast<size_t>(s.channels))
      all.add(found[i].count, found[i].mean, found[i].squares);
    means[c] = static_cast<float>(all.mean);
    vars[c] = static_cast<float>(all.squares / all.count);
  }
  return {var, mean};
}

// Sums of grad and of grad * (x - mean), one for each channel.
std::tuple<Tensor, Tensor> norm_sums(const Tensor& given_grad, const Tensor& given,
                                     const Tensor& given_mean) {
  const Tensor sum = at::empty({given.size(1)}, given.options()), dot = at::empty_like(sum);
  count(kBatchNorm);
  if (given.numel() == 0) return {sum.zero_(), dot.zero_()};
  const bool in_rows = lies_in_rows(given_grad);
  const Tensor grad = laid(given_grad, in_rows), x = laid(given, in_rows);
  const Tensor mean = given_mean.contiguous();
  const Channels s = channels_of(x, in_rows);
  const float *const gs = grad.const_data_ptr<float>(), *const xs = x.const_data_ptr<float>();
  const float* const ms = mean.const_data_ptr<float>();
  const auto found = over_channels<Sums>(
      s, team_for(x),
      [&](Sums* into, int64_t channel, Range rows, int64_t channels) {
        sums_of_rows(into, gs + channel, xs + channel, ms + channel, s.channels, rows, channels);
      },
      [&](Sums* into, int64_t channel, int64_t at, const Lines& lines) {
        sums_of_lines(into, gs + at, xs + at, ms[channel], lines);
      });
  for (int64_t c = 0; c < s.channels; c++) {
    Sums all;
    for (size_t i = static_cast<size_t>(c); i < found.size(); i += static_cast<size_t>(s.channels))
      all.grad += found[i].grad, all.dot += found[i].dot;
    sum.mutable_data_ptr<float>()[c] = static_cast<float>(all.grad);
    dot.mutable_data_ptr<float>()[c] = static_cast<float>(all.dot);
  }
  return {sum, dot};
}

const from_python::Offered offered[] = {
    {"openmp_moments", from_python::entry<moments>},
    {"openmp_norm_sums", from_python::entry<norm_sums>},
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  // Images as they lie, whichever way that is.
  const std::vector<at::Tag> as_it_lies{at::Tag::flexible_layout};
  library.def("openmp_moments(Tensor x) -> (Tensor, Tensor)", as_it_lies);
  // No tag: what lowering/image_layouts.py tells Inductor counts.
  library.def("openmp_norm_sums(Tensor grad, Tensor x, Tensor mean) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_moments", moments);
  library.impl("openmp_norm_sums", norm_sums);
}

}  // namespace kd
