// Torch operators of the layers of a mixture of experts.

#include <ATen/ops/empty_like.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <torch/library.h>

#include "counters.h"
#include "from_python.h"
#include "grouped_linear.h"
#include "grouped_numbers.h"

namespace kd::grouped {
namespace {

// `ends` are those of the groups, in rows; what lies behind the last one belongs to none.
std::vector<Group> groups_of(const Tensor& ends, int64_t rows) {
  const Tensor all = ends.to(at::kLong).contiguous();
  const int64_t* const end = all.const_data_ptr<int64_t>();
  std::vector<Group> groups;
  int64_t first = 0, panel = 0;
  for (int64_t i = 0; i < all.numel(); i++) {
    TORCH_CHECK(end[i] >= first && end[i] <= rows, "group ", i, " of a grouped product ends at row ",
                end[i], "; it may at ", first, " to ", rows);
    if (end[i] == first) continue;
    groups.push_back({i, first, end[i] - first, panel});
    panel += panels_of(end[i] - first);
    first = end[i];
  }
  return groups;
}

// What is to be computed, as the graph describes it.
struct Described {
  Tensor rows, weight;
  Sizes sizes;
  bool in_out;
  int64_t act = 0;
  double a = 0, b = 0;
};

template <class Kind>
void compute(const Described& layer, const std::vector<Group>& groups, Tensor& out) {
  using Element = typename Kind::Element;
  const Tensor x = layer.rows.contiguous(), weight = layer.weight.contiguous();
  EpilogueOf<Element> epilogue;
  epilogue.act = static_cast<Act>(layer.act);
  epilogue.a = static_cast<float>(layer.a), epilogue.b = static_cast<float>(layer.b);
  GroupedLinear<Kind>(layer.sizes, layer.in_out, numbers_of<Element>(x), numbers_of<Element>(weight),
                      static_cast<Element*>(out.mutable_data_ptr()), epilogue)
      .compute(groups, groups.back().first + groups.back().count, threads());
}

// Rows of no group, the last ones, are zeros.
Tensor computed(const Described& layer, const std::vector<Group>& groups) {
  const int64_t m = layer.rows.size(0);
  Tensor out = at::empty({m, layer.sizes.n}, layer.rows.options());
  const int64_t in_groups = groups.empty() ? 0 : groups.back().first + groups.back().count;
  if (in_groups < m) out.narrow(0, in_groups, m - in_groups).zero_();
  count(kGroupedLinear);
  if (in_groups == 0 || layer.sizes.n == 0) return out;
  const at::ScalarType type = layer.rows.scalar_type();
#if defined(__AVX512BF16__)
  if (type == at::kBFloat16) return compute<Halves<BFloat16>>(layer, groups, out), out;
  if (type == at::kHalf && halves::multiplied<Half>())
    return compute<Halves<Half>>(layer, groups, out), out;
#endif
  TORCH_CHECK(type == at::kFloat, "grouped products of ", type, " are not computed here");
  return compute<Floats>(layer, groups, out), out;
}

void check(const Tensor& rows, const Tensor& weight, bool in_out) {
  TORCH_CHECK(rows.dim() == 2 && weight.dim() == 3 && weight.size(in_out ? 1 : 2) == rows.size(1),
              "a grouped product of ", rows.sizes(), " has weights of ", weight.sizes());
  TORCH_CHECK(rows.scalar_type() == weight.scalar_type(), "a grouped product of ", rows.scalar_type(),
              " has weights of ", weight.scalar_type());
}

Tensor grouped_linear(const Tensor& rows, const Tensor& weight, const Tensor& ends, bool in_out,
                      int64_t gate, int64_t act, double a, double b) {
  check(rows, weight, in_out);
  const int64_t outputs = weight.size(in_out ? 2 : 1);
  TORCH_CHECK(ends.dim() == 1 && ends.size(0) == weight.size(0), "a grouped product of ",
              weight.size(0), " weights has ends of ", ends.sizes());
  TORCH_CHECK(gate == 0 || outputs % 2 == 0, "a grouped product of ", outputs,
              " outputs has a gate; they are to have two halves");
  const Sizes sizes{rows.size(1), gate != 0 ? outputs / 2 : outputs, static_cast<Gate>(gate)};
  return computed({rows, weight, sizes, in_out, act, a, b}, groups_of(ends, rows.size(0)));
}

// `chosen` with the numbers of the rows that chose the same one after another, as they are counted
// from the first weight on.
std::pair<Tensor, Tensor> sorted_by_weight(const Tensor& chosen, int64_t weights) {
  Tensor numbers = chosen.to(at::kLong, false, true).contiguous();
  auto* const number = numbers.mutable_data_ptr<int64_t>();
  std::vector<int64_t> begins(static_cast<size_t>(weights) + 1);
  for (int64_t i = 0; i < numbers.numel(); i++) {
    TORCH_CHECK_INDEX(number[i] >= -weights && number[i] < weights, "index ", number[i],
                      " is out of bounds for dimension 0 with size ", weights);
    if (number[i] < 0) number[i] += weights;
    begins[static_cast<size_t>(number[i]) + 1]++;
  }
  Tensor ends = at::empty({weights}, at::kLong), order = at::empty_like(numbers);
  for (size_t w = 0; w < static_cast<size_t>(weights); w++) {
    begins[w + 1] += begins[w];
    ends.mutable_data_ptr<int64_t>()[w] = begins[w + 1];
  }
  for (int64_t i = 0; i < numbers.numel(); i++)
    order.mutable_data_ptr<int64_t>()[begins[static_cast<size_t>(number[i])]++] = i;
  return {ends, order};
}

// A row is multiplied by as many weights, one after the other in `chosen`, as there are more of them.
Tensor gathered_linear(const Tensor& rows, const Tensor& weight, const Tensor& chosen, bool in_out) {
  check(rows, weight, in_out);
  const int64_t m = rows.size(0), all = chosen.numel(), times = m > 0 ? all / m : 0;
  TORCH_CHECK(chosen.dim() == 1 && all == m * times, "rows of ", rows.sizes(), " choose ",
              chosen.sizes(), " weights");
  const auto [ends, order] = sorted_by_weight(chosen, weight.size(0));
  const Sizes sizes{rows.size(1), weight.size(in_out ? 2 : 1), Gate::none};
  const Tensor sources = times > 1 ? at::floor_divide(order, times) : order;
  const Tensor sorted =
      computed({rows.index_select(0, sources), weight, sizes, in_out}, groups_of(ends, all));
  return at::empty_like(sorted).index_copy_(0, order, sorted);
}

const from_python::Offered offered[] = {
    {"openmp_grouped_linear", from_python::entry<grouped_linear>},
    {"openmp_gathered_linear", from_python::entry<gathered_linear>},
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def(
      "openmp_grouped_linear(Tensor rows, Tensor weight, Tensor ends, bool in_out, int gate, "
      "int act, float a, float b) -> Tensor");
  library.def(
      "openmp_gathered_linear(Tensor rows, Tensor weight, Tensor chosen, bool in_out) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_grouped_linear", grouped_linear);
  library.impl("openmp_gathered_linear", gathered_linear);
}

}  // namespace kd::grouped
