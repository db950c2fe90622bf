// LSTM, GRU and plain recurrent layers, stacked and in both directions, as torch's modules have them.

#include "recurrent.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "counters.h"
#include "from_python.h"
#include "linear_group.h"
#include "tensors.h"
#include "weights.h"

namespace kd {
namespace {

// Of one direction of one layer; biases may be undefined.
struct Parameters {
  Tensor input_weight, hidden_weight, input_bias, hidden_bias;
};

// Rows of the weight in the order of the sums; those that fill a block up are zeros.
Tensor in_blocks(const Tensor& weight, const RecurrentShape& s) {
  const Tensor floats = as_float(weight.detach());
  Tensor rows = at::zeros({s.sums(), floats.size(1)}, floats.options());
  const int64_t row = floats.size(1);
  for (int gate = 0; gate < gates_of(s.cell); gate++) {
    for (int64_t unit = 0; unit < s.hidden; unit++) {
      const float* from = floats.const_data_ptr<float>() + (gate * s.hidden + unit) * row;
      std::copy_n(from, row, rows.mutable_data_ptr<float>() + place_of(s, gate, unit) * row);
    }
  }
  return rows;
}

// The sums' biases, then the hidden ones of a GRU's new state, which its reset gate scales.
std::vector<float> biases_of(const Parameters& of, const RecurrentShape& s) {
  std::vector<float> biases(s.sums() + s.units(), 0.0f);
  if (!of.input_bias.defined()) return biases;
  const Tensor input = as_float(of.input_bias), hidden = as_float(of.hidden_bias);
  for (int gate = 0; gate < gates_of(s.cell); gate++) {
    const bool apart = s.cell == Cell::gru && gate == 2;
    for (int64_t unit = 0; unit < s.hidden; unit++) {
      const float from_hidden = hidden.const_data_ptr<float>()[gate * s.hidden + unit];
      float& sum = biases[place_of(s, gate, unit)];
      sum = input.const_data_ptr<float>()[gate * s.hidden + unit];
      (apart ? biases[s.sums() + unit] : sum) += from_hidden;
    }
  }
  return biases;
}

// Panels of a block, one after the other, become one stream: of each hidden unit that is read, the
// vectors of all gates.
void interleave(float* panels, const RecurrentShape& s) {
  const int64_t width = width_of(s.cell), block = width * s.hidden * kLanes;
  std::vector<float> before(block);
  for (int64_t b = 0; b < s.blocks(); b++, panels += block) {
    std::copy_n(panels, block, before.data());
    for (int64_t j = 0; j < width; j++)
      for (int64_t k = 0; k < s.hidden; k++)
        std::copy_n(&before[(j * s.hidden + k) * kLanes], kLanes, panels + (k * width + j) * kLanes);
  }
}

// Panels of the input's weight, then of the hidden state's.
PackedPtr packed_layer(const Parameters& of, const RecurrentShape& s) {
  const Lent from[] = {of.hidden_weight, of.input_weight, of.input_bias, of.hidden_bias};
  const uint64_t form = 1ull << 41 | static_cast<uint64_t>(s.cell);
  return weights().get(from, form, [&] {
    const int64_t first = packed_size(s.inputs, s.sums());
    auto packed = std::make_shared<Packed>(first + packed_size(s.hidden, s.sums()));
    const auto pack = [&](float* to, const Tensor& weight, int64_t k) {
      const Tensor rows = in_blocks(weight, s);
      pack_b(to, rows.const_data_ptr<float>(), k, s.sums(), 1, k, threads());
    };
    pack(packed->weight.data(), of.input_weight, s.inputs);
    pack(packed->weight.data() + first, of.hidden_weight, s.hidden);
    interleave(packed->weight.data() + first, s);
    packed->bias = biases_of(of, s);
    return packed;
  });
}

// What is computed of the inputs at once stays in the caches until the steps have read it.
constexpr int64_t kProjectedBytes = 1 << 20;

int64_t steps_at_once(const RecurrentShape& s, int64_t steps) {
  const int64_t row = s.sums() * static_cast<int64_t>(sizeof(float));
  const int64_t rows = std::max<int64_t>(kProjectedBytes / row, 4 * kMostTileRows);
  return std::min(steps, std::max<int64_t>(1, rows / s.batch));
}

// Rows of numbers between places of different width. What is beyond the narrower one stays.
void copy_rows(float* to, int64_t to_row, const float* from, int64_t from_row, int64_t rows) {
  for (int64_t i = 0; i < rows; i++)
    copy_row(to + i * to_row, from + i * from_row, std::min(to_row, from_row));
}

// One direction of one layer, on memory of the caller.
class Direction {
 public:
  static int64_t floats(const RecurrentShape& s, int64_t at_once) {
    return s.batch * (3 * s.units() + at_once * s.sums());
  }

  Direction(const RecurrentShape& shape, const Parameters& parameters, float* memory,
            bool backwards)
      : shape_(shape), backwards_(backwards), packed_(packed_layer(parameters, shape)),
        size_(shape.batch * shape.units()), memory_(memory) {
    std::fill_n(memory, 3 * size_, 0.0f);
  }

  float* state(int64_t which) { return memory_ + (which == 0 ? turn_ * size_ : 2 * size_); }

