// Linear layers of a mixture of experts: groups of rows, each of which has a weight of its own.
//
// Where the weights are (out, in), the operands change places: a group's weight is the left one, read
// where it lies, and the rows of the group are packed as the right one. They are few, so packing them
// costs little; weights, of which a call reads those that were chosen, are neither kept twice nor
// laid out in every call. What comes out is turned about on its way into the result. Weights that are
// (in, out) are packed, some columns at a time, when they are needed.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <torch/library.h>

#include <vector>

#include "counters.h"
#include "dot.h"
#include "from_python.h"
#include "half_linear.h"
#include "tensors.h"

namespace kd {
namespace {

// Rows of one weight, one after the other.
struct Group {
  int64_t weight, first, count;
  int64_t panel;  // the first of its panels among those of all groups
};

// Which half of the outputs goes through the activation and is the factor of the other.
enum class Gate : int64_t { none, first, second };

struct Sizes {
  int64_t k, n;  // of a row before, and behind
  Gate gate;

  bool gated() const { return gate != Gate::none; }
  int64_t outputs() const { return gated() ? 2 * n : n; }
  int64_t factor_at() const { return gate == Gate::second ? n : 0; }
  int64_t other_at() const { return gate == Gate::first ? n : 0; }
};

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

// A matrix turned about.
template <class Element>
void turn(const Element* from, int64_t ld, int64_t rows, int64_t columns, Element* to, int64_t to_ld) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    const int high = static_cast<int>(std::min<int64_t>(rows - i, kLanes));
    for (int64_t j = 0; j < columns; j += kLanes) {
      const int wide = static_cast<int>(std::min<int64_t>(columns - j, kLanes));
      vec square[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; r++) {
        const Element* const row = from + (i + r) * ld + j;
        square[r] = r >= high ? vec{} : wide == kLanes ? load_floats(row) : load_floats_first(row, wide);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int c = 0; c < kLanes; c++) {
        if (c >= wide) break;
        Element* const row = to + (j + c) * to_ld + i;
        if (high == kLanes)
          store_floats(row, square[c]);
        else
          store_floats_first(row, square[c], high);
      }
    }
  }
}

// So many outputs of a group, and rows of a large one, at once: what comes out stays in the second cache.
constexpr int64_t kMostOutputs = 128, kFewestOutputs = 32, kRowsAtOnce = 256;

int64_t outputs_at_once(const std::vector<Group>& groups, int64_t n, int threads) {
  const int64_t all = static_cast<int64_t>(groups.size()) * n;
  const int64_t fair = ceil_div(all / std::max(4 * threads, 1), kLanes) * kLanes;
  return std::clamp(fair, kFewestOutputs, kMostOutputs);
}

// One part of the outputs of some rows of a group.
struct Part {
  const Group* group;
  Range rows, outputs;
};

template <class Kind, class Element = typename Kind::Element>
class GroupedLinear {
 public:
  GroupedLinear(Sizes sizes, bool in_out, const Element* rows, const Element* weight, Element* out,
                const EpilogueOf<Element>& act)
      : sizes_(sizes), in_out_(in_out), depth_(Kind::depth(sizes.k)), rows_(rows), weight_(weight),
        out_(out), act_(act) {}

  void compute(const std::vector<Group>& groups, int64_t all_rows, int threads) {
    threads = useful_threads(threads, Kind::work(all_rows, sizes_.outputs(), depth_), kWorkPerThread);
    const std::vector<Part> parts = cut(groups, threads);
    if (!in_out_) pack_rows(groups, threads);
    for_each_item(static_cast<int64_t>(parts.size()), threads, [&](int64_t item) {
      const Part& part = parts[static_cast<size_t>(item)];
      in_out_ || dots(*part.group) ? compute_straight(part) : compute_turned(part);
    });
  }

 private:
  std::vector<Part> cut(const std::vector<Group>& groups, int threads) const {
    const int64_t width = outputs_at_once(groups, sizes_.n, threads);
    const int64_t across = ceil_div(sizes_.n, width);
    std::vector<Part> parts;
    for (const Group& group : groups) {
      const int64_t down = ceil_div(group.count, kRowsAtOnce);
      for (int64_t i = 0; i < across; i++)
        for (int64_t j = 0; j < down; j++) {
          const Range panels = part_of(panels_of(group.count), j, down);
          parts.push_back({&group,
                           {panels.begin * kLanes, std::min(panels.end * kLanes, group.count)},
                           {i * width, std::min((i + 1) * width, sizes_.n)}});
        }
    }
    return parts;
  }

  // So few rows of floats are multiplied without panels.
  static bool dots(const Group& group) {
    return std::is_same_v<Element, float> && group.count <= kMostDotRows;
  }

