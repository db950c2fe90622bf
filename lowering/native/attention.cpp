// Attention that never writes the matrix of scores.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attention.h"
#include "counters.h"
#include "from_python.h"
#include "tensors.h"

namespace kd {
namespace {

Tensor rows_of(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value,
                 const OptionalTensor& mask, bool causal, double scale) {
  const Tensor q = rows_of(query), k = rows_of(key), v = rows_of(value);
  AttentionShape s{};
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
    attention(s, numbers_of<Element>(q), numbers_of<Element>(k), numbers_of<Element>(v),
              static_cast<Element*>(out.mutable_data_ptr()), threads());
  };
  switch (q.scalar_type()) {
    case at::kBFloat16:
      computed(BFloat16());
      break;
    case at::kHalf:
      computed(Half());
      break;
    default:
      TORCH_CHECK(q.scalar_type() == at::kFloat, "no attention in ", q.scalar_type());
      computed(float());
  }
  count(kAttention);
  return out;
}

const from_python::Offered offered("mha_attention", from_python::entry<attend>);

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def(
      "mha_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, "
      "float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) { library.impl("mha_attention", attend); }

}  // namespace kd
