// Convolutions whose inputs are read where they lie: neighbouring pixels of a line are rows of a
// product, and what is summed up are the kernel's rows of taps.
// Gathering the rows of one large product takes up to a third of the time where outputs are few.
#pragma once

#include "blocked.h"
#include "conv_shape.h"
#include "gemm.h"
#include "image_rows.h"

namespace kd {

// Some output pixels of one image: so many of each of these lines.
struct Pixels {
  int64_t image;
  Range lines, columns;
};

// Some pixels of the output, and the part of the image that they depend on with zeros around it. Of a
// group's channels alone, which lie beside each other once they are copied.
class DirectLines {
 public:
  static constexpr double kMaking = 1;
  static constexpr int64_t kMost = 128 * 1024;  // floats that are copied at once

  DirectLines(const ConvShape& s, const float* x, int64_t group = 0)
      : s_(s), x_(x + group * s.group_inputs()), channels_(s.group_inputs()),
        padded_(s.ph > 0 || s.pw > 0 || wide(s.ow) > s.w || high(s.oh) > s.h) {}

  // Lines and columns of the image that so many of the output need, and their floats.
  int64_t high(int64_t lines) const { return (lines - 1) * s_.sh + (s_.kh - 1) * s_.dh + 1; }
  int64_t wide(int64_t columns) const { return (columns - 1) * s_.sw + (s_.kw - 1) * s_.dw + 1; }
  int64_t floats(int64_t lines, int64_t columns) const {
    return high(lines) * wide(columns) * channels_;
  }

  // Taps that are neighbours in memory, and how many such runs there are.
  int64_t taps() const { return s_.dw == 1 ? s_.kw : 1; }
  int64_t run() const { return taps() * channels_; }
  int64_t runs() const { return s_.kh * s_.kw / taps(); }

  // The runs behind these that are summed up at once: they lie at equal distances.
  Range behind(Range runs) const {
    const int64_t in_a_row = s_.dw == 1 ? s_.kh : s_.kw;
    const int64_t left = in_a_row - runs.end % in_a_row;
    const int64_t some = std::min(std::max<int64_t>(kDepth / run(), 1), left);
    return {runs.end, std::min(runs.end + some, this->runs())};
  }

  // Before any block of these pixels is asked for.
  void take(const Pixels& pixels) {
    const int64_t first = pixels.lines.begin * s_.sh - s_.ph;
    const int64_t column = pixels.columns.begin * s_.sw - s_.pw;
    const int64_t columns = wide(pixels.columns.size());
    line_ = pixels.lines.begin, column_ = pixels.columns.begin;
    const float* from = x_ + (pixels.image * s_.h * s_.w + column) * s_.ldx;
    stride_ = copies() ? columns * channels_ : s_.w * s_.ldx;
    from_ = from + first * stride_;
    if (!copies()) return;
    float* made = scratch<0>(floats(pixels.lines.size(), pixels.columns.size()));
    from_ = made;
    const auto within = [&](int64_t at) {
      return std::min(std::max<int64_t>(at - column, 0), columns);
    };
    for (int64_t y = first; y < first + high(pixels.lines.size()); y++, made += stride_) {
      const bool outside = y < 0 || y >= s_.h;
      const int64_t begin = outside ? columns : within(0), end = outside ? columns : within(s_.w);
      fill_zero(made, begin * channels_);
      if (begin < end)
        copy_pixels(made + begin * channels_, from + (y * s_.w + begin) * s_.ldx, end - begin);
      fill_zero(made + end * channels_, (columns - end) * channels_);
    }
  }

  // The pixels of a line from one on, and what lies under runs of taps, from one of the first one's
  // floats on.
  Block block(int64_t line, int64_t pixel, Range runs, int64_t skip) const {
    const int64_t per_line = s_.kw / taps();
    const int64_t y = (line - line_) * s_.sh + runs.begin / per_line * s_.dh;
    const int64_t x = (pixel - column_) * s_.sw + runs.begin % per_line * s_.dw;
    const int64_t distance = s_.dw == 1 ? s_.dh * stride_ : s_.dw * channels_;
    return {from_ + y * stride_ + x * channels_ + skip, s_.sw * channels_, 1, runs.size(),
            distance - run()};
  }

 private:
  bool copies() const { return padded_ || s_.ldx != channels_; }

  void copy_pixels(float* to, const float* from, int64_t count) const {
    if (s_.ldx == channels_) return copy_row(to, from, count * channels_);
    for (int64_t i = 0; i < count; i++) copy_row(to + i * channels_, from + i * s_.ldx, channels_);
  }