  // Steps `begin` and following of the sequence in this direction's order.
  RecurrentChain project(const float* x, float* out, int64_t out_row, int64_t length, Range some) {
    const RecurrentShape& s = shape_;
    // Backwards, the last of these steps is the first in memory.
    const int64_t low = backwards_ ? length - some.end : some.begin;
    float* const projected = memory_ + 3 * size_;
    Epilogue epilogue;
    epilogue.bias = packed_->bias.data();
    const LinearLayer<float> layer{s.sums(), packed_->weight.data(), epilogue, projected};
    linear_group<InFloats>(some.size() * s.batch, s.inputs, x + low * s.batch * s.inputs, {layer},
                           threads());
    const int64_t step = s.batch * s.sums(), last = some.size() - 1;
    const int64_t out_step = s.batch * out_row;
    RecurrentChain chain{};
    chain.weight = packed_->weight.data() + packed_size(s.inputs, s.sums());
    chain.hidden_bias = packed_->bias.data() + s.sums();
    chain.projected = projected + (backwards_ ? last * step : 0);
    chain.projected_step = backwards_ ? -step : step;
    chain.hidden[0] = state(0);
    chain.hidden[1] = memory_ + (1 - turn_) * size_;
    chain.cell = state(1);
    chain.out = out + (backwards_ ? low + last : low) * out_step;
    chain.out_row = out_row;
    chain.out_step = backwards_ ? -out_step : out_step;
    return chain;
  }

  void ran(int64_t steps) { turn_ = (turn_ + steps) % 2; }

 private:
  RecurrentShape shape_;
  bool backwards_;
  PackedPtr packed_;
  int64_t size_;   // of a state
  float* memory_;  // two hidden states in turns, the cells, projected inputs
  int64_t turn_ = 0;
};

// Runs the directions of one layer over `x`, steps x batch x inputs; writes their outputs beside each
// other.
void run_directions(const float* x, int64_t length, const RecurrentShape& s,
                    std::vector<Direction>& directions, int64_t at_once, float* out) {
  const int64_t row = s.hidden * static_cast<int64_t>(directions.size());
  std::vector<RecurrentChain> chains(directions.size());
  for (int64_t begin = 0; begin < length; begin += at_once) {
    const Range some{begin, std::min(begin + at_once, length)};
    for (size_t d = 0; d < directions.size(); d++)
      chains[d] = directions[d].project(x, out + d * s.hidden, row, length, some);
    run_steps(s, chains, some.size(), threads());
    for (Direction& direction : directions) direction.ran(some.size());
  }
}

// A stack of layers as torch describes it. States are layers * directions x batch x hidden.
struct Stack {
  Cell cell;
  at::TensorList parameters;
  bool biases;
  int64_t directions;
  std::vector<Tensor> initial, last;  // the hidden states and, of an LSTM, the cells

  int64_t each() const { return biases ? 4 : 2; }
  int64_t layers() const {
    return static_cast<int64_t>(parameters.size()) / (directions * each());
  }
  Parameters of(int64_t index) const {
    const Tensor* own = &parameters[index * each()];
    return {own[0], own[1], biases ? own[2] : Tensor(), biases ? own[3] : Tensor()};
  }
};

Tensor run_layer(const Tensor& x, Stack& stack, int64_t layer, int64_t hidden) {
  const RecurrentShape s{stack.cell, x.size(1), x.size(2), hidden};
  const int64_t length = x.size(0), first = layer * stack.directions;
  const int64_t at_once = steps_at_once(s, length), own = Direction::floats(s, at_once);
  float* const memory = scratch<5>(stack.directions * own);
  std::vector<Direction> directions;
  for (int64_t d = 0; d < stack.directions; d++) {
    directions.emplace_back(s, stack.of(first + d), memory + d * own, d == 1);
    for (size_t which = 0; which < stack.initial.size(); which++)
      copy_rows(directions[d].state(which), s.units(),
                stack.initial[which].const_data_ptr<float>() + (first + d) * s.batch * hidden,
                hidden, s.batch);
  }
  Tensor out = at::empty({length, s.batch, hidden * stack.directions}, x.options());
  run_directions(x.const_data_ptr<float>(), length, s, directions, at_once,
                 out.mutable_data_ptr<float>());
  for (int64_t d = 0; d < stack.directions; d++)
    for (size_t which = 0; which < stack.last.size(); which++)
      copy_rows(stack.last[which].mutable_data_ptr<float>() + (first + d) * s.batch * hidden,
                hidden, directions[d].state(which), s.units(), s.batch);
  return out;
}

// The output, the last hidden states and, of an LSTM, the last cells, as torch's own functions.
std::vector<Tensor> recurrent(const Tensor& x, at::TensorList state, at::TensorList parameters,
                              int64_t cell, bool biases, bool bidirectional, bool batch_first) {
  Tensor rows = as_float(batch_first ? x.transpose(0, 1) : x);
  TORCH_CHECK(rows.size(0) > 0, "Expected sequence length to be larger than 0 in RNN");
  const int64_t batch = rows.size(1), hidden = state[0].size(2);
  Stack stack{static_cast<Cell>(cell), parameters, biases, bidirectional ? 2 : 1, {}, {}};
  for (const Tensor& tensor : state) {
    stack.initial.push_back(as_float(tensor));
    stack.last.push_back(at::empty(tensor.sizes(), rows.options()));
  }
  if (batch == 0) rows = at::empty({rows.size(0), 0, hidden * stack.directions}, rows.options());
  for (int64_t layer = 0; layer < stack.layers() && batch > 0; layer++)
    rows = run_layer(rows, stack, layer, hidden);
  const Tensor out = rows.to(x.scalar_type());
  std::vector<Tensor> results{batch_first ? out.transpose(0, 1) : out};
  for (const Tensor& tensor : stack.last) results.push_back(tensor.to(x.scalar_type()));
  count(kRecurrent);
  return results;
}

const from_python::Offered offered("openmp_recurrent", from_python::entry<recurrent>);

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  library.def(
      "openmp_recurrent(Tensor x, Tensor[] state, Tensor[] parameters, int cell, bool biases, "
      "bool bidirectional, bool batch_first) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_recurrent", recurrent);
}

}  // namespace kd
