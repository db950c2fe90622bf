// The steps of a recurrent layer (LSTM, GRU, plain) over a sequence whose inputs were multiplied by
// their weights ahead.
//
// Hidden units lie in blocks: of each, the sums of all gates are adjacent vectors, so a tile of sums
// stays in registers until its units have their next state. Directions and groups of rows of the
// batch do not depend on each other. Each is a chain; threads that share one wait for each other
// after every step.
#pragma once

#include <thread>
#include <vector>

#include "microkernel.h"
#include "pack.h"

namespace kd {

enum class Cell : int { lstm, gru, tanh, relu };

// Vectors of sums in a block, and vectors of units among them.
constexpr int gates_of(Cell cell) { return cell == Cell::lstm ? 4 : cell == Cell::gru ? 3 : 1; }
constexpr int unit_vectors_of(Cell cell) { return gates_of(cell) == 1 ? 4 : 1; }
constexpr int width_of(Cell cell) { return gates_of(cell) * unit_vectors_of(cell); }

struct RecurrentShape {
  Cell cell;
  int64_t batch, inputs, hidden;

  int64_t block_units() const { return unit_vectors_of(cell) * kLanes; }
  int64_t blocks() const { return ceil_div(hidden, block_units()); }
  int64_t units() const { return blocks() * block_units(); }  // with those that fill the last block
  int64_t sums() const { return blocks() * width_of(cell) * kLanes; }  // of one row
};

// Where the sums of a unit's gate stand in a row of sums.
static inline int64_t place_of(const RecurrentShape& s, int gate, int64_t unit) {
  const int64_t block = unit / s.block_units(), within = unit % s.block_units();
  return (block * width_of(s.cell) + gate * unit_vectors_of(s.cell)) * kLanes + within;
}

// One direction of a layer. `projected` and `out` are those of the first step; to the next one may
// be backwards.
struct RecurrentChain {
  const float* weight;       // of the hidden state: packed panels of `hidden` rows
  const float* hidden_bias;  // GRU: of the new state's sum over the hidden state; units() floats
  const float* projected;    // batch x sums()
  int64_t projected_step;
  float* hidden[2];  // states before and after a step, in turns: batch x units()
  float* cell;       // LSTM: batch x units()
  float* out;
  int64_t out_row, out_step;
};

// --- what the sums of a block become ---------------------------------------------------------

struct Update {
  const float* projected;
  const float* hidden_bias;
  const float* before;
  float* after;
  float* cell;
  float* out;
  int lanes;  // units of the block that exist
};

template <int width>
static inline void advance_lstm(const vec (&sums)[width], const Update& u) {
  const auto gate = [&](int g) { return sums[g] + load(u.projected + g * kLanes); };
  const vec kept = sigmoid(gate(1)) * load(u.cell);
  const vec cell = fma(sigmoid(gate(0)), tanh(gate(2)), kept);
  const vec hidden = sigmoid(gate(3)) * tanh(cell);
  store(u.cell, cell);
  store(u.after, hidden);
  store_first(u.out, hidden, u.lanes);
}

template <int width>
static inline void advance_gru(const vec (&sums)[width], const Update& u) {
  const auto projected = [&](int g) { return load(u.projected + g * kLanes); };
  const vec reset = sigmoid(sums[0] + projected(0));
  const vec update = sigmoid(sums[1] + projected(1));
  const vec proposed = tanh(fma(reset, sums[2] + load(u.hidden_bias), projected(2)));
  const vec hidden = fma(update, load(u.before) - proposed, proposed);
  store(u.after, hidden);
  store_first(u.out, hidden, u.lanes);
}

template <bool is_relu, int width>
static inline void advance_plain(const vec (&sums)[width], const Update& u) {
  for (int j = 0; j < width; j++) {
    const vec sum = sums[j] + load(u.projected + j * kLanes);
    const vec hidden = is_relu ? greater_or_second(splat(0.0f), sum) : tanh(sum);
    store(u.after + j * kLanes, hidden);
    const int lanes = std::min(u.lanes - j * kLanes, kLanes);
    if (lanes > 0) store_first(u.out + j * kLanes, hidden, lanes);
  }
}

template <Cell cell, int width>
static inline void advance(const vec (&sums)[width], const Update& u) {
  if constexpr (cell == Cell::lstm)
    advance_lstm(sums, u);
  else if constexpr (cell == Cell::gru)
    advance_gru(sums, u);
  else
    advance_plain<cell == Cell::relu>(sums, u);
}

// --- one step ----------------------------------------------------------------------------------

// Sums of one row would each wait for the one before: there are too few of them to fill the time.
template <int width>
static inline void sums_of_a_row(int64_t depth, const float* row, const Block& weight,
                                 vec (&sums)[width]) {
  vec others[width] = {};
  for (int j = 0; j < width; j++) sums[j] = vec{};
  const float* w = weight.data;
  int64_t p = 0;
  for (; p + 2 <= depth; p += 2, w += 2 * weight.along) {
    const vec first = broadcast(row + p), second = broadcast(row + p + 1);
#pragma GCC unroll 4
    for (int j = 0; j < width; j++) {
      sums[j] = multiply_add(first, load(w + j * weight.across), sums[j]);
      others[j] = multiply_add(second, load(w + weight.along + j * weight.across), others[j]);
    }
  }
  if (p < depth) {
    const vec last = broadcast(row + p);
    for (int j = 0; j < width; j++)
      sums[j] = multiply_add(last, load(w + j * weight.across), sums[j]);
  }
  for (int j = 0; j < width; j++) sums[j] += others[j];
}

// One block of units of some rows, `hidden` and `cell` from the first of them on.
template <Cell cell, int rows>
static void tile_step(const RecurrentShape& s, const RecurrentChain& chain, int64_t block,
                      int64_t row, int64_t step, const float* before, float* after) {
  constexpr int width = width_of(cell);
  const int64_t units = s.units(), unit = block * s.block_units();
  const Block weight{chain.weight + block * width * kLanes * s.hidden, kLanes, width * kLanes};
  const Block left{before + row * units, units, 1};
  const auto finish = [&](int i, const vec (&sums)[width]) __attribute__((always_inline)) {
    const int64_t at = (row + i) * units + unit;
    const float* projected = chain.projected + step * chain.projected_step +
                             (row + i) * s.sums() + block * width * kLanes;
    float* out = chain.out + step * chain.out_step + (row + i) * chain.out_row + unit;
    const int lanes = static_cast<int>(std::min(s.block_units(), s.hidden - unit));
    const float* bias = cell == Cell::gru ? chain.hidden_bias + unit : nullptr;
    float* state = cell == Cell::lstm ? chain.cell + at : nullptr;
    advance<cell>(sums, Update{projected, bias, before + at, after + at, state, out, lanes});
  };
  // Of several rows, the last may be a tile of its own, by how many threads share them; its sums are
  // not to depend on that.
  if (rows == 1 && s.batch == 1) {
    vec sums[width];
    sums_of_a_row<width>(s.hidden, left.data, weight, sums);
    finish(0, sums);
  } else {
    vec stored[rows][width];  // an index into the sums themselves would keep them out of registers
    {
      const Sums<rows, width> tile(s.hidden, left, weight, {weight.data});
#pragma GCC unroll 16
      for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) stored[i][j] = tile.at[i][j];
    }
    for (int i = 0; i < rows; i++) finish(i, stored[i]);
  }
}

