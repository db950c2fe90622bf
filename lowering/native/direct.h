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

  // Whether nothing is between the pixels of a line.
  bool lie_close() const { return s_.ldx == channels_; }

  // Of these columns, those whose taps all lie within a line of the image.
  Range inside(Range columns) const {
    const int64_t before = ceil_div(s_.pw, s_.sw), reach = wide(1), last = s_.w + s_.pw - reach;
    const int64_t begin = std::min(std::max(columns.begin, before), columns.end);
    const int64_t end = last < 0 ? begin : std::min(columns.end, last / s_.sw + 1);
    return {begin, std::max(begin, end)};
  }

  // The runs of taps that lie on lines of the image, for a line of the output.
  Range runs_inside(int64_t line) const {
    const int64_t first = line * s_.sh - s_.ph, per_line = s_.kw / taps();
    const auto lines_before = [&](int64_t y) {
      return y <= 0 ? 0 : std::min(ceil_div(y, s_.dh), s_.kh);
    };
    return {lines_before(-first) * per_line, lines_before(s_.h - first) * per_line};
  }

  // Whether pixels whose taps lie within the image's lines are best read where they lie. A few
  // pixels of a line are no good tile.
  bool suits_in_place(const Pixels& pixels) const {
    constexpr int64_t fewest = 12;
    if (!lie_close() || inside(pixels.columns).size() < fewest) return false;
    for (int64_t line = pixels.lines.begin; line < pixels.lines.end; line++)
      if (runs_inside(line).size() <= 0) return false;
    return true;
  }

  // Before any block of these pixels is asked for. Only taps within the image may be read.
  void take_in_place(const Pixels& pixels) {
    line_ = pixels.lines.begin, column_ = pixels.columns.begin, stride_ = s_.w * s_.ldx;
    from_ = x_ + (pixels.image * s_.h * s_.w + column_ * s_.sw - s_.pw) * s_.ldx +
            (line_ * s_.sh - s_.ph) * stride_;
  }

  // The same, with zeros where taps lie beside the image.
  void take(const Pixels& pixels) {
    if (!copies()) return take_in_place(pixels);
    const int64_t first = pixels.lines.begin * s_.sh - s_.ph;
    const int64_t column = pixels.columns.begin * s_.sw - s_.pw;
    const int64_t columns = wide(pixels.columns.size());
    line_ = pixels.lines.begin, column_ = pixels.columns.begin;
    const float* from = x_ + (pixels.image * s_.h * s_.w + column) * s_.ldx;
    stride_ = columns * channels_;
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

  // From a line of the output to the next, for a block that goes down a column.
  int64_t from_line_to_line() const { return s_.sh * stride_; }

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
  bool copies() const { return padded_ || !lie_close(); }

  void copy_pixels(float* to, const float* from, int64_t count) const {
    if (lie_close()) return copy_row(to, from, count * channels_);
    if (channels_ == kLanes) return copy_vectors(to, from, count);
    for (int64_t i = 0; i < count; i++) copy_row(to + i * channels_, from + i * s_.ldx, channels_);
  }

  // Groups often have as many channels, for which a loop of any length is mostly beginning and end.
  void copy_vectors(float* to, const float* from, int64_t count) const {
    for (int64_t i = 0; i < count; i++) store(to + i * kLanes, load(from + i * s_.ldx));
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

// As many lines of an image as make a block of rows. Where they are read as they lie, so many that the
// columns at the edges of the image are good tiles.
static inline int64_t direct_lines_at_once(const ConvShape& s, const DirectLines& lines) {
  const int64_t fewest = lines.lie_close() ? kTileRows[2] : 1;
  int64_t count = std::max(fewest, kBlockRows / s.ow);
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

// Some of what a sum is made of: parts of some runs of taps.
struct Summands {
  Range runs, deep;
  bool last;  // of their runs
};

// use(summands) for all of them, in order.
template <class Use>
void for_each_summands(const DirectLines& image, const Use& use) {
  const int64_t pieces = ceil_div(image.run(), kDepth);
  for (Range runs{0, 0}; (runs = image.behind(runs)).size() > 0;)
    for (int64_t piece = 0; piece < pieces; piece++)
      use(Summands{runs, part_of(image.run(), piece, pieces), piece + 1 == pieces});
}

// The product for rows of pixels, of which `all` runs of taps count.
struct DirectRows {
  const DirectPart& part;
  const Summands& sum;
  Range all;

  void multiply(Block left, int64_t rows, int64_t row, int64_t ldc, const Epilogue& e) const {
    const ConvShape& s = part.s;
    const Limits limits(part.e);
    const int64_t column = part.panels.begin * kLanes, run = part.image.run();
    const int64_t columns = std::min(part.panels.size() * kLanes, s.group_outputs() - column);
    const int64_t first = std::max(sum.runs.begin, all.begin);
    left.runs = std::min(sum.runs.end, all.end) - first;
    if (left.runs <= 0) return;
    const Finish finish{first > all.begin || sum.deep.begin > 0,
                        first + left.runs == all.end && sum.last, limits.low, limits.high};
    const Block right =
        PackedColumns{part.packed, s.depth()}.block(part.panels.begin, part.panels.size(),
                                                    first * run + sum.deep.begin, sum.deep.size());
    multiply_blocks(left, rows, right, columns, sum.deep.size(), part.y + row * s.ldy + column, ldc,
                    e.at(row, column), finish, Block{});
  }
};

// Pixels that were taken, line by line; of the runs of taps all, or those that lie on the image.
static inline void direct_lines(const DirectPart& part, const Pixels& pixels, bool in_place) {
  const ConvShape& s = part.s;
  const DirectLines& image = part.image;
  const int64_t chunks = ceil_div(pixels.columns.size(), kBlockRows);
  for_each_summands(image, [&](const Summands& sum) {
    for (int64_t line = pixels.lines.begin; line < pixels.lines.end; line++) {
      const Range all = in_place ? image.runs_inside(line) : Range{0, image.runs()};
      const Range runs{std::max(sum.runs.begin, all.begin), sum.runs.end};
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const Range some = part_of(pixels.columns.size(), chunk, chunks);
        const int64_t first = pixels.columns.begin + some.begin;
        const int64_t row = (pixels.image * s.oh + line) * s.ow + first;
        DirectRows{part, sum, all}.multiply(image.block(line, first, runs, sum.deep.begin),
                                            some.size(), row, s.ldy, part.e);
      }
    }
  });
}

// A column of pixels as one block, from line to line.
static inline void direct_column(const DirectPart& part, const Pixels& pixels) {
  const ConvShape& s = part.s;
  DirectLines& image = part.image;
  const int64_t line = pixels.lines.begin, column = pixels.columns.begin;
  image.take(pixels);
  Epilogue e = part.e.at((pixels.image * s.oh + line) * s.ow + column, 0);
  e.ld_before *= s.ow, e.ld_times *= s.ow, e.ld_after *= s.ow;
  DirectPart down{s, image, part.packed, part.y + ((pixels.image * s.oh + line) * s.ow + column) * s.ldy,
                  e, part.panels};
  for_each_summands(image, [&](const Summands& sum) {
    Block left = image.block(line, column, sum.runs, sum.deep.begin);
    left.across = image.from_line_to_line();
    DirectRows{down, sum, {0, image.runs()}}.multiply(left, pixels.lines.size(), 0, s.ow * s.ldy, e);
  });
}

// Pixels at the edge of an image, whose taps lie beside it too.
static inline void direct_edge(const DirectPart& part, const Pixels& pixels) {
  const Range columns = pixels.columns;
  if (columns.size() > pixels.lines.size()) {
    part.image.take(pixels);
    return direct_lines(part, pixels, false);
  }
  for (int64_t at = columns.begin; at < columns.end; at++)
    direct_column(part, {pixels.image, pixels.lines, {at, at + 1}});
}

// Pixels of which the image fits. To copy all of it for the zeros around it would take a tenth of the
// time where outputs are few.
static inline void direct_block(const DirectPart& part, const Pixels& pixels) {
  DirectLines& image = part.image;
  if (!image.suits_in_place(pixels)) {
    image.take(pixels);
    return direct_lines(part, pixels, false);
  }
  const Range inside = image.inside(pixels.columns);
  const Pixels within{pixels.image, pixels.lines, inside};
  image.take_in_place(within);
  direct_lines(part, within, true);
  direct_edge(part, {pixels.image, pixels.lines, {pixels.columns.begin, inside.begin}});
  direct_edge(part, {pixels.image, pixels.lines, {inside.end, pixels.columns.end}});
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

// Floats of an image. Of a larger one all groups are computed of some lines before the next lines, which
// are read from memory once then (groups of 16 channels at 112x112 and 56x56: a tenth to a fifth less
// time). Of a smaller one the weights are what is better read once.
constexpr int64_t kImageThatStays = 256 << 10;

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
  const bool by_lines = s.h * s.w * s.ci > kImageThatStays;
  for_each_item(s.groups * of_group, threads, [&](int64_t at) {
    const int64_t group = by_lines ? at % s.groups : at / of_group;
    const int64_t item = by_lines ? at / s.groups : at % of_group;
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
