// Two convolutions, one behind the other, one of which is of each channel by itself: what the first
// one computes is used while it is in a cache, and never lies in memory as a whole.
#pragma once

#include <cstring>

#include "conv.h"

namespace kd {

struct ConvStage {
  ConvShape shape;
  const float* packed;
  Epilogue epilogue;
};

static inline bool by_channel(const ConvShape& s) {
  return s.groups == s.ci && s.groups == s.co && s.groups > 1;
}

// Floats between the two that are made at once.
constexpr int64_t kLinesMade = 16 * 1024;
// Below it the second cache holds what is between the two anyway.
constexpr int64_t kWorthPairing = 64 * 1024;
// Above it not even the fewest lines stay there.
constexpr int64_t kMostMade = 8 * kLinesMade;
// Floats of a convolution's weights that some lines at a time may read: more do not stay in the second
// cache beside them (measured: Zen 5, an Xception took 1.04 times as long).
constexpr int64_t kMostWeights = 128 * 1024;
// Lines of a spatial convolution are gathered for each group of channels: there has to be one only.
constexpr int64_t kMostGathered = 4 * kLanes;

// Whether some lines of it are made as they are made alone, number by number.
static inline bool makes_lines(const ConvShape& s) { return s.groups == 1 && !taps_suit(s); }

static inline bool pair_suits(const ConvShape& first, const ConvShape& second) {
  if (first.values() < kWorthPairing || second.values() == 0) return false;
  if (by_channel(second)) {
    const int64_t lines = (second.kh - 1) * second.dh + 1;
    return makes_lines(first) && (first.pointwise() || first.co <= kMostGathered) &&
           lines * second.w * kLanes <= kMostMade;
  }
  return by_channel(first) && second.groups == 1 && second.pointwise() &&
         first.ow * first.co <= kMostMade && second.ci * second.co <= kMostWeights;
}

// Another operand's rows from `first` on.
template <class Rows>
struct RowsFrom {
  static constexpr double kMaking = Rows::kMaking;
  const Rows& all;
  int64_t first;

  Block block(int64_t row, int64_t rows, int64_t k, int64_t depth, float* buffer) const {
    return all.block(first + row, rows, k, depth, buffer);
  }
};

// Some lines of one image, for a few panels of channels.
template <class Rows>
void make_lines(const ConvStage& stage, const Rows& rows, int64_t image, Range lines, Range panels,
                float* to) {
  const ConvShape& s = stage.shape;
  const int64_t depth = s.depth(), first = panels.begin * kLanes;
  const int64_t channels = std::min(panels.end * kLanes, s.co) - first;
  const RowsFrom<Rows> some{rows, (image * s.oh + lines.begin) * s.ow};
  multiply_item(Grid{}, 0, lines.size() * s.ow, channels, depth, some,
                PackedColumns{stage.packed + first * depth, depth}, to, channels,
                stage.epilogue.at(0, first));
}

static inline void make_lines(const ConvStage& stage, DirectLines& from, int64_t image, Range lines,
                              Range panels, float* to) {
  const ConvShape& s = stage.shape;
  const int64_t at_once = direct_lines_at_once(s, from);
  float* const first = to - (image * s.oh + lines.begin) * s.ow * s.co;
  const DirectPart part{s, from, stage.packed, first, stage.epilogue, panels};
  for (int64_t at = lines.begin; at < lines.end; at += at_once)
    direct_blocks(part, {image, {at, std::min(at + at_once, lines.end)}, {0, s.ow}});
}

// Lines of an image, for a few panels of channels, as the convolution behind them needs them.
template <class Inputs>
class MadeLines {
 public:
  MadeLines(const ConvStage& stage, Inputs& inputs, int64_t image, Range panels)
      : stage_(stage), inputs_(inputs), image_(image), panels_(panels),
        channels_(std::min(panels.end * kLanes, stage.shape.co) - panels.begin * kLanes),
        line_(stage.shape.ow * channels_) {}

  int64_t channels() const { return channels_; }

