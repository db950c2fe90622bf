// Matrix products of halves, or of bytes, in tiles. A tile multiplies so fast that reading memory is most
// of the work. The hardware fetches ahead best when it is left alone: asked for the next panels, it had
// fewer places for the lines that are needed now (up to a quarter slower, two cores of a Xeon).
#pragma once

#include "half_pairs.h"

#if defined(KD_AMX)

namespace kd::amx {

using halves::Product;

constexpr int64_t kStripColumns = 2 * kLanes;
constexpr int64_t kBlockRows = 2 * kTileRows;
// Of a block of rows, so that it stays in the second cache, which is 2 MiB where there are tiles.
constexpr int64_t kRowsBytes = 768 << 10;
// Panels of so many bytes stay there while all rows pass by. Blocks of rows need not be large then, and a
// block's results are rather a run of memory: a strip writes, and reads beside them, one line of each row.
constexpr int64_t kPanelsThatStay = 512 << 10;
constexpr int64_t kResultBytes = 128 << 10;
// Of a strip of panels, so that it stays in the first one while all rows of the block pass by.
constexpr int64_t kDepthPairs = 128;

// What is left to do with the sums of a block. Activations are computed a few rows in every step of the
// next block, as tiles leave the CPU's other instructions most of its time. Where there is none, it is
// mostly stores, which are better done at once.
template <class Unfinished>
class Finishing {
 public:
  void start(const Unfinished& of) {
    rest();
    of_ = of, done_ = 0, finish_ = Unfinished::finisher(of.e.act);
    if (of.e.act == Act::none || of.e.act == Act::relu) rest();
  }
  // All of it, within so many steps.
  void spread_over(int64_t steps) { each_ = ceil_div(of_.rows - done_, steps); }
  __attribute__((always_inline)) void some() {
    if (done_ < of_.rows) some(each_);
  }
  void rest() {
    if (done_ < of_.rows) some(of_.rows - done_);
  }

 private:
  void some(int64_t count) {
    const int64_t end = std::min(done_ + count, of_.rows);
    finish_(of_, {done_, end});
    done_ = end;
  }

