// Torch operators around the kernels: what they check, which form of a weight they ask for, and how
// often they ran. Shapes are validated where the graph is lowered; what is checked here is what may
// differ from call to call (strides, empty tensors).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <optional>

#include "attention.h"
#include "bf16_gemm.h"
#include "conv.h"
#include "counters.h"
#include "epilogue.h"
#include "gemm.h"
#include "gemm_unpacked.h"
#include "pool.h"
#include "weights.h"
#include "winograd.h"

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

int threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

// A tensor's numbers as the kernels call them.
template <class Element>
const Element* numbers_of(const Tensor& tensor) {
  return static_cast<const Element*>(tensor.const_data_ptr());
}

// Rows of a matrix: what an epilogue reads beside the output must lie as the output does.
template <class Element>
struct BesideOf {
  Tensor tensor;
  const Element* data = nullptr;

  BesideOf(const OptionalTensor& given, at::MemoryFormat format) {
    if (!given.has_value()) return;
    tensor = given->contiguous(format);
    data = numbers_of<Element>(tensor);
  }
};
using Beside = BesideOf<float>;

Tensor as_float(const Tensor& tensor) {
  return tensor.defined() ? tensor.to(at::kFloat).contiguous() : tensor;
}

template <class Element>
kd::EpilogueOf<Element> epilogue_of(const Element* bias, const BesideOf<Element>& before,
                                    const BesideOf<Element>& times,
                                    const BesideOf<Element>& after, int64_t row, int64_t act,
                                    double a, double b) {
  kd::EpilogueOf<Element> epilogue;
  epilogue.bias = bias;
  epilogue.before = before.data;
  epilogue.times = times.data;
  epilogue.after = after.data;
  epilogue.ld_before = epilogue.ld_times = epilogue.ld_after = row;
  epilogue.act = static_cast<kd::Act>(act);
  epilogue.a = static_cast<float>(a);
  epilogue.b = static_cast<float>(b);
  return epilogue;
}

// --- linear: act(x @ weight.T + bias + before) * times + after ----------------------------------

// The weight is (out, in), or (in, out) as in `x @ weight`.
kd::PackedPtr packed_linear(const Tensor& weight, bool in_out) {
  return kd::weights().get({weight}, in_out ? 1 : 0, [&] {
    const int out = in_out ? 1 : 0, in = 1 - out;
    const int64_t n = weight.size(out), k = weight.size(in);
    const Tensor floats = weight.detach().to(at::kFloat);
    auto packed = std::make_shared<kd::Packed>(kd::packed_size(k, n));
    kd::pack_b(packed->weight.data(), floats.const_data_ptr<float>(), k, n, floats.stride(in),
               floats.stride(out), threads());
    return packed;
  });
}

// What a linear layer of one kind of numbers is made of.
struct InFloats {
  using Element = float;
  static Tensor converted(const Tensor& bias) { return as_float(bias); }
  static constexpr auto packed = packed_linear;
  static void compute(int64_t m, int64_t n, int64_t k, const float* x, const float* weight,
                      float* out, const kd::Epilogue& epilogue) {
    kd::gemm(m, n, k, x, k, weight, out, n, epilogue, threads());
  }
};

template <class Kind>
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              const OptionalTensor& before, const OptionalTensor& times,
              const OptionalTensor& after, int64_t act, double a, double b, bool in_out) {
  using Element = typename Kind::Element;
  using Rows = BesideOf<Element>;
  const int64_t k = weight.size(in_out ? 0 : 1), n = weight.size(in_out ? 1 : 0);
  const Tensor rows = x.contiguous();
  at::DimVector shape(x.sizes());
  shape.back() = n;
  Tensor out = at::empty(shape, x.options());
  if (out.numel() == 0) return out;
  const int64_t m = out.numel() / n;
  const auto plain = at::MemoryFormat::Contiguous;
  const Rows left(before, plain), factor(times, plain), right(after, plain);
  const Tensor columns = Kind::converted(or_undefined(bias));
  const Element* bias_data = columns.defined() ? numbers_of<Element>(columns) : nullptr;
  const auto packed = Kind::packed(weight, in_out);
  Kind::compute(m, n, k, numbers_of<Element>(rows), packed->weight.data(),
                static_cast<Element*>(out.mutable_data_ptr()),
                epilogue_of(bias_data, left, factor, right, n, act, a, b));
  kd::count(kd::kLinear);
  return out;
}

