// Layers one behind the other, for all operators that have some: half a minute for the compiler.

#include "all_layers.h"

#include "convolution_layers.h"
#include "pointwise_rows.h"

namespace kd {
namespace {

// Images of this many floats, inputs and outputs, are worked on at a time, by each thread: what was
// reordered is still in the second cache when it is read.
constexpr int64_t kPortionFloats = 128 * 1024;

PackedPtr packed_pointwise_rows(const Layer& layer, const ConvShape& shape) {
  const uint64_t form = 1ull << 41;
  const Norm& norm = layer.norm;
  const Lent from[] = {layer.weight, layer.bias, norm.weight, norm.bias, norm.mean, norm.var};
  return weights().get(from, norm.recipe(form), [&] {
    auto packed = std::make_shared<Packed>(pointwise_rows_packed_size(shape));
    const Tensor floats = as_float(layer.weight->detach());
    const FoldedNorm folded(layer.bias, norm, shape.co);
    pointwise_rows_pack(packed->weight.data(), floats.const_data_ptr<float>(), folded.scales(),
                        folded.bias.empty() ? nullptr : folded.bias.data(), shape);
    return packed;
  });
}

void pointwise_in_rows(const Layer& layer, const ConvShape& shape,
                              at::ArrayRef<Tensor> given, float* to) {
  const PackedPtr packed = packed_pointwise_rows(layer, shape);
  std::vector<Tensor> rows;
  for (const Tensor& image : given) rows.push_back(in_rows(image));
  const auto beside = [&](int64_t value) {
    return Beside(value < 0 ? OptionalTensor() : rows[value], at::MemoryFormat::Contiguous);
  };
  const Beside before = beside(layer.before), times = beside(layer.times);
  const Beside after = beside(layer.after);
  const Epilogue epilogue = epilogue_of<float>(nullptr, before, times, after, shape.h * shape.w,
                                               layer.act, layer.a, layer.b);
  pointwise_rows(shape, rows.front().const_data_ptr<float>(), packed->weight.data(), to, epilogue,
                 threads());
}

std::vector<int64_t> sizes_of_last(at::ArrayRef<Layer> layers, at::ArrayRef<Tensor> given) {
  std::vector<std::vector<int64_t>> sizes;
  for (const Tensor& image : given) sizes.push_back(image.sizes().vec());
  for (const Layer& layer : layers) {
    const auto made = sizes_behind(sizes[layer.image], layer);
    sizes.emplace_back(made.begin(), made.end());
  }
  return sizes.back();
}

}  // namespace

Tensor all_of(at::ArrayRef<Layer> layers, at::ArrayRef<Tensor> given) {
  const auto dtype = given.front().scalar_type();
  std::vector<bool> may_stay;
  for (const Tensor& image : given) {
    TORCH_CHECK(image.scalar_type() == dtype, "images of ", image.scalar_type(), " and ", dtype,
                " for layers that are computed together");
    may_stay.push_back(dtype != at::kFloat && lies_channels_last(image));
  }
  const KeptInHalves kept(layers, may_stay, dtype != at::kFloat);
  std::vector<Tensor> laid_out;
  for (const Tensor& image : given) {
    const bool stays = kept[static_cast<int64_t>(laid_out.size())];
    laid_out.push_back(stays ? image : channels_last(in_numbers(image, at::kFloat)));
  }
  return in_numbers(Layers(layers, laid_out, kept).compute(), dtype);
}

Tensor all_in_rows(at::ArrayRef<Layer> layers, at::ArrayRef<Tensor> given) {
  if (const auto dtype = given.front().scalar_type(); dtype != at::kFloat) {
    std::vector<Tensor> floats;
    for (const Tensor& image : given) floats.push_back(image.to(at::kFloat));
    return all_in_rows(layers, floats).to(dtype);
  }
  const Tensor& image = given.front();
  Tensor out = at::empty(sizes_of_last(layers, given),
                         image.options().memory_format(at::MemoryFormat::Contiguous));
  if (out.numel() == 0) return out;
  float* to = out.mutable_data_ptr<float>();
  const Layer& first = layers.front();
  if (layers.size() == 1 && first.factors < 0 && image.is_contiguous()) {
    if (const ConvShape s = shape_of(image.sizes(), first); pointwise_rows_suits(s)) {
      pointwise_in_rows(first, s, given, to);
      return out;
    }
  }
  const int64_t images = image.size(0), each = (image.numel() + out.numel()) / images;
  // Several are not divided: what they compute together may depend on how many images there are, and
  // nothing is to depend on the number of threads.
  const bool divided = layers.size() == 1;
  const int64_t portion =
      divided ? std::max<int64_t>(1, threads() * kPortionFloats / each) : images;
  for (int64_t begin = 0; begin < images; begin += portion) {
    const int64_t some = std::min(portion, images - begin);
    std::vector<Tensor> parts;
    for (const Tensor& whole : given) parts.push_back(whole.narrow(0, begin, some));
    const Tensor part = all_of(layers, parts);
    reorder_channels(extents_of(part), part.const_data_ptr<float>(),
                     to + begin * (out.numel() / images), false, threads());
  }
  return out;
}

}  // namespace kd