  Unfinished of_{};
  void (*finish_)(const Unfinished& of, Range rows) = nullptr;
  int64_t done_ = 0, each_ = 0;
};

// Rows of the upper and the lower tile, `ld` floats apart. They may be several runs of whole tiles, `jump`
// floats from the end of one to the next.
struct TileRows {
  const float *upper, *lower;
  int64_t ld;
  int64_t left_of_run = std::numeric_limits<int64_t>::max(), run = left_of_run, jump = 0;
};

// sums[rows][kStripColumns] (+)= left @ right, `steps` tiles deep.
template <bool lower, bool second, class Number, class Unfinished>
static void sum_tiles(int64_t steps, TileRows left, const Block& right, float* upper_sums,
                      float* lower_sums, bool accumulate, Finishing<Unfinished>& before) {
  constexpr int64_t kSumsRow = kStripColumns * 4, kPanelRow = kLanes * 4;
  constexpr int64_t kStep = kTilePairs;
  memory_is_written();
  if (accumulate) {
    _tile_loadd(0, upper_sums, kSumsRow);
    if constexpr (second) _tile_loadd(1, upper_sums + kLanes, kSumsRow);
    if constexpr (lower) _tile_loadd(2, lower_sums, kSumsRow);
    if constexpr (lower && second) _tile_loadd(3, lower_sums + kLanes, kSumsRow);
  } else {
    _tile_zero(0);
    if constexpr (second) _tile_zero(1);
    if constexpr (lower) _tile_zero(2);
    if constexpr (lower && second) _tile_zero(3);
  }
  const float* panel = right.data;
  for (int64_t step = 0; step < steps; step++, panel += kStep * kLanes) {
    _tile_loadd(4, left.upper, left.ld * 4);
    _tile_loadd(6, panel, kPanelRow);
    add_product<Number, 0, 4, 6>();
    if constexpr (second) {
      _tile_loadd(7, panel + right.across, kPanelRow);
      add_product<Number, 1, 4, 7>();
    }
    if constexpr (lower) {
      _tile_loadd(5, left.lower, left.ld * 4);
      add_product<Number, 2, 5, 6>();
    }
    if constexpr (lower && second) add_product<Number, 3, 5, 7>();
    left.upper += kStep, left.lower += kStep;
    if (__builtin_expect(--left.left_of_run == 0, 0))
      left.upper += left.jump, left.lower += left.jump, left.left_of_run = left.run;
    before.some();
  }
  _tile_stored(0, upper_sums, kSumsRow);
  if constexpr (second) _tile_stored(1, upper_sums + kLanes, kSumsRow);
  if constexpr (lower) _tile_stored(2, lower_sums, kSumsRow);
  if constexpr (lower && second) _tile_stored(3, lower_sums + kLanes, kSumsRow);
}

template <class Unfinished>
using SumTiles = void (*)(int64_t, TileRows, const Block&, float*, float*, bool, Finishing<Unfinished>&);

template <class Number, class Unfinished>
SumTiles<Unfinished> sum_tiles_of(bool lower, bool second) {
  if (lower)
    return second ? sum_tiles<true, true, Number, Unfinished> : sum_tiles<true, false, Number, Unfinished>;
  return second ? sum_tiles<false, true, Number, Unfinished> : sum_tiles<false, false, Number, Unfinished>;
}

// Sums of a block are finished before those of the next one are stored; where k has several parts, those
// of all blocks wait for the last one.
static inline int64_t sums_size(int64_t rows, int64_t parts) {
  return (parts > 1 ? std::max(rows, kBlockRows) : kBlockRows) * kStripColumns;
}

static inline int64_t deep_parts(int64_t pairs) {
  return std::max<int64_t>(ceil_div(pairs, kDepthPairs), 1);
}

// A block of rows times a strip of panels.
template <class AProduct>
void multiply_strip(const AProduct& p, const Block& left, Range rows, Range strip, float* sums,
                    Registers& registers, Finishing<typename AProduct::ToFinish>& finishing) {
  const int64_t column = strip.begin * kLanes;
  const int64_t columns = std::min<int64_t>(p.n - column, strip.size() * kLanes);
  const int64_t steps = p.pairs() / kTilePairs;
  const int64_t parts = deep_parts(p.pairs());
  const int64_t blocks = ceil_div(rows.size(), kBlockRows);
  if (blocks == 1) finishing.rest();
  for (int64_t part = 0; part < parts; part++) {
    const Range deep = part_of(steps, part, parts);
    const Block right = p.panel(strip.begin, deep.begin * kTilePairs);
    for (int64_t i = 0; i < blocks; i++) {
      const Range some = part_of(rows.size(), i, blocks);
      const int count = static_cast<int>(some.size());
      const int lower = count > kTileRows ? count / 2 : 0, upper = count - lower;
      registers.shape(upper, lower);
      float* const at = sums + (parts > 1 ? some.begin : 0) * kStripColumns;
      const float* const a = left.data + some.begin * left.across + deep.begin * kTilePairs;
      finishing.spread_over(std::max<int64_t>(deep.size(), 1));
      sum_tiles_of<typename AProduct::Number, typename AProduct::ToFinish>(lower > 0, strip.size() > 1)(
          deep.size(), {a, a + upper * left.across, left.across}, right, at,
          at + upper * kStripColumns, part > 0, finishing);
      if (part + 1 < parts) continue;
      finishing.start(
          p.unfinished(at, kStripColumns, rows.begin + some.begin, count, column, columns));
    }
  }
}

template <class AProduct>
void multiply_item(const AProduct& p, const Grid& grid, int64_t item) {
  const Range rows = part_of(p.m, item / grid.across, grid.down);
  const Range panels = part_of(panels_of(p.n), item % grid.across, grid.across);
  if (rows.size() == 0 || panels.size() == 0) return;
  const int64_t fitting = kRowsBytes / 4 / std::max<int64_t>(p.pairs(), 1);
  const int64_t results = kResultBytes / static_cast<int64_t>(sizeof(typename AProduct::Element)) / p.n;
  const bool stays = p.n * p.pairs() * 4 <= kPanelsThatStay;
  const int64_t fit = stays ? std::min(fitting, results) : fitting;
  const int64_t most_rows = std::max(fit / kBlockRows, int64_t{stays ? 1 : 2}) * kBlockRows;
  const int64_t row_blocks = ceil_div(rows.size(), most_rows);
  const int64_t strips = ceil_div(panels.size(), 2);
  const int64_t held = std::min(rows.size(), most_rows);
  float* const buffer = scratch<0>(p.rows_buffer(held));
  float* const sums = scratch<1>(sums_size(held, deep_parts(p.pairs())));
  Registers registers;
  Finishing<typename AProduct::ToFinish> finishing;
  for (int64_t i = 0; i < row_blocks; i++) {
    const Range part = part_of(rows.size(), i, row_blocks);
    const Range some{rows.begin + part.begin, rows.begin + part.end};
    const Block left = p.a.block(some.begin, some.size(), buffer);
    for (int64_t s = 0; s < strips; s++) {
      const Range strip{panels.begin + 2 * s, std::min(panels.begin + 2 * s + 2, panels.end)};
      multiply_strip(p, left, some, strip, sums, registers, finishing);
    }
    finishing.rest();
  }
}

}  // namespace kd::amx

#endif