#if defined(__AVX512BF16__)
// A wider weight is rounded, as a graph that casts it (autocast) would do in every call.
kd::PackedPtr packed_linear_bf16(const Tensor& weight, bool in_out) {
  return kd::weights().get({weight}, in_out ? 3 : 2, [&] {
    const Tensor out_in = in_out ? weight.detach().t() : weight.detach();
    const int64_t n = out_in.size(0), k = out_in.size(1);
    Tensor rows = at::zeros({n, 2 * kd::bf16::pairs_of(k)}, weight.options().dtype(at::kBFloat16));
    rows.narrow(1, 0, k).copy_(out_in);
    auto packed = std::make_shared<kd::Packed>(kd::bf16::packed_size_of(k, n));
    kd::bf16::pack(packed->weight.data(), numbers_of<kd::BFloat16>(rows), k, n, threads());
    return packed;
  });
}

struct InBFloat16 {
  using Element = kd::BFloat16;
  static Tensor converted(const Tensor& bias) {
    return bias.defined() ? bias.to(at::kBFloat16).contiguous() : bias;
  }
  static constexpr auto packed = packed_linear_bf16;
  static void compute(int64_t m, int64_t n, int64_t k, const Element* x, const float* weight,
                      Element* out, const kd::EpilogueOf<Element>& epilogue) {
    kd::bf16::gemm(m, n, k, x, weight, out, epilogue, threads());
  }
};
#endif

// --- convolution (1-D and 2-D), BatchNorm folded into the weight ---------------------------------

// Channels last, with one row more where the convolution is 1-D.
Tensor as_image(const Tensor& x) {
  const Tensor image = x.dim() == 3 ? x.unsqueeze(2) : x;
  return image.contiguous(at::MemoryFormat::ChannelsLast);
}

struct Norm {
  Tensor weight, bias, mean, var;
  double eps;
};

// One weight may stand before several norms, each of which gives a form of its own.
uint64_t recipe_of(const Norm& norm, int64_t groups, bool winograd) {
  const uint64_t form = static_cast<uint64_t>(groups) * 2 + winograd;
  if (!norm.mean.defined()) return form;
  uint64_t eps;
  std::memcpy(&eps, &norm.eps, sizeof eps);
  const auto mean = reinterpret_cast<uint64_t>(norm.mean.unsafeGetTensorImpl());
  return ((eps * 31 + mean) * 31 + form) | 1ull << 63;
}

kd::PackedPtr packed_convolution(const Tensor& weight, const Tensor& bias, const Norm& norm,
                                 const kd::ConvShape& shape, bool winograd) {
  const uint64_t recipe = recipe_of(norm, shape.groups, winograd);
  const Tensor from[] = {weight, bias, norm.weight, norm.bias, norm.mean, norm.var};
  return kd::weights().get(from, recipe, [&] {
    auto packed = std::make_shared<kd::Packed>(winograd ? kd::winograd::packed_size_of(shape)
                                                        : kd::conv_packed_size(shape));
    const Tensor floats = as_float(weight.detach());
    std::vector<float> scale;
    const Tensor shift = as_float(bias);
    if (norm.mean.defined()) {
      const Tensor mean = as_float(norm.mean), var = as_float(norm.var);
      const Tensor gain = as_float(norm.weight), offset = as_float(norm.bias);
      scale.resize(shape.co);
      packed->bias.resize(shape.co);
      for (int64_t c = 0; c < shape.co; c++) {
        const auto at = [c](const Tensor& t, double otherwise) {
          return t.defined() ? static_cast<double>(t.const_data_ptr<float>()[c]) : otherwise;
        };
        const double factor = at(gain, 1.0) / std::sqrt(at(var, 1.0) + norm.eps);
        scale[c] = static_cast<float>(factor);
        packed->bias[c] =
            static_cast<float>((at(shift, 0.0) - at(mean, 0.0)) * factor + at(offset, 0.0));
      }
    } else if (shift.defined()) {
      const float* data = shift.const_data_ptr<float>();
      packed->bias.assign(data, data + shape.co);
    }
    (winograd ? kd::winograd::pack : kd::conv_pack)(
        packed->weight.data(), floats.const_data_ptr<float>(),
        scale.empty() ? nullptr : scale.data(), shape, threads());
    return packed;
  });
}