  void pack_rows(const std::vector<Group>& groups, int threads) {
    std::vector<std::pair<const Group*, int64_t>> panels;
    for (const Group& group : groups)
      if (!dots(group))
        for (int64_t i = 0; i < panels_of(group.count); i++) panels.emplace_back(&group, i);
    const int64_t all = groups.back().panel + panels_of(groups.back().count);
    packed_ = at::empty({all * kLanes * depth_}, at::kFloat);
    float* const packed = packed_.mutable_data_ptr<float>();
    for_each_item(static_cast<int64_t>(panels.size()), threads, [&](int64_t item) {
      const auto& [group, panel] = panels[static_cast<size_t>(item)];
      Kind::pack_rows(packed + (group->panel + panel) * kLanes * depth_,
                      rows_ + (group->first + panel * kLanes) * sizes_.k, sizes_.k,
                      columns_of_panel(group->count, panel));
    });
  }

  const Element* weight_of(const Part& part) const {
    return weight_ + part.group->weight * sizes_.outputs() * sizes_.k;
  }
  Element* result_of(const Part& part) const {
    return out_ + (part.group->first + part.rows.begin) * sizes_.n + part.outputs.begin;
  }

  // multiply(first output, where to, its row, what behind it), of the factor first where there is one,
  // which is kept in `gate`, `ld` numbers a row.
  template <class Multiply>
  void gated(const Part& part, Element* gate, int64_t ld, Element* to, int64_t to_ld,
             const Multiply& multiply) const {
    EpilogueOf<Element> e = act_;
    if (sizes_.gated()) {
      multiply(sizes_.factor_at() + part.outputs.begin, gate, ld, act_);
      e = {};
      e.times = gate, e.ld_times = ld;
    }
    multiply(sizes_.other_at() + part.outputs.begin, to, to_ld, e);
  }

  // rows @ weight, of columns that are packed for these rows if they are not read as dots.
  void compute_straight(const Part& part) const {
    const int64_t count = part.rows.size(), width = part.outputs.size();
    const Element* const rows = rows_ + (part.group->first + part.rows.begin) * sizes_.k;
    auto* const gate = reinterpret_cast<Element*>(scratch<2>(count * kMostOutputs));
    const auto multiply = [&](int64_t output, Element* to, int64_t ld, const EpilogueOf<Element>& e) {
      if (!in_out_)
        return Kind::dots(count, width, sizes_.k, rows, weight_of(part) + output * sizes_.k, to, ld, e);
      float* const columns = scratch<3>(kMostOutputs * depth_);
      Kind::pack_columns(columns, weight_of(part) + output, sizes_.outputs(), sizes_.k, width);
      Kind::multiply(Grid{}, 0, count, width, sizes_.k, rows, columns, to, ld, e);
    };
    gated(part, gate, width, result_of(part), sizes_.n, multiply);
  }

  // weight @ rows.T, into the result by way of the cache.
  void compute_turned(const Part& part) const {
    const int64_t count = part.rows.size(), width = part.outputs.size();
    const float* const right = packed_.const_data_ptr<float>() +
                               (part.group->panel * kLanes + part.rows.begin) * depth_;
    auto* const results = reinterpret_cast<Element*>(scratch<2>(2 * kMostOutputs * (kRowsAtOnce + kLanes)));
    const auto multiply = [&](int64_t output, Element* to, int64_t ld, const EpilogueOf<Element>& e) {
      Kind::stream(width, count, sizes_.k, weight_of(part) + output * sizes_.k, right, to, ld, e);
    };
    gated(part, results + width * count, count, results, count, multiply);
    turn(results, count, width, count, result_of(part), sizes_.n);
  }

  const Sizes sizes_;
  const bool in_out_;
  const int64_t depth_;
  const Element *rows_, *weight_;
  Element* const out_;
  const EpilogueOf<Element> act_;
  Tensor packed_;  // the rows, where they are the right operand
};

// Lines that are asked for while those before them are read. They lie far from each other, where no
// CPU looks for them by itself.
constexpr int64_t kLinesAhead = 12;

template <class Element>
void fetch_line(const Element* line, int64_t numbers) {
  const auto* const bytes = reinterpret_cast<const char*>(line);
  for (int64_t i = 0; i < numbers * static_cast<int64_t>(sizeof(Element)); i += 64)
    __builtin_prefetch(bytes + i);
}

// A kind of numbers, with how they become panels, and products of weights that are read once.
struct GroupedFloats : InFloats {
  static void pack_rows(float* to, const float* rows, int64_t k, int count) {
    pack_panel(to, rows, k, count, 1, k);
  }

  static void pack_columns(float* to, const float* from, int64_t ld, int64_t k, int64_t columns) {
    for (int64_t p = 0; p < k; p++, from += ld) {
      if (p + kLinesAhead < k) fetch_line(from + kLinesAhead * ld, columns);
      for (int64_t j = 0; j < columns; j += kLanes)
        store(to + (j * k + p * kLanes), columns - j >= kLanes
                                             ? load(from + j)
                                             : load_first(from + j, static_cast<int>(columns - j)));
    }
  }

