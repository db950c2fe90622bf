// Torch's tensors as images, channels last or in rows.
#pragma once

#include <ATen/ops/empty.h>

#include "channel_order.h"
#include "tensors.h"

namespace kd {

constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

inline Images extents_of(const Tensor& image) {
  return {image.size(0), image.size(1), image.size(2) * image.size(3)};
}

inline Tensor reordered(const Tensor& image, at::MemoryFormat format) {
  Tensor made = at::empty(image.sizes(), image.options().memory_format(format));
  reorder_channels(extents_of(image), image.const_data_ptr<float>(),
                   made.mutable_data_ptr<float>(), format == kChannelsLast, threads());
  return made;
}

// `to` would ask torch in every call.
inline Tensor in_numbers(const Tensor& image, at::ScalarType dtype) {
  return image.scalar_type() == dtype ? image : image.to(dtype);
}

// Lines are images with one row.
inline Tensor image_of(const Tensor& x) { return x.dim() == 3 ? x.unsqueeze(2) : x; }

inline bool lies_channels_last(const Tensor& image) { return image.is_contiguous(kChannelsLast); }

inline Tensor channels_last(const Tensor& image) {
  if (lies_channels_last(image)) return image;
  return reordered(image.contiguous(), kChannelsLast);
}

inline Tensor in_rows(const Tensor& image) {
  if (image.is_contiguous()) return image;
  return lies_channels_last(image) ? reordered(image, at::MemoryFormat::Contiguous)
                                   : image.contiguous();
}

}  // namespace kd