// A 1-D convolution is a 2-D one on images with one row.
kd::ConvShape shape_of(const Tensor& image, const Tensor& weight, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  const bool flat = weight.dim() == 3;
  kd::ConvShape s{};
  s.n = image.size(0), s.ci = image.size(1), s.h = image.size(2), s.w = image.size(3);
  s.co = weight.size(0), s.groups = groups;
  s.kh = flat ? 1 : weight.size(2), s.kw = weight.size(-1);
  s.sh = flat ? 1 : stride.front(), s.sw = stride.back();
  s.ph = flat ? 0 : padding.front(), s.pw = padding.back();
  s.dh = flat ? 1 : dilation.front(), s.dw = dilation.back();
  s.oh = (s.h + 2 * s.ph - s.dh * (s.kh - 1) - 1) / s.sh + 1;
  s.ow = (s.w + 2 * s.pw - s.dw * (s.kw - 1) - 1) / s.sw + 1;
  return s;
}

Tensor convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                   const OptionalTensor& mean, const OptionalTensor& var, double eps,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   int64_t groups, const OptionalTensor& before, const OptionalTensor& times,
                   const OptionalTensor& after, int64_t act, double a, double b, bool winograd) {
  const Tensor image = as_image(x);
  const auto s = shape_of(image, weight, stride, padding, dilation, groups);
  const auto format = at::MemoryFormat::ChannelsLast;
  Tensor out = at::empty({s.n, s.co, s.oh, s.ow}, image.options().memory_format(format));
  if (out.numel() != 0) {
    const auto beside = [&](const OptionalTensor& given) {
      return given.has_value() ? OptionalTensor(as_image(*given)) : given;
    };
    const Beside left(beside(before), format), factor(beside(times), format),
        right(beside(after), format);
    const Norm norm{or_undefined(norm_weight), or_undefined(norm_bias), or_undefined(mean),
                    or_undefined(var), eps};
    const auto computed = [&](bool by_winograd) {
      const auto packed = packed_convolution(weight, or_undefined(bias), norm, s, by_winograd);
      const float* bias_data = packed->bias.empty() ? nullptr : packed->bias.data();
      const auto epilogue = epilogue_of(bias_data, left, factor, right, s.co, act, a, b);
      const float* from = image.const_data_ptr<float>();
      float* to = out.mutable_data_ptr<float>();
      if (by_winograd)
        return kd::winograd_conv(s, from, packed->weight.data(), to, epilogue, threads());
      kd::conv(s, from, packed->weight.data(), to, epilogue, threads());
      return true;
    };
    if (!winograd || !computed(true)) computed(false);
    kd::count(kd::kConvolution);
  }
  return x.dim() == 3 ? out.squeeze(2) : out;
}

// --- products of two activations, and of training ------------------------------------------------

Tensor product(const Tensor& left, const Tensor& right, const OptionalTensor& bias) {
  const bool batched = left.dim() == 3;
  const int64_t m = left.size(-2), k = left.size(-1), n = right.size(-1);
  Tensor out = batched ? at::empty({left.size(0), m, n}, left.options())
                       : at::empty({m, n}, left.options());
  if (out.numel() == 0) return out;
  const float *a = left.const_data_ptr<float>(), *b = right.const_data_ptr<float>();
  float* c = out.mutable_data_ptr<float>();
  if (batched) {
    kd::bmm(left.size(0), m, n, k, {a, left.stride(0), left.stride(1), left.stride(2)},
            {b, right.stride(0), right.stride(1), right.stride(2)}, c, m * n, n, 1.0f, threads());
  } else {
    const Tensor columns = bias.has_value() ? bias->contiguous() : Tensor();
    kd::Epilogue epilogue;
    if (columns.defined()) epilogue.bias = columns.const_data_ptr<float>();
    kd::gemm_unpacked(m, n, k, a, left.stride(0), left.stride(1), b, right.stride(0),
                      right.stride(1), c, n, epilogue, threads());
  }
  kd::count(kd::kProduct);
  return out;
}

// --- attention ----------------------------------------------------------------------------------

