// Layers between bytes, as models have them that were quantised ahead: see regions/quantized.py.
//   quantize(act(layer(dequantize(x), dequantize(weight)) + bias + dequantize(other)))

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "counters.h"
#include "from_python.h"
#include "int8_depthwise.h"
#include "int8_pixels.h"
#include "tensors.h"
#include "weights.h"

namespace kd {
namespace {

using Doubles = at::ArrayRef<double>;
constexpr auto kLast = at::MemoryFormat::ChannelsLast;

// How a weight is stored: [out][in][height][width], or as a matrix.
enum class Stored : uint64_t { taps, out_in, in_out };

Tensor rows_of(const Tensor& weight, Stored stored) {
  if (stored == Stored::taps) return weight.permute({0, 2, 3, 1});
  return stored == Stored::in_out ? weight.t() : weight;
}

// The steps of the outputs are beside the weight.
PackedPtr packed_bytes(const Tensor& weight, const Tensor& step, const Tensor& zero, const ConvShape& s,
                       Stored stored) {
  const bool alone = s.groups > 1;
  return weights().get({weight, step, zero}, 8 + 2 * static_cast<uint64_t>(stored) + alone, [&] {
    TORCH_CHECK(!zero.defined() || !zero.any().item<bool>(), "the zero of a weight of bytes is not 0");
    const int64_t k = s.depth();
    const int8::Taps taps(s);
    auto packed = std::make_shared<Packed>(alone ? taps.packed_size() : int8::packed_size_of(k, s.co));
    if (alone) {
      taps.pack(packed->weight.data(), weight.detach().contiguous().const_data_ptr<int8_t>());
    } else {
      const Tensor rows = at::zeros({s.co, 4 * int8::words_of(k)}, weight.options());
      rows.narrow(1, 0, k).copy_(rows_of(weight.detach(), stored).reshape({s.co, k}));
      int8::pack(packed->weight.data(), rows.const_data_ptr<int8_t>(), k, s.co, threads());
    }
    if (step.defined()) {
      const Tensor floats = step.detach().to(at::kFloat).contiguous();
      TORCH_CHECK(floats.numel() == s.co, floats.sizes(), " steps for ", s.co, " outputs");
      packed->scale.assign(floats.const_data_ptr<float>(), floats.const_data_ptr<float>() + s.co);
    }
    return packed;
  });
}

// Of the weight (where one step holds for all), the input, the result and what is added.
struct Grids {
  ByteGrid weight, input, result, other;

  Grids(Doubles steps, at::IntArrayRef zeros) {
    TORCH_CHECK(steps.size() == 4 && zeros.size() == 4, "four grids are asked for");
    ByteGrid* const all[] = {&weight, &input, &result, &other};
    for (size_t i = 0; i < 4; i++)
      *all[i] = {static_cast<float>(steps[i]), static_cast<int32_t>(zeros[i])};
  }
};

bool holds_bytes(const Tensor& tensor) {
  return tensor.scalar_type() == at::kByte || tensor.scalar_type() == at::kChar;
}

void check(const Tensor& x, const Tensor& bias, const Grids& grids, int64_t outputs) {
  const int64_t least = x.scalar_type() == at::kByte ? 0 : -128;
  TORCH_CHECK(grids.input.zero >= least && grids.input.zero < least + 256, "the zero of ",
              x.scalar_type(), " is ", grids.input.zero);
  TORCH_CHECK(!bias.defined() || bias.numel() == outputs, bias.sizes(), " numbers for ", outputs,
              " outputs");
}

// A height or a width of the result.
int64_t size_of(int64_t size, int64_t taps, int64_t stride, int64_t padding, int64_t dilation) {
  const int64_t beyond = size + 2 * padding - dilation * (taps - 1) - 1;
  TORCH_CHECK(beyond >= 0, "a kernel of ", taps, " does not fit into an image of ", size);
  return beyond / stride + 1;
}

ConvShape shape_of(const Tensor& x, const Tensor& weight, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  ConvShape s{};
  s.n = x.size(0), s.h = x.size(2), s.w = x.size(3);
  s.ci = s.ldx = x.size(1), s.co = s.ldy = weight.size(0), s.groups = groups;
  s.kh = weight.size(2), s.sh = stride[0], s.ph = padding[0], s.dh = dilation[0];
  s.kw = weight.size(3), s.sw = stride[1], s.pw = padding[1], s.dw = dilation[1];
  s.oh = size_of(s.h, s.kh, s.sh, s.ph, s.dh), s.ow = size_of(s.w, s.kw, s.sw, s.pw, s.dw);
  return s;
}

// Rows are images of one pixel.
ConvShape shape_of_rows(int64_t rows, int64_t inputs, int64_t outputs) {
  ConvShape s{};
  s.n = rows, s.ci = s.ldx = inputs, s.co = s.ldy = outputs;
  s.h = s.w = s.kh = s.kw = s.sh = s.sw = s.dh = s.dw = s.groups = s.oh = s.ow = 1;
  return s;
}

void check_images(const Tensor& x, const Tensor& weight, at::ArrayRef<at::IntArrayRef> geometry,
                  int64_t groups) {
  TORCH_CHECK(holds_bytes(x) && x.dim() == 4 && weight.dim() == 4 && weight.scalar_type() == at::kChar &&
                  weight.numel() > 0 && x.size(1) == weight.size(1) * groups,
              "no convolution of bytes: an image of ", x.sizes(), " and a weight of ", weight.sizes());
  const bool alone = weight.size(1) == 1 && weight.size(0) == groups;
  TORCH_CHECK(groups == 1 || alone, groups, " groups with a weight of ", weight.sizes(),
              " are not for this kernel");
  for (const at::IntArrayRef numbers : geometry)
    TORCH_CHECK(numbers.size() == 2, "images have two dimensions, not ", numbers.size());
}

struct Call {
  const ConvShape& s;
  const PackedPtr& packed;
  Tensor x, bias, other;
  Grids grids;
  Act act;
  float a, b;

