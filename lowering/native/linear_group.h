// Linear layers of the same rows at once: threads wait for each other once, and the factor of a
// gated layer is in the cache when it is read, and nowhere else.
#pragma once

#include <vector>

#include "gemm.h"

namespace kd {

// act(x @ weight.T + bias + before) * times + after, or another layer of the same rows for `times`.
template <class Element>
struct LinearLayer {
  int64_t n;
  const float* weight;  // packed
  EpilogueOf<Element> epilogue;
  Element* out;
  const float* gate = nullptr;  // packed
  EpilogueOf<Element> gate_epilogue = {};
};

// What it costs to read an element of either operand once, in multiplications.
struct Reading {
  double rows, columns;
};

struct InFloats {
  using Element = float;
  static int64_t depth(int64_t k) { return k; }
  // Dearer than the rows of images, which come from the operation before: both from the third cache or
  // from memory, and rows of 4096 are copied.
  static Reading reading() { return {48, 24}; }
  static double work(int64_t m, int64_t n, int64_t depth) {
    return static_cast<double>(m) * static_cast<double>(n * depth);
  }
  static void multiply(const Grid& grid, int64_t item, int64_t m, int64_t n, int64_t k,
                       const float* x, const float* weight, float* out, int64_t ld,
                       const Epilogue& e) {
    multiply_item(grid, item, m, n, k, MatrixRows{x, k}, PackedColumns{weight, k}, out, ld, e);
  }
};

// Of a gated layer so much is computed at once that the factor stays in the second cache.
constexpr int64_t kGatedPanels = ceil_div(512, kLanes);
constexpr int64_t kGatedRow = kGatedPanels * kLanes + 16;

template <class Kind, class Element = typename Kind::Element>
void gated_block(Range rows, Range panels, int64_t k, const Element* x,
                 const LinearLayer<Element>& layer) {
  auto* const factor = reinterpret_cast<Element*>(scratch<2>(kBlockRows * kGatedRow));
  const int64_t column = panels.begin * kLanes;
  const int64_t columns = std::min(panels.size() * kLanes, layer.n - column);
  const auto multiply = [&](const float* weight, Element* to, int64_t ld,
                            const EpilogueOf<Element>& e) {
    Kind::multiply(Grid{}, 0, rows.size(), columns, k, x + rows.begin * k,
                   weight + column * Kind::depth(k), to, ld, e);
  };
  multiply(layer.gate, factor, kGatedRow, layer.gate_epilogue.at(rows.begin, column));
  EpilogueOf<Element> e = layer.epilogue.at(rows.begin, column);
  e.times = factor;
  e.ld_times = kGatedRow;
  multiply(layer.weight, layer.out + rows.begin * layer.n + column, layer.n, e);
}

template <class Kind, class Element = typename Kind::Element>
void gated_item(const Grid& grid, int64_t item, int64_t m, int64_t k, const Element* x,
                const LinearLayer<Element>& layer) {
  const Range rows = part_of(m, item / grid.across, grid.down);
  const Range panels = part_of(panels_of(layer.n), item % grid.across, grid.across);
  const int64_t row_blocks = ceil_div(rows.size(), kBlockRows);
  const int64_t wide_blocks = ceil_div(panels.size(), kGatedPanels);
  for (int64_t w = 0; w < wide_blocks; w++) {
    const Range wide = part_of(panels.size(), w, wide_blocks);
    for (int64_t i = 0; i < row_blocks; i++) {
      const Range some = part_of(rows.size(), i, row_blocks);
      gated_block<Kind>({rows.begin + some.begin, rows.begin + some.end},
                        {panels.begin + wide.begin, panels.begin + wide.end}, k, x, layer);
    }
  }
}

// `x` has m rows of k values.
template <class Kind, class Element = typename Kind::Element>
void linear_group(int64_t m, int64_t k, const Element* x,
                  const std::vector<LinearLayer<Element>>& layers, int threads) {
  const int64_t depth = Kind::depth(k);
  double work = 0;
  for (const auto& layer : layers) work += Kind::work(m, layer.n, depth) * (layer.gate ? 2 : 1);
  threads = useful_threads(threads, work, kWorkPerThread);
  const Reading reading = Kind::reading();
  std::vector<Grid> grids;
  int64_t items = 0;
  for (const auto& layer : layers) {
    grids.push_back(grid_of(m, layer.n, depth, threads, reading.rows, reading.columns));
    items += grids.back().items();
  }
  for_each_item(items, threads, [&](int64_t item) {
    size_t i = 0;
    for (; item >= grids[i].items(); i++) item -= grids[i].items();
    const LinearLayer<Element>& layer = layers[i];
    if (layer.gate)
      gated_item<Kind>(grids[i], item, m, k, x, layer);
    else
      Kind::multiply(grids[i], item, m, layer.n, k, x, layer.weight, layer.out, layer.n,
                     layer.epilogue);
  });
}

}  // namespace kd