using TileStep = void (*)(const RecurrentShape&, const RecurrentChain&, int64_t block, int64_t row,
                          int64_t step, const float* before, float* after);

// As many rows as leave registers for the weights of all gates.
constexpr int most_rows_of(Cell cell) {
  const int width = width_of(cell);
  return width <= kTileWidth ? kTileRows[width] : width == 3 ? 4 : 2;
}

template <Cell cell, int... rows>
static inline TileStep tile_step_of(int count, std::integer_sequence<int, rows...>) {
  static constexpr TileStep all[] = {tile_step<cell, rows + 1>...};
  return all[count - 1];
}

template <Cell cell>
static inline void run_step(const RecurrentShape& s, const RecurrentChain& chain, Range rows,
                            Range blocks, int64_t step, const float* before, float* after) {
  constexpr int most = most_rows_of(cell);
  const int64_t tiles = ceil_div(rows.size(), most);
  for (int64_t block = blocks.begin; block < blocks.end; block++) {
    for (int64_t t = 0; t < tiles; t++) {
      const Range some = part_of(rows.size(), t, tiles);
      const auto tile = tile_step_of<cell>(static_cast<int>(some.size()),
                                           std::make_integer_sequence<int, most>());
      tile(s, chain, block, rows.begin + some.begin, step, before, after);
    }
  }
}