  // `excess`: sums of the weights of each output, `zero` of which are in its sums.
  template <class Out>
  Requantized<Out> rest(Tensor& out, const int32_t* excess, int32_t zero) const {
    Requantized<Out> made;
    made.c = static_cast<Out*>(out.mutable_data_ptr()), made.ldc = s.co;
    made.e = {act, a, b};
    made.other = other.defined() ? static_cast<const Out*>(other.const_data_ptr()) : nullptr;
    made.of_result = grids.result;
    const ByteGrid added = grids.other;
    const float unit = made.to_units();
    const float shift = made.other && made.kToBytes ? -static_cast<float>(added.zero) * added.step : 0.0f;
    made.of_other = added.step * unit;
    const Columns columns{s.co, panels_of(s.co) * kLanes, grids.weight.step,
                          packed->scale.empty() ? nullptr : packed->scale.data(),
                          bias.defined() ? bias.const_data_ptr<float>() : nullptr, excess};
    made.own = columns.numbers(scratch<2>(3 * columns.padded), grids.input.step, zero, unit, shift);
    return made;
  }
};

template <class Out>
void compute(const Call& call, Tensor& out) {
  const ConvShape& s = call.s;
  const bool is_signed = call.x.scalar_type() == at::kChar, flipped = is_signed == int8::kShifted;
  const auto* const image = static_cast<const uint8_t*>(call.x.const_data_ptr());
  const float* const packed = call.packed->weight.data();
  const int32_t given = call.grids.input.zero;
  const int32_t zero = given + (flipped ? is_signed ? 128 : -128 : 0);
  const uint8_t flip = flipped ? 128 : 0;
  if (s.groups > 1) {
    const int8::WordImage words{int8::Taps(s), image, flip, static_cast<uint8_t>(given)};
    const auto rest = call.rest<Out>(out, words.taps.sums(packed), zero);
    return int8::depthwise(words, packed, rest, threads());
  }
  const int8::Pixels pixels{s, image, image + call.x.numel(), flip, static_cast<uint8_t>(zero)};
  const int8::Words words{packed, s.depth(), s.co};
  const auto rest = call.rest<Out>(out, words.column_sums(), zero);
  const int8::PixelProduct<Out> product{s.pixels(), s.co, s.depth(), pixels, words, rest, rest.e};
  int8::multiply(product, threads());
}

// `result`: of bytes without a sign, with one, or floats.
constexpr at::ScalarType kResults[] = {at::kByte, at::kChar, at::kFloat};

at::ScalarType result_of(int64_t result) {
  TORCH_CHECK(result >= 0 && result < 3, "a result is of kind 0 to 2, not ", result);
  return kResults[result];
}

// What is added, as the result lies.
Tensor beside(const OptionalTensor& other, const Tensor& out, at::MemoryFormat format) {
  if (!other) return {};
  TORCH_CHECK(other->sizes() == out.sizes() && other->scalar_type() == out.scalar_type(),
              "what is added is no such tensor as the result");
  return other->contiguous(format);
}

void compute(const Call& call, Tensor& out) {
  if (out.scalar_type() == at::kByte) compute<uint8_t>(call, out);
  if (out.scalar_type() == at::kChar) compute<int8_t>(call, out);
  if (out.scalar_type() == at::kFloat) compute<float>(call, out);
}

Tensor quantized_convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& step,
                             const OptionalTensor& zero, const OptionalTensor& bias,
                             const OptionalTensor& other, Doubles steps, at::IntArrayRef zeros,
                             int64_t result, int64_t act, double a, double b, at::IntArrayRef stride,
                             at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  const Grids grids(steps, zeros);
  const Tensor shift = as_float(or_undefined(bias));
  check_images(x, weight, {stride, padding, dilation}, groups);
  check(x, shift, grids, weight.size(0));
  const ConvShape s = shape_of(x, weight, stride, padding, dilation, groups);
  Tensor out = at::empty({s.n, s.co, s.oh, s.ow},
                         x.options().dtype(result_of(result)).memory_format(kLast));
  const Tensor added = beside(other, out, kLast);
  if (out.numel() == 0) return out;
  const PackedPtr packed =
      packed_bytes(weight, or_undefined(step), or_undefined(zero), s, Stored::taps);
  compute({s, packed, x.contiguous(kLast), shift, added, grids, static_cast<Act>(act),
           static_cast<float>(a), static_cast<float>(b)},
          out);
  count(kQuantizedConvolution);
  return out;
}

// `input_step`, `input_zero`: of rows whose grid is found in each call.
Tensor quantized_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& step,
                        const OptionalTensor& zero, const OptionalTensor& bias,
                        const OptionalTensor& other, const OptionalTensor& input_step,
                        const OptionalTensor& input_zero, Doubles steps, at::IntArrayRef zeros,
                        int64_t result, int64_t act, double a, double b, bool in_out) {
  Grids grids(steps, zeros);
  if (input_step) grids.input.step = static_cast<float>(input_step->item<double>());
  if (input_zero) grids.input.zero = static_cast<int32_t>(input_zero->item<int64_t>());
  const Tensor shift = as_float(or_undefined(bias));
  TORCH_CHECK(holds_bytes(x) && weight.dim() == 2 && weight.scalar_type() == at::kChar && x.dim() > 0 &&
                  weight.numel() > 0 && x.size(-1) == weight.size(in_out ? 0 : 1),
              "no linear layer of bytes: rows of ", x.sizes(), " and a weight of ", weight.sizes());
  const int64_t n = weight.size(in_out ? 1 : 0), k = x.size(-1), m = x.numel() / k;
  check(x, shift, grids, n);
  at::DimVector sizes(x.sizes());
  sizes.back() = n;
  Tensor out = at::empty(sizes, x.options().dtype(result_of(result)));
  const Tensor added = beside(other, out, at::MemoryFormat::Contiguous);
  if (out.numel() == 0) return out;
  const ConvShape s = shape_of_rows(m, k, n);
  const PackedPtr packed = packed_bytes(weight, or_undefined(step), or_undefined(zero), s,
                                        in_out ? Stored::in_out : Stored::out_in);
  compute({s, packed, x.contiguous(), shift, added, grids, static_cast<Act>(act), static_cast<float>(a),
           static_cast<float>(b)},
          out);
  count(kQuantizedLinear);
  return out;
}

const from_python::Offered offered[] = {
    {"openmp_quantized_convolution", from_python::entry<quantized_convolution>},
    {"openmp_quantized_linear", from_python::entry<quantized_linear>},
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def(
      "openmp_quantized_convolution(Tensor x, Tensor weight, Tensor? step, Tensor? zero, Tensor? bias, "
      "Tensor? other, float[] steps, int[] zeros, int result, int act, float a, float b, "
      "int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
      {at::Tag::needs_fixed_stride_order});
  library.def(
      "openmp_quantized_linear(Tensor x, Tensor weight, Tensor? step, Tensor? zero, Tensor? bias, "
      "Tensor? other, Tensor? input_step, Tensor? input_zero, float[] steps, int[] zeros, int result, "
      "int act, float a, float b, bool in_out) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_quantized_convolution", quantized_convolution);
  library.impl("openmp_quantized_linear", quantized_linear);
}

TORCH_LIBRARY_IMPL(kernel_dispatch, Autograd, library) {
  library.impl("openmp_quantized_convolution", torch::CppFunction::makeFallthrough());
  library.impl("openmp_quantized_linear", torch::CppFunction::makeFallthrough());
}

}  // namespace kd