Tensor rows_of(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const OptionalTensor& mask, bool causal, double scale) {
  const Tensor q = rows_of(query), k = rows_of(key), v = rows_of(value);
  kd::AttentionShape s{};
  s.batch = q.size(0), s.heads = q.size(1), s.lq = q.size(2), s.d = q.size(3);
  s.kv_heads = k.size(1), s.lk = k.size(2), s.dv = v.size(3);
  s.q_b = q.stride(0), s.q_h = q.stride(1), s.q_l = q.stride(2);
  s.k_b = k.stride(0), s.k_h = k.stride(1), s.k_l = k.stride(2);
  s.v_b = v.stride(0), s.v_h = v.stride(1), s.v_l = v.stride(2);
  s.causal = causal, s.scale = static_cast<float>(scale);
  // As torch's own: heads side by side in memory, so that the projection after it reads rows.
  Tensor out = at::empty({s.batch, s.lq, s.heads, s.dv}, q.options()).transpose(1, 2);
  if (out.numel() == 0) return out;
  s.o_b = out.stride(0), s.o_h = out.stride(1), s.o_l = out.stride(2);
  Tensor added;
  if (mask.has_value()) {
    added = mask->expand({s.batch, s.heads, s.lq, s.lk});
    s.m_b = added.stride(0), s.m_h = added.stride(1);
    s.m_q = added.stride(2), s.m_k = added.stride(3);
    if (added.scalar_type() == at::kBool) {
      s.bool_mask = static_cast<const uint8_t*>(added.const_data_ptr());
    } else {
      s.mask = added.const_data_ptr<float>();
    }
  }
  const auto computed = [&](auto element) {
    using Element = decltype(element);
    kd::attention(s, numbers_of<Element>(q), numbers_of<Element>(k), numbers_of<Element>(v),
                  static_cast<Element*>(out.mutable_data_ptr()), threads());
  };
  switch (q.scalar_type()) {
    case at::kBFloat16:
      computed(kd::BFloat16());
      break;
    case at::kHalf:
      computed(kd::Half());
      break;
    default:
      TORCH_CHECK(q.scalar_type() == at::kFloat, "no attention in ", q.scalar_type());
      computed(float());
  }
  kd::count(kd::kAttention);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def(
      "openmp_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? times, "
      "Tensor? after, int act, float a, float b, bool in_out=False) -> Tensor");
  library.def(
      "openmp_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, "
      "Tensor? norm_bias, Tensor? mean, Tensor? var, float eps, int[] stride, int[] padding, "
      "int[] dilation, int groups, Tensor? before, Tensor? times, Tensor? after, int act, float a, "
      "float b, bool winograd=False) -> Tensor");
  library.def(
      "mha_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, "
      "float scale) -> Tensor");
  library.def("openmp_product(Tensor left, Tensor right, Tensor? bias) -> Tensor");
#if defined(__AVX512BF16__)
  library.def(
      "openmp_linear_bf16(Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? times, "
      "Tensor? after, int act, float a, float b, bool in_out=False) -> Tensor");
#endif
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_linear", linear<InFloats>);
  library.impl("openmp_convolution", convolution);
  library.impl("mha_attention", attention);
  library.impl("openmp_product", product);
#if defined(__AVX512BF16__)
  library.impl("openmp_linear_bf16", linear<InBFloat16>);
#endif
}

extern "C" {
int64_t* kernel_dispatch_counters() { return kd::counters(); }
// Above 0 while this thread runs a graph whose big tensors are to come from the pool.
int64_t* kernel_dispatch_pool_depth() { return &kd::Pool::depth(); }
void kernel_dispatch_keep_memory(int64_t bytes, bool backward) {
  kd::Pool::installed().keep(static_cast<size_t>(bytes), backward);
}
int64_t kernel_dispatch_limit_memory(int64_t bytes) {
  return static_cast<int64_t>(kd::Pool::installed().set_limit(static_cast<size_t>(bytes)));
}
int64_t kernel_dispatch_idle_bytes() { return kd::Pool::installed().idle_bytes(); }
void kernel_dispatch_forget() {
  kd::weights().forget();
  kd::Pool::installed().forget();
}
int64_t kernel_dispatch_packed_bytes() { return kd::weights().bytes(); }
int64_t kernel_dispatch_packed_count() { return kd::weights().made(); }
}
