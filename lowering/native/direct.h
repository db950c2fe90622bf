// Convolutions whose inputs are read where they lie: neighbouring pixels of a line are rows of a
// product, a kernel's row of taps is what is summed up, and these sums are added to each other.
// Gathering the rows of one large product takes up to a third of the time where outputs are few.
#pragma once

#include "blocked.h"
#include "conv_shape.h"
#include "gemm.h"
#include "image_rows.h"

namespace kd {

// Some lines of the output, and the part of the image that they depend on with zeros around it.
class DirectLines {
 public:
  static constexpr double kMaking = 1;
  static constexpr int64_t kMost = 128 * 1024;  // floats that are copied at once

  DirectLines(const ConvShape& s, const float* x)
      : s_(s), x_(x), columns_((s.ow - 1) * s.sw + (s.kw - 1) * s.dw + 1),
        padded_(s.ph > 0 || s.pw > 0 || columns_ > s.w ||
                (s.oh - 1) * s.sh + (s.kh - 1) * s.dh + 1 > s.h) {}

  // Lines of the image that so many lines of the output need, and their floats.
  int64_t depends_on(int64_t lines) const { return (lines - 1) * s_.sh + (s_.kh - 1) * s_.dh + 1; }
  int64_t floats(int64_t lines) const { return depends_on(lines) * columns_ * s_.ci; }

  // Taps that are neighbours in memory, and how many such runs there are.
  int64_t taps() const { return s_.dw == 1 ? s_.kw : 1; }
  int64_t run() const { return taps() * s_.ci; }
  int64_t runs() const { return s_.kh * s_.kw / taps(); }

  // Before any block of these lines of one image is asked for.
  void take(int64_t image, int64_t line, int64_t lines) {
    const int64_t first = line * s_.sh - s_.ph;
    line_ = line;
    stride_ = (padded_ ? columns_ : s_.w) * s_.ci;
    if (!padded_) {
      from_ = x_ + (image * s_.h + first) * stride_;
      return;
    }
    float* made = scratch<0>(floats(lines));
    from_ = made;
    for (int64_t y = first; y < first + depends_on(lines); y++, made += stride_) {
      const bool outside = y < 0 || y >= s_.h;
      const int64_t begin = outside ? columns_ : std::min(s_.pw, columns_);
      const int64_t end = outside ? columns_ : std::min(columns_, s_.w + s_.pw);
      fill_zero(made, begin * s_.ci);
      if (outside) continue;
      copy_row(made + begin * s_.ci, x_ + (image * s_.h + y) * s_.w * s_.ci,
               (end - begin) * s_.ci);
      fill_zero(made + end * s_.ci, (columns_ - end) * s_.ci);
    }
  }

  // The pixels of a line from one on, and what lies under a run of taps from one of its floats on.
  Block block(int64_t line, int64_t pixel, int64_t run, int64_t skip) const {
    const int64_t per_line = s_.kw / taps();
    const int64_t y = (line - line_) * s_.sh + run / per_line * s_.dh;
    const int64_t x = pixel * s_.sw + run % per_line * s_.dw;
    return {from_ + y * stride_ + x * s_.ci + skip, s_.sw * s_.ci, 1};
  }

 private:
  ConvShape s_;
  const float *x_, *from_ = nullptr;
  int64_t columns_, line_ = 0, stride_ = 0;
  bool padded_;
};

// With many outputs gathering does not count. Short runs are all beginning and end, all the more
// where each of a row's taps is one (measured: Xeon with AVX-512).
static inline bool direct_suits(const ConvShape& s) {
  constexpr int64_t most_outputs = 192;
  if (s.groups > 1 || s.pointwise() || s.co > most_outputs || s.ow < 4) return false;
  const DirectLines lines(s, nullptr);
  const int64_t shortest = lines.taps() == s.kw ? 16 : 48;
  return lines.run() >= shortest && lines.floats(1) <= DirectLines::kMost;
}

// As many lines of an image as make a block of rows.
static inline int64_t direct_lines_at_once(const ConvShape& s, const DirectLines& lines) {
  int64_t count = std::max<int64_t>(1, kBlockRows / s.ow);
  while (count > 1 && lines.floats(count) > DirectLines::kMost) count--;
  return count;
}

// Some lines of one image, and some panels of outputs.
static inline void direct_block(const ConvShape& s, DirectLines& image, Range lines, int64_t number,
                                Range panels, const float* packed, float* y, const Epilogue& e) {
  const PackedColumns weights{packed, s.depth()};
  const Limits limits(e);
  const int64_t column = panels.begin * kLanes;
  const int64_t columns = std::min(panels.size() * kLanes, s.co - column);
  const int64_t pieces = ceil_div(image.run(), kDepth), chunks = ceil_div(s.ow, kBlockRows);
  image.take(number, lines.begin, lines.size());
  for (int64_t run = 0; run < image.runs(); run++) {
    for (int64_t piece = 0; piece < pieces; piece++) {
      const Range deep = part_of(image.run(), piece, pieces);
      const bool last = run + 1 == image.runs() && piece + 1 == pieces;
      const Finish finish{run + piece > 0, last, limits.low, limits.high, nullptr};
      const Block right =
          weights.block(panels.begin, panels.size(), run * image.run() + deep.begin, deep.size());
      for (int64_t line = lines.begin; line < lines.end; line++) {
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
          const Range some = part_of(s.ow, chunk, chunks);
          const int64_t pixel = (number * s.oh + line) * s.ow + some.begin;
          multiply_blocks(image.block(line, some.begin, run, deep.begin), some.size(), right,
                          columns, deep.size(), y + pixel * s.co + column, s.co,
                          e.at(pixel, column), finish, Block{});
        }
      }
    }
  }
}

static inline void direct(const ConvShape& s, const float* x, const float* packed, float* y,
                          const Epilogue& e, int threads) {
  const DirectLines image(s, x);
  const double work = static_cast<double>(s.pixels()) * s.co * s.depth();
  threads = useful_threads(threads, work, kWorkPerThread);
  const Grid grid = grid_of(s.pixels(), s.co, s.depth(), threads, DirectLines::kMaking,
                            PackedColumns::kMaking);
  const int64_t panels = panels_of(s.co), fewest = ceil_div(s.oh, direct_lines_at_once(s, image));
  const int64_t blocks = std::min(s.oh, std::max(fewest, ceil_div(grid.down, s.n)));
  for_each_item(s.n * blocks * grid.across, threads, [&](int64_t item) {
    const int64_t block = item / grid.across;
    DirectLines mine = image;
    direct_block(s, mine, part_of(s.oh, block % blocks, blocks), block / blocks,
                 part_of(panels, item % grid.across, grid.across), packed, y, e);
  });
}

}  // namespace kd
