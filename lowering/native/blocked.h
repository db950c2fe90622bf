// A matrix product in blocks that stay in the caches. Where the operands come from is up to the
// caller: Rows and Columns hand out blocks, made in a buffer if need be.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <limits>

#include "microkernel.h"
#include "pack.h"

namespace kd {

// Addresses with equal low bits compete for the few places that a cache has for them.
// Caches with more places for each of them hold a block of rows of 1024 or 3072 numbers all the same.
static inline bool crowded(int64_t ld) {
#if defined(_SC_LEVEL1_DCACHE_ASSOC)
  static const bool many_places =
      sysconf(_SC_LEVEL1_DCACHE_ASSOC) >= 12 && sysconf(_SC_LEVEL2_CACHE_SIZE) >= 2 << 20;
#else
  constexpr bool many_places = false;
#endif
  return ld % (many_places ? 4096 : 1024) == 0;
}

// A row length of at least `size` whose multiples spread over the whole cache.
static inline int64_t spread_out(int64_t size) { return ceil_div(size, 32) * 32 + 16; }

// Of a block. So many products are summed up by themselves: of 384 in a row, 1.4 times as much as in
// MKL is lost to rounding, of 256 1.15 times; 192 cost 2% of the speed.
constexpr int64_t kDepth = 256;
constexpr int64_t kBlockRows = 160;   // so that a block of rows leaves room in the second cache
constexpr int64_t kRowsBuffer = kBlockRows * (kDepth + 48);
constexpr int64_t kBlockPanels = ceil_div(192, kLanes);
// Columns of the output that a thread works on at once. With AVX2 they stay in the second cache from
// one part of a sum to the next; not measured elsewhere.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t kPanelsAtOnce = 384 / kLanes;
#else
constexpr int64_t kPanelsAtOnce = int64_t{1} << 40;  // all
#endif
static_assert(ceil_div(2, kPanelsAtOnce) == 1);
constexpr int64_t kColumnsBuffer = kBlockPanels * kLanes * kDepth;
constexpr int64_t kTileBuffer = kMostTileRows * kTileWidth * kLanes;

// What the tile-th of `tiles` fetches of the `panels` that come next. Several tiles fetch a panel
// together if they are many enough: memory that is asked for much at once lets the tile wait.
static inline Ahead share_of_fetching(int64_t tile, int64_t tiles, const float* next,
                                      int64_t panels, int64_t across, int64_t depth) {
  const int64_t together = tiles >= 4 * panels ? 4 : tiles >= 2 * panels ? 2 : 1;
  const int64_t panel = tile / together;
  if (panel >= panels) return {next};
  const Range part = part_of(depth, tile % together, together);
  return {next + panel * across + part.begin * kLanes, kLanes / together};
}

// Tiles that take long enough fetch what they write, or add to, at their end. With AVX2 products of
// 128 to 2048 rows are 5 to 10% faster by it; not measured elsewhere.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t kFetchingOutput = 65;  // products
#else
constexpr int64_t kFetchingOutput = int64_t{1} << 40;  // never
#endif

template <bool to_write>
static inline void fetch_rows(const float* from, int64_t ld, int rows, int columns) {
  constexpr int line = 16;
  for (int i = 0; i < rows; i++, from += ld) {
    for (int j = 0; j < columns; j += line) __builtin_prefetch(from + j, to_write, 3);
    __builtin_prefetch(from + columns - 1, to_write, 3);
  }
}

// Panels of short sums stay in the first cache however wide a strip is, and a wide one writes longer runs
// of memory: 1x1 convolutions of 16 to 64 channels to 64 or 128 take a seventh to a quarter less time
// (one thread of a Xeon with AMX).
static inline int64_t strip_width(int64_t depth) {
  constexpr int64_t shortest_of_long = 96;
  return depth > shortest_of_long ? kStripWidth : kTileWidth;
}

// The product of one block of rows with one of panels. Both are cut into tiles of almost equal
// size, as a last small tile would be slow.
static inline void multiply_blocks(Block a, int64_t rows, Block b, int64_t columns, int64_t depth,
                                   float* c, int64_t ldc, const Epilogue& e, Finish finish,
                                   const Block& following) {
  const int64_t widest = strip_width(depth * a.runs);
  const int64_t panels = ceil_div(columns, kLanes), strips = ceil_div(panels, widest);
  const bool in_registers = !finish.last || Limits(e).enough;
  for (int64_t s = 0; s < strips; s++) {
    const Range strip = part_of(panels, s, strips);
    const int width = static_cast<int>(strip.size());
    const int64_t column = strip.begin * kLanes;
    const int wide = static_cast<int>(std::min<int64_t>(columns - column, width * kLanes));
    finish.last_lanes = wide - (width - 1) * kLanes;
    const int64_t tiles = ceil_div(rows, kTileRows[width]);
    const bool final = s + 1 == strips;
    const float* next = final ? following.data : b.data + strip.end * b.across;
    const int64_t nexts = final ? widest : part_of(panels, s + 1, strips).size();
    for (int64_t t = 0; t < tiles; t++) {
      const Range some = part_of(rows, t, tiles);
      const int high = static_cast<int>(some.size());
      Block left = a;
      left.data += some.begin * a.across;
      const Block right{b.data + strip.begin * b.across, b.across, b.along};
      float* to = c + some.begin * ldc + column;
      const Tile tile = tile_of(high, width, finish.last_lanes <= kHalfLanes);
      const Epilogue part = finish.last ? e.at(some.begin, column) : Epilogue{};
      finish.ahead = next != nullptr ? share_of_fetching(t, tiles, next, nexts, b.across, depth)
                                     : Ahead{right.data};
      if (depth * a.runs >= kFetchingOutput) {
        fetch_rows<true>(to, ldc, high, wide);
        if (part.before != nullptr) fetch_rows<false>(part.before, e.ld_before, high, wide);
      }
      if (in_registers) {
        tile(depth, left, right, to, ldc, part, finish);
      } else {
        alignas(64) float sums[kTileBuffer];
        const Finish plain{.ahead = finish.ahead};
        tile(depth, left, right, sums, width * kLanes, part, plain);
        finish_stored(sums, width * kLanes, high, wide, to, ldc, part, finish);
      }
    }
  }
}

constexpr int kFewThreads = 4;  // for more of them, the items of whole tiles may be too few
constexpr double kWorkPerThread = 1e5;  // multiplications that outweigh waking a thread

// 1, 2, 3, 4, 6, 8, 12, 16 ...: counts that are near to any number.
static inline int64_t next_count(int64_t count) {
  return count < 3 ? count + 1 : (count & (count - 1)) == 0 ? count / 2 * 3 : count / 3 * 4;
}

// How a product is cut into items: so many parts of its rows times so many of its columns.
struct Grid {
  int64_t down = 1, across = 1;
  int64_t items() const { return down * across; }
};

// The two kinds of operands cost their `making` for each element that an item needs, and an item
// costs something by itself, in multiplications. Many items let threads wait for each other less.
static inline Grid grid_of(int64_t m, int64_t n, int64_t k, int team, double making_rows,
                           double making_columns) {
  Grid best;
  if (team <= 1) return best;
  constexpr double each = 2e4;
  const int64_t panels = panels_of(n), most = 16 * static_cast<int64_t>(team);
  const int64_t most_down = std::min(most, std::max<int64_t>(1, m / kMostTileRows));
  const int64_t narrowest = team > kFewThreads ? kTileWidth / 2 : kTileWidth;
  const int64_t most_across = std::min(most, std::max<int64_t>(1, panels / narrowest));
  double least = std::numeric_limits<double>::infinity();
  for (int64_t down = 1; down <= most_down; down = next_count(down)) {
    for (int64_t across = 1; across <= most_across && down * across <= most;
         across = next_count(across)) {
      const double rows = static_cast<double>(ceil_div(m, down));
      const double columns = static_cast<double>(ceil_div(panels, across) * kLanes);
      const double item = rows * columns + rows * making_rows + columns * making_columns +
                          each / static_cast<double>(k + 1);
      const double time = item * (static_cast<double>(ceil_div(down * across, team)) + 0.5);
      if (time < least) least = time, best = {down, across};
    }
  }
  return best;
}

// One item of a product.
template <class Rows, class Columns>
void multiply_item(const Grid& grid, int64_t item, int64_t m, int64_t n, int64_t k, const Rows& a,
                   const Columns& b, float* c, int64_t ldc, const Epilogue& e) {
  const Range rows = part_of(m, item / grid.across, grid.down);
  const Range panels = part_of(panels_of(n), item % grid.across, grid.across);
  if (rows.size() == 0 || panels.size() == 0) return;
  const Limits limits(e);
  float* rows_buffer = scratch<0>(kRowsBuffer);
  const int64_t deep_blocks = std::max<int64_t>(ceil_div(k, kDepth), 1);
  const int64_t row_blocks = ceil_div(rows.size(), kBlockRows);
  const auto right_block = [&](Range wide, Range deep) {
    return b.block(panels.begin + wide.begin, wide.size(), deep.begin, deep.size());
  };
  // What this thread is likely to multiply by next: items are handed out in order.
  const int64_t column_blocks = ceil_div(panels.size(), kPanelsAtOnce);
  const auto next_block = [&](Range wide, int64_t row_block, int64_t deep_block) {
    if (deep_block + 1 < deep_blocks) return right_block(wide, part_of(k, deep_block + 1, deep_blocks));
    const Range first = part_of(k, 0, deep_blocks);
    if (row_block + 1 < row_blocks) return right_block(wide, first);
    if (wide.end < panels.size()) return right_block({wide.end, panels.size()}, first);
    if (item + 1 == grid.items()) return Block{};
    const Range others = part_of(panels_of(n), (item + 1) % grid.across, grid.across);
    return b.block(others.begin, others.size(), first.begin, first.size());
  };
  const auto step = [&](Range wide, int64_t row_block, int64_t deep_block, const Block& right) {
    const Range deep = part_of(k, deep_block, deep_blocks);
    const Range some = part_of(rows.size(), row_block, row_blocks);
    const int64_t row = rows.begin + some.begin;
    const int64_t column = (panels.begin + wide.begin) * kLanes;
    const int64_t columns = std::min(wide.size() * kLanes, n - column);
    const Block left = a.block(row, some.size(), deep.begin, deep.size(), rows_buffer);
    const bool last = deep_block + 1 == deep_blocks;
    const Block following = b.at_hand() ? next_block(wide, row_block, deep_block) : Block{};
    const Finish finish{deep_block > 0, last, limits.low, limits.high};
    multiply_blocks(left, some.size(), right, columns, deep.size(), c + row * ldc + column, ldc,
                    e.at(row, column), finish, following);
  };
  if (b.at_hand()) {
    for (int64_t w = 0; w < column_blocks; w++) {
      const Range wide = part_of(panels.size(), w, column_blocks);
      for (int64_t i = 0; i < row_blocks; i++)
        for (int64_t j = 0; j < deep_blocks; j++)
          step(wide, i, j, right_block(wide, part_of(k, j, deep_blocks)));
    }
    return;
  }
  // What has to be made is made once, so its blocks are the outer loops.
  const int64_t wide_blocks = ceil_div(panels.size(), kBlockPanels);
  for (int64_t w = 0; w < wide_blocks; w++) {
    const Range wide = part_of(panels.size(), w, wide_blocks);
    for (int64_t j = 0; j < deep_blocks; j++) {
      const Block right = right_block(wide, part_of(k, j, deep_blocks));
      for (int64_t i = 0; i < row_blocks; i++) step(wide, i, j, right);
    }
  }
}

}  // namespace kd