  ConvShape s_;
  const float *x_, *from_ = nullptr;
  int64_t channels_, line_ = 0, column_ = 0, stride_ = 0;
  bool padded_;
};

// With many outputs gathering does not count. Where each of a row's taps is a run of its own, short
// runs are all beginning and end (measured: Xeon and EPYC with AVX-512).
static inline bool direct_suits(const ConvShape& s) {
  constexpr int64_t most_outputs = 192, shortest = 48;
  if (s.pointwise() || s.group_outputs() > most_outputs || s.ow < 4) return false;
  const DirectLines lines(s, nullptr);
  return (s.dw == 1 || lines.run() >= shortest) && lines.floats(1, 1) <= DirectLines::kMost;
}

// As many lines of an image as make a block of rows.
static inline int64_t direct_lines_at_once(const ConvShape& s, const DirectLines& lines) {
  int64_t count = std::max<int64_t>(1, kBlockRows / s.ow);
  while (count > 1 && lines.floats(count, s.ow) > DirectLines::kMost) count--;
  return count;
}

// What is computed of one group. `image` is a thread's own.
struct DirectPart {
  const ConvShape& s;
  DirectLines& image;
  const float* packed;
  float* y;
  const Epilogue& e;
  Range panels;
};

// Pixels of which the image fits.
static inline void direct_block(const DirectPart& part, const Pixels& pixels) {
  const ConvShape& s = part.s;
  DirectLines& image = part.image;
  const PackedColumns weights{part.packed, s.depth()};
  const Limits limits(part.e);
  const int64_t column = part.panels.begin * kLanes, line_size = pixels.columns.size();
  const int64_t columns = std::min(part.panels.size() * kLanes, s.group_outputs() - column);
  const int64_t pieces = ceil_div(image.run(), kDepth), chunks = ceil_div(line_size, kBlockRows);
  image.take(pixels);
  for (Range runs{0, 0}; (runs = image.behind(runs)).size() > 0;) {
    for (int64_t piece = 0; piece < pieces; piece++) {
      const Range deep = part_of(image.run(), piece, pieces);
      const bool last = runs.end == image.runs() && piece + 1 == pieces;
      const Finish finish{runs.begin + piece > 0, last, limits.low, limits.high};
      const Block right = weights.block(part.panels.begin, part.panels.size(),
                                        runs.begin * image.run() + deep.begin, deep.size());
      for (int64_t line = pixels.lines.begin; line < pixels.lines.end; line++) {
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
          const Range some = part_of(line_size, chunk, chunks);
          const int64_t first = pixels.columns.begin + some.begin;
          const int64_t row = (pixels.image * s.oh + line) * s.ow + first;
          multiply_blocks(image.block(line, first, runs, deep.begin), some.size(), right, columns,
                          deep.size(), part.y + row * s.ldy + column, s.ldy,
                          part.e.at(row, column), finish, Block{});
        }
      }
    }
  }
}

static inline void direct_blocks(const DirectPart& part, const Pixels& pixels) {
  const Range columns = pixels.columns;
  const int64_t floats = part.image.floats(pixels.lines.size(), columns.size());
  const int64_t most = std::max<int64_t>(1, columns.size() * DirectLines::kMost / floats);
  const int64_t parts = ceil_div(columns.size(), most);
  for (int64_t i = 0; i < parts; i++) {
    const Range some = part_of(columns.size(), i, parts);
    direct_block(part, {pixels.image, pixels.lines,
                        {columns.begin + some.begin, columns.begin + some.end}});
  }
}

static inline void direct(const ConvShape& s, const float* x, const float* packed, float* y,
                          const Epilogue& e, int threads) {
  const int64_t n = s.group_outputs(), panels = panels_of(n);
  const double work = static_cast<double>(s.pixels()) * s.co * s.depth();
  threads = useful_threads(threads, work, kWorkPerThread);
  const Grid grid = grid_of(s.pixels(), n, s.depth(), s.groups >= 4 * threads ? 1 : threads,
                            DirectLines::kMaking, PackedColumns::kMaking);
  const int64_t fewest = ceil_div(s.oh, direct_lines_at_once(s, DirectLines(s, x)));
  const int64_t wanted = ceil_div(grid.down, s.n);
  const int64_t blocks = std::min(s.oh, std::max(fewest, wanted));
  // A sequence is one line.
  const int64_t parts = std::min(ceil_div(wanted, blocks), ceil_div(s.ow, kBlockRows));
  const int64_t of_group = s.n * blocks * parts * grid.across;
  for_each_item(s.groups * of_group, threads, [&](int64_t at) {
    const int64_t group = at / of_group, item = at % of_group;
    const int64_t part = item / grid.across % parts, block = item / grid.across / parts;
    DirectLines mine(s, x, group);
    const Pixels pixels{block / blocks, part_of(s.oh, block % blocks, blocks),
                        part_of(s.ow, part, parts)};
    direct_blocks({s, mine, packed + group * packed_size(s.depth(), n), y + group * n,
                   e.at(0, group * n), part_of(panels, item % grid.across, grid.across)},
                  pixels);
  });
}

}  // namespace kd
