// Linear layers of a mixture of experts: groups of rows, each of which has a weight of its own.
//
// Where the weights are (out, in), the operands change places: a group's weight is the left one, read
// where it lies, and the rows of the group are packed as the right one. They are few, so packing them
// costs little; weights, of which a call reads those that were chosen, are neither kept twice nor
// laid out in every call. What comes out is turned about on its way into the result. Weights that are
// (in, out) are packed, some columns at a time, when they are needed.
#pragma once

#include <ATen/ops/empty.h>

#include <vector>

#include "gemm.h"
#include "tensors.h"
#include "turn_over.h"

namespace kd::grouped {

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

// So many outputs of a group, and rows of a large one, at once: what comes out stays in the second cache.
constexpr int64_t kMostOutputs = 128, kFewestOutputs = 32, kRowsAtOnce = 256;

static inline int64_t outputs_at_once(const std::vector<Group>& groups, int64_t n, int threads) {
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

  // So few rows are multiplied without panels.
  static bool dots(const Group& group) { return group.count <= Kind::kMostDots; }

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
      if constexpr (Kind::kMostDots > 0)
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
    turn_over({width, count, count}, results, result_of(part), sizes_.n);
  }

  const Sizes sizes_;
  const bool in_out_;
  const int64_t depth_;
  const Element *rows_, *weight_;
  Element* const out_;
  const EpilogueOf<Element> act_;
  Tensor packed_;  // the rows, where they are the right operand
};

}  // namespace kd::grouped
