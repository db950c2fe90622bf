// Products of rows of floats or halves with a weight of bytes, which are made numbers of that kind on the
// way: a few rows are bound by reading the weight, a quarter or half as long as if it were widened ahead.
#pragma once

#include "half_product.h"
#include "int8_words.h"

namespace kd::int8 {

// Tiles of halves multiply so fast that widening pays earlier.
template <class Element>
constexpr int kFewRows = std::is_same_v<Element, float> ? 8 : 4;
// At once in registers, with four sums each.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRowsAtOnce = 4;
#else
constexpr int kRowsAtOnce = 2;
#endif
// Of widened panels, so that they stay in the second cache. It is 2 MiB where there are tiles, which
// pass by all rows for each strip.
template <class Element>
constexpr int64_t kStripBytes = (std::is_same_v<Element, float> ? 256 : 1024) << 10;

// c = epilogue((a @ b) * scale + shift).
template <class Element>
struct Widening {
  int64_t m;
  const Element* a;  // rows of b.k numbers
  Words b;
  OfColumns own;
  Element* c;  // rows of b.n
  EpilogueOf<Element> e;
};

// --- a few rows -----------------------------------------------------------------------------------

// sums[rows][kLanes]; rows of `a` are whole words long.
template <int rows>
static void sum_panel(int64_t words, const float* a, int64_t lda, const float* panel, float* sums) {
  vec at[rows][4] = {};
  for (int64_t p = 0; p < words; p++) {
    const ivec four = (ivec)load(panel + p * kLanes);
#pragma GCC unroll 4
    for (int place = 0; place < 4; place++) {
      const vec weights = bytes_at(four, place);
#pragma GCC unroll 4
      for (int i = 0; i < rows; i++)
        at[i][place] = multiply_add(broadcast(a + i * lda + 4 * p + place), weights, at[i][place]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < rows; i++)
    store(sums + i * kLanes, (at[i][0] + at[i][1]) + (at[i][2] + at[i][3]));
}

template <int most = kRowsAtOnce>
static inline void sum_rows(int64_t rows, int64_t words, const float* a, int64_t lda,
                            const float* panel, float* sums) {
  if constexpr (most > 1)
    if (rows < most) return sum_rows<most - 1>(rows, words, a, lda, panel, sums);
  sum_panel<most>(words, a, lda, panel, sums);
}

template <class Element>
void multiply_few(const Widening<Element>& p, int threads) {
  const int64_t words = p.b.depth(), lda = 4 * words, panels = panels_of(p.b.n);
  float* const floats = scratch<0>(p.m * lda);  // of this thread, and read by all
  for (int64_t i = 0; i < p.m; i++) {
    const Element* const from = p.a + i * p.b.k;
    float* const to = floats + i * lda;
    std::fill(to + p.b.k, to + lda, 0.0f);
    int64_t k = 0;
    for (; k + kLanes <= p.b.k; k += kLanes) store(to + k, load_floats(from + k));
    const int left = static_cast<int>(p.b.k - k);
    if (left > 0) store_first(to + k, load_floats_first(from + k, left), left);
  }
  const double work = static_cast<double>(p.m + 4) * static_cast<double>(p.b.n * words);
  threads = useful_threads(threads, work, kWorkPerThread);
  const auto finish = Unfinished<float, Element>::finisher(p.e.act);
  const int64_t items = std::min<int64_t>(panels, 8 * threads);
  for_each_item(items, threads, [&](int64_t item) {
    const Range some = part_of(panels, item, items);
    for (int64_t panel = some.begin; panel < some.end; panel++) {
      alignas(64) float sums[kFewRows<Element> * kLanes];
      for (int64_t i = 0; i < p.m; i += kRowsAtOnce)
        sum_rows(std::min<int64_t>(p.m - i, kRowsAtOnce), words, floats + i * lda, lda,
                 p.b.panel(panel), sums + i * kLanes);
      const int64_t column = panel * kLanes;
      finish({sums, kLanes, p.m, columns_of_panel(p.b.n, panel), p.c + column, p.b.n,
              p.e.at(0, column), p.own.from(column)},
             {0, p.m});
    }
  });
}

// --- many rows ------------------------------------------------------------------------------------

static inline void widen(float* to, const Words& b, Range panels, float) {
  for (int64_t panel = panels.begin; panel < panels.end; panel++) {
    const float* from = b.panel(panel);
    for (int64_t k = 0; k < b.k; k += 4, from += kLanes) {
      const ivec four = (ivec)load(from);
      for (int place = 0; place < 4 && k + place < b.k; place++, to += kLanes)
        store(to, bytes_at(four, place));
    }
  }
}

// A factor of columns is due before the epilogue, which is done with the results, still in a cache, then.
static inline void multiply_strip(const Widening<float>& p, Range rows, Range panels) {
  const int64_t column = panels.begin * kLanes, k = p.b.k, n = p.b.n;
  const int64_t columns = std::min(panels.size() * kLanes, n - column);
  float* const widened = scratch<2>(panels.size() * kLanes * k);
  widen(widened, p.b, panels, float());
  float* const out = p.c + rows.begin * n + column;
  Epilogue e = p.e.at(rows.begin, column);
  if (!p.own.scale && p.own.shift) e.bias = p.own.shift + column;
  multiply_item(Grid{}, 0, rows.size(), columns, k, MatrixRows{p.a + rows.begin * k, k},
                PackedColumns{widened, k}, out, n, p.own.scale ? Epilogue{} : e);
  if (p.own.scale)
    Unfinished<float, float>::finisher(e.act)(
        {out, n, rows.size(), columns, out, n, e, p.own.from(column)}, {0, rows.size()});
}

#if defined(__AVX512BF16__)
// Two neighbours as a pair of halves, which hold bytes exactly: the lower half of a float is zeros.
static inline vec pair_at(ivec four, int place, BFloat16) {
  const ivec first = (ivec)bytes_at(four, place), second = (ivec)bytes_at(four, place + 1);
  return (vec)(((first >> 16) & 0xffff) | second);
}
static inline vec pair_at(ivec four, int place, Half) {
  const auto bits = [&](int at) { return widened(from_floats(bytes_at(four, at), Half())); };
  return (vec)(bits(place) | bits(place + 1) << 16);
}

template <class Number>
void widen(float* to, const Words& b, Range panels, Number number) {
  const int64_t pairs = halves::pairs_of(b.k);
  for (int64_t panel = panels.begin; panel < panels.end; panel++) {
    const float* from = b.panel(panel);
    for (int64_t i = 0; i < pairs; i += 2, from += kLanes) {
      const ivec four = (ivec)load(from);
      store(to, pair_at(four, 0, number)), to += kLanes;
      if (i + 1 < pairs) store(to, pair_at(four, 2, number)), to += kLanes;
    }
  }
}

template <class Number>
void multiply_strip_of_halves(const Widening<Number>& p, Range rows, Range panels) {
  const int64_t column = panels.begin * kLanes, k = p.b.k;
  const int64_t columns = std::min(panels.size() * kLanes, p.b.n - column);
  float* const widened = scratch<2>(panels.size() * kLanes * halves::pairs_of(k));
  widen(widened, p.b, panels, Number());
  const halves::Product<halves::PairRows<Number>, Number> product{
      rows.size(),
      columns,
      k,
      {p.a + rows.begin * k, k, k},
      widened,
      p.c + rows.begin * p.b.n + column,
      p.b.n,
      p.e.at(rows.begin, column),
      p.own.from(column)};
  halves::multiply(product, Grid{}, 0);
}

static inline void multiply_strip(const Widening<BFloat16>& p, Range rows, Range panels) {
  multiply_strip_of_halves(p, rows, panels);
}
static inline void multiply_strip(const Widening<Half>& p, Range rows, Range panels) {
  multiply_strip_of_halves(p, rows, panels);
}
#endif

// All of it, by threads. Rows are parted where strips are too few for them.
template <class Element>
void multiply(const Widening<Element>& p, int threads) {
  if (p.m <= kFewRows<Element>) return multiply_few(p, threads);
  const int64_t panels = panels_of(p.b.n);
  const int64_t of_panel = std::max<int64_t>(p.b.k, 1) * kLanes * static_cast<int64_t>(sizeof(Element));
  const int64_t most = std::clamp<int64_t>(kStripBytes<Element> / of_panel, 2, 32) / 2 * 2;
  const double work = static_cast<double>(p.m) * static_cast<double>(p.b.n * p.b.k);
  threads = useful_threads(threads, work, kWorkPerThread);
  const int64_t narrow = std::min<int64_t>(ceil_div(panels, 2), 2 * threads);
  const int64_t across = std::max(ceil_div(panels, most), narrow);
  const int64_t down = std::clamp<int64_t>(ceil_div(2 * threads, across), 1, ceil_div(p.m, 32));
  for_each_item(across * down, threads, [&](int64_t item) {
    const Range rows = part_of(p.m, item / across, down);
    const Range some = part_of(panels, item % across, across);
    if (rows.size() > 0 && some.size() > 0) multiply_strip(p, rows, some);
  });
}

}  // namespace kd::int8