// --- all steps ---------------------------------------------------------------------------------

// Threads that share a chain wait here for each other. They are short of work for a microsecond at
// most, so they spin; on a machine with fewer cores than threads they let others run.
class Meeting {
 public:
  void wait(int members) {
    if (members == 1) return;
    const int64_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
      if (spins > 2000) std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
    }
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> round_{0};
};

constexpr double kWorkPerStep = 3e4;  // multiplications of one thread that outweigh a meeting

// Groups of rows are no smaller than a tile, so that none reads the weights for less.
static inline int64_t row_groups(const RecurrentShape& s, int64_t directions, int threads) {
  const int64_t most = std::max<int64_t>(1, s.batch / most_rows_of(s.cell));
  return std::min(most, ceil_div(threads, directions));
}

static inline int members_of_chain(const RecurrentShape& s, int64_t rows, int64_t chains,
                                   int team) {
  const double work = static_cast<double>(rows) * s.sums() * s.hidden;
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(s.blocks(), team / chains));
  return useful_threads(static_cast<int>(most), work, kWorkPerStep);
}

// Runs `steps` steps of every direction, from the state in `hidden[0]` on; the last state is in
// `hidden[steps % 2]`.
template <Cell cell>
static void run_steps(const RecurrentShape& s, const std::vector<RecurrentChain>& directions,
                      int64_t steps, int threads) {
  const auto count = static_cast<int64_t>(directions.size());
  const int64_t groups = row_groups(s, count, threads), chains = groups * count;
  std::vector<Meeting> meetings(chains);
  const double all = static_cast<double>(steps * s.batch * count) * s.sums() * s.hidden;
  constexpr double waking = 1e5;
  in_parallel(useful_threads(threads, all, waking), [&](int thread, int team) {
    const int members = members_of_chain(s, ceil_div(s.batch, groups), chains, team);
    const auto run = [&](int64_t chain, int member) {
      const RecurrentChain& direction = directions[chain / groups];
      const Range rows = part_of(s.batch, chain % groups, groups);
      const Range blocks = part_of(s.blocks(), member, members);
      for (int64_t step = 0; step < steps; step++) {
        run_step<cell>(s, direction, rows, blocks, step, direction.hidden[step % 2],
                       direction.hidden[1 - step % 2]);
        meetings[chain].wait(members);
      }
    };
    if (chains >= team) {
      const Range mine = part_of(chains, thread, team);
      for (int64_t chain = mine.begin; chain < mine.end; chain++) run(chain, 0);
    } else if (thread / members < chains) {
      run(thread / members, thread % members);
    }
  });
}

static inline void run_steps(const RecurrentShape& s,
                             const std::vector<RecurrentChain>& directions, int64_t steps,
                             int threads) {
  switch (s.cell) {
    case Cell::lstm:
      return run_steps<Cell::lstm>(s, directions, steps, threads);
    case Cell::gru:
      return run_steps<Cell::gru>(s, directions, steps, threads);
    case Cell::tanh:
      return run_steps<Cell::tanh>(s, directions, steps, threads);
    case Cell::relu:
      return run_steps<Cell::relu>(s, directions, steps, threads);
  }
}

}  // namespace kd