  // The lines of the image from needed.begin on, counted over all images.
  Lines<const float> make(Range needed, float* buffer) {
    const int64_t kept = std::max<int64_t>(held_.end - needed.begin, 0);
    if (kept > 0 && needed.begin > held_.begin)
      std::memmove(buffer, buffer + (needed.begin - held_.begin) * line_,
                   static_cast<size_t>(kept * line_) * sizeof(float));
    const Range missing{needed.begin + kept, needed.end};
    if (missing.size() > 0)
      make_lines(stage_, inputs_, image_, missing, panels_, buffer + kept * line_);
    held_ = needed;
    return {buffer, image_ * stage_.shape.oh + needed.begin};
  }

 private:
  const ConvStage& stage_;
  Inputs& inputs_;
  int64_t image_;
  Range panels_;
  int64_t channels_, line_;
  Range held_{0, 0};
};

// Output lines `mine` of one image, for a few panels of channels.
template <class Inputs>
void depthwise_of_made_lines(const ConvStage& first, const ConvStage& second, Inputs inputs,
                             float* y, int64_t image, Range panels, Range mine) {
  MadeLines<Inputs> made(first, inputs, image, panels);
  ConvShape s = second.shape;
  s.ci = s.ldx = s.groups = made.channels();  // of the buffer; the output keeps all of them
  const int64_t channel = panels.begin * kLanes, line = s.w * s.ci;
  const int64_t reach = (s.kh - 1) * s.dh + 1;
  const int64_t at_once = std::max<int64_t>((kLinesMade / line - reach) / s.sh + 1, 1);
  float* const buffer = scratch<4>(((at_once - 1) * s.sh + reach) * line);
  const float* packed = second.packed + channel * s.kh * s.kw;
  const Epilogue e = second.epilogue.at(0, channel);
  const auto within = [&](int64_t at) { return std::min(std::max<int64_t>(at, 0), s.h); };
  for (int64_t oy = mine.begin; oy < mine.end; oy += at_once) {
    const int64_t end = std::min(oy + at_once, mine.end);
    const int64_t above = oy * s.sh - s.ph, below = (end - 1) * s.sh - s.ph + reach;
    const Lines<const float> lines = made.make({within(above), within(below)}, buffer);
    depthwise_lines(s, lines, packed, {y + channel}, e, {image * s.oh + oy, image * s.oh + end},
                    {0, panels_of(s.ci)});
  }
}

// How the pair is cut: channels into groups of panels, images into bands of lines.
struct PairCut {
  int64_t groups, bands;
};

// Most panels of a group: few enough for the tiles of products, many enough for the buffer.
static inline int64_t most_panels(const ConvStage& first, const ConvStage& second) {
  const ConvShape& s = second.shape;
  if (!first.shape.pointwise()) return panels_of(s.ci);
  const int64_t lines = (s.kh - 1) * s.dh + 1 + s.sh;
  const int64_t fitting = kLinesMade / (lines * s.w * kLanes);
  return std::min<int64_t>(std::max<int64_t>(fitting, 1), kTileWidth);
}

static inline int64_t groups_of_panels(const ConvShape& s, int64_t most) {
  const int64_t panels = panels_of(s.ci), groups = ceil_div(panels, most);
  // The last vector of channels overlaps the one before it, which has to be of the same group.
  return s.ci % kLanes == 0 ? groups : std::max<int64_t>(std::min(groups, panels / 2), 1);
}

// Until the last thread is done: in panels of lines, and some of an item more for waiting. Measured
// (Zen 5, whole networks): groups of one panel cost a tenth, of two next to nothing; bands, the
// lines that both make.
static inline double time_of(const PairCut& cut, const ConvShape& s, int threads) {
  const int64_t panels = ceil_div(panels_of(s.ci), cut.groups);
  const double shared = static_cast<double>((s.kh - 1) * s.dh + 1 - s.sh);
  const double twice = 0.6 * (cut.bands - 1) * std::max(shared, 0.0) / s.h;
  const double item = static_cast<double>(panels * ceil_div(s.oh, cut.bands)) *
                      (panels == 1 ? 1.1 : 1.0) * (1 + twice);
  return item * (static_cast<double>(ceil_div(s.n * cut.groups * cut.bands, threads)) + 0.3);
}

static inline PairCut cut_of(const ConvStage& first, const ConvStage& second, int threads) {
  const ConvShape& s = second.shape;
  const int64_t most = most_panels(first, second);
  PairCut best{groups_of_panels(s, most), 1};
  while (threads > 1 && s.n * best.groups * best.bands < 4 * threads &&
         s.oh / (2 * best.bands) >= 8)
    best.bands *= 2;
  if (threads <= kFewThreads) return best;
  double least = 0.9 * time_of(best, s, threads);
  for (int64_t size = first.shape.pointwise() ? 1 : most; size <= most; size++) {
    for (int64_t bands = 1; s.oh >= 3 * bands; bands++) {
      const PairCut cut{groups_of_panels(s, size), bands};
      if (const double time = time_of(cut, s, threads); time < least) least = time, best = cut;
    }
  }
  return best;
}

static inline void dense_then_depthwise(const ConvStage& first, const ConvStage& second,
                                        const float* x, float* y, int threads) {
  const ConvShape& s = first.shape;
  const ConvShape& d = second.shape;
  const int64_t panels = panels_of(d.ci);
  const double work = static_cast<double>(s.values()) * s.depth();
  threads = useful_threads(threads, work, kWorkPerThread);
  const PairCut cut = cut_of(first, second, threads);
  for_each_item(s.n * cut.groups * cut.bands, threads, [&](int64_t item) {
    const int64_t band = item % cut.bands, group = item / cut.bands % cut.groups;
    const int64_t image = item / cut.bands / cut.groups;
    const Range wide = part_of(panels, group, cut.groups), mine = part_of(d.oh, band, cut.bands);
    if (s.pointwise())
      depthwise_of_made_lines(first, second, MatrixRows{x, s.ldx}, y, image, wide, mine);
    else if (direct_suits(s))
      depthwise_of_made_lines(first, second, DirectLines(s, x), y, image, wide, mine);
    else
      depthwise_of_made_lines(first, second, ImageRows(s, x, 0), y, image, wide, mine);
  });
}

static inline void depthwise_then_pointwise(const ConvStage& first, const ConvStage& second,
                                            const float* x, float* y, int threads) {
  const ConvShape& d = first.shape;
  const int64_t lines = d.n * d.oh, k = d.co, n = second.shape.co, line = d.ow * k;
  const int64_t ldy = second.shape.ldy;
  const double work = static_cast<double>(second.shape.values()) * k;
  threads = useful_threads(threads, work, kWorkPerThread);
  const int64_t at_once = std::min(std::max<int64_t>(2 * kLinesMade / line, 1), lines);
  const int64_t items = threads > 1 ? std::min(ceil_div(lines, at_once), 16 * int64_t{threads}) : 1;
  for_each_item(items, threads, [&](int64_t item) {
    const Range mine = part_of(lines, item, items);
    float* const buffer = scratch<4>(at_once * line);
    for (int64_t at = mine.begin; at < mine.end; at += at_once) {
      const int64_t end = std::min(at + at_once, mine.end), row = at * d.ow;
      depthwise_lines(d, {x}, first.packed, {buffer, at}, first.epilogue, {at, end},
                      {0, panels_of(k)});
      multiply_item(Grid{}, 0, (end - at) * d.ow, n, k, MatrixRows{buffer, k},
                    PackedColumns{second.packed, k}, y + row * ldy, ldy, second.epilogue.at(row, 0));
    }
  });
}

static inline void conv_pair(const ConvStage& first, const ConvStage& second, const float* x,
                             float* y, int threads) {
  (by_channel(second.shape) ? dense_then_depthwise : depthwise_then_pointwise)(first, second, x, y,
                                                                           threads);
}

}  // namespace kd