  static void dots(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c,
                   int64_t ldc, const Epilogue& e) {
    dot_panels({0, panels_of(n)}, m, n, k, a, k, b, k, 1, c, ldc, e);
  }

  // All of some rows of `a`, then all of the next ones, which are fetched meanwhile. Rows that are
  // whole pages a CPU fetches better by itself.
  static void stream(int64_t m, int64_t n, int64_t k, const float* a, const float* packed, float* c,
                     int64_t ld, const Epilogue& e) {
    constexpr int64_t page = 1024;
    const MatrixRows left{a, k};
    const PackedColumns right{packed, k};
    const Limits limits(e);
    const int64_t panels = panels_of(n), parts = std::max<int64_t>(ceil_div(k, kDepth), 1);
    const int64_t at_once = kTileRows[ceil_div(panels, ceil_div(panels, kStripWidth))];
    float* const buffer = scratch<0>(kRowsBuffer);
    for (int64_t i = 0; i < m; i += at_once) {
      const int64_t rows = std::min(at_once, m - i);
      for (int64_t j = 0; j < parts; j++) {
        const Range deep = part_of(k, j, parts);
        const bool fetches = k % page != 0 && i + rows < m;
        const Block next{fetches ? a + (i + rows) * k + rows * deep.begin : nullptr, 0, 0};
        multiply_blocks(left.block(i, rows, deep.begin, deep.size(), buffer), rows,
                        right.block(0, panels, deep.begin, deep.size()), n, deep.size(), c + i * ld, ld,
                        e.at(i, 0), {j > 0, j + 1 == parts, limits.low, limits.high}, next);
      }
    }
  }
};

#if defined(__AVX512BF16__)
template <class Number>
struct GroupedHalves : InHalves<Number> {
  // Rows that do not end with a whole pair, or tile, are filled up first.
  static void pack_rows(float* to, const Number* rows, int64_t k, int count) {
    const int64_t pairs = halves::pairs_of(k);
    if (k == 2 * pairs)
      return pack_panel(to, reinterpret_cast<const float*>(rows), pairs, count, 1, pairs);
    float* const filled = scratch<4>(kLanes * pairs);
    for (int i = 0; i < count; i++)
      copy_filled_up(filled + i * pairs, pairs, rows + i * k, k * static_cast<int64_t>(sizeof(Number)));
    pack_panel(to, filled, pairs, count, 1, pairs);
  }

  // Two lines become one of pairs.
  static void pack_columns(float* to, const Number* from, int64_t ld, int64_t k, int64_t columns) {
    const int64_t pairs = halves::pairs_of(k);
    for (int64_t p = 0; p < pairs; p++, from += 2 * ld) {
      if (2 * p + kLinesAhead + 1 < k) {
        fetch_line(from + kLinesAhead * ld, columns);
        fetch_line(from + (kLinesAhead + 1) * ld, columns);
      }
      for (int64_t j = 0; j < columns; j += kLanes) {
        const int wide = static_cast<int>(std::min<int64_t>(columns - j, kLanes));
        const ivec first = 2 * p < k ? bits_of(from + j, wide) : ivec{};
        const ivec second = 2 * p + 1 < k ? bits_of(from + ld + j, wide) : ivec{};
        store(to + (j * pairs + p * kLanes), (vec)(first | second << 16));
      }
    }
  }

  static void dots(int64_t, int64_t, int64_t, const Number*, const Number*, Number*, int64_t,
                   const EpilogueOf<Number>&) {}  // of floats only

  static void stream(int64_t m, int64_t n, int64_t k, const Number* a, const float* packed, Number* c,
                     int64_t ld, const EpilogueOf<Number>& e) {
    const int64_t at_once = halves::in_tiles<Number>() ? 32 : 2 * kTileRows[2];
    for (int64_t i = 0; i < m; i += at_once)
      GroupedHalves::multiply(Grid{}, 0, std::min(at_once, m - i), n, k, a + i * k, packed, c + i * ld,
                              ld, e.at(i, 0));
  }

 private:
  static ivec bits_of(const Number* from, int count) {
    hvec v{};
    if (count == kLanes)
      std::memcpy(&v, from, sizeof v);
    else
      std::memcpy(&v, from, static_cast<size_t>(count) * sizeof(Number));
    return widened(v);
  }
};
#endif

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
  if (type == at::kBFloat16) return compute<GroupedHalves<BFloat16>>(layer, groups, out), out;
  if (type == at::kHalf && halves::multiplied<Half>())
    return compute<GroupedHalves<Half>>(layer, groups, out), out;
#endif
  TORCH_CHECK(type == at::kFloat, "grouped products of ", type, " are not computed here");
  return compute<GroupedFloats>(layer, groups, out), out;
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

}  // namespace kd
