// Convolutions in tiles that read images where they lie: neighbouring pixels of a line are rows of a tile.
// Gathering what is under all taps takes longer than the tiles where outputs are few.
#pragma once

#include "amx_gemm.h"
#include "direct.h"

#if defined(KD_AMX)

namespace kd::amx {

// The left operand, of one group; a pair of channels is as if it were one float.
template <class Of>
struct ImageLines {
  using Number = Of;
  ConvShape pairs;
  const float* x;
  int64_t group;
};

// How lines of so many pixels are cut into rows of an upper and a lower tile: parts of one line, or
// two short lines.
class LineTiles {
 public:
  struct Tiles {
    int64_t line, pixel;  // of the first row
    int upper, lower;     // how many rows; those of the lower tile follow the others
  };

  LineTiles(int64_t lines, int64_t pixels)
      : lines_(lines), pixels_(pixels), of_line_(ceil_div(pixels, kBlockRows)) {}

  int64_t count() const { return joined() ? ceil_div(lines_, 2) : lines_ * of_line_; }
  Tiles operator[](int64_t index) const {
    const int whole = static_cast<int>(pixels_);
    if (joined()) return {2 * index, 0, whole, 2 * index + 1 < lines_ ? whole : 0};
    const Range some = part_of(pixels_, index % of_line_, of_line_);
    const int count = static_cast<int>(some.size()), lower = count > kTileRows ? count / 2 : 0;
    return {index / of_line_, some.begin, count - lower, lower};
  }

 private:
  bool joined() const { return pixels_ <= kTileRows; }

  int64_t lines_, pixels_, of_line_;
};

// Runs of taps, or a piece of one, that are summed up at once. So many pairs, twice of what is best
// for rows that were copied: the same pixels are read for several taps (measured: Xeon with AMX).
constexpr int64_t kLinesDepthPairs = 2 * kDepthPairs;

struct DeepPart {
  Range runs, piece;
};

static inline std::vector<DeepPart> deep_parts_of(const DirectLines& image) {
  const int64_t run = image.run(), pieces = ceil_div(run, kLinesDepthPairs);
  const int64_t at_once = std::max<int64_t>(kLinesDepthPairs / run, 1);
  std::vector<DeepPart> parts;
  for (int64_t first = 0; first < image.runs(); first += at_once) {
    const Range runs{first, std::min(first + at_once, image.runs())};
    for (int64_t i = 0; i < pieces; i++) {
      const Range tiles = part_of(run / kTilePairs, i, pieces);
      parts.push_back({runs, {tiles.begin * kTilePairs, tiles.end * kTilePairs}});
    }
  }
  return parts;
}

// Some lines of one image times a strip of panels.
template <class Number, class Element>
void multiply_lines(const Product<ImageLines<Number>, Element>& p, const DirectLines& image,
                    const std::vector<DeepPart>& parts, const Pixels& pixels, Range strip,
                    float* sums, Registers& registers, Finishing<halves::Unfinished<Element>>& finishing) {
  const ConvShape& s = p.a.pairs;
  const int64_t column = strip.begin * kLanes;
  const int64_t columns = std::min<int64_t>(p.n - column, strip.size() * kLanes);
  const int64_t first = (pixels.image * s.oh + pixels.lines.begin) * s.ow;
  const LineTiles tiles(pixels.lines.size(), s.ow);
  if (tiles.count() == 1) finishing.rest();
  for (size_t part = 0; part < parts.size(); part++) {
    const auto& [runs, piece] = parts[part];
    const bool last = part + 1 == parts.size();
    const int64_t steps = runs.size() * piece.size() / kTilePairs;
    const Block right = p.panel(strip.begin, runs.begin * image.run() + piece.begin);
    for (int64_t i = 0; i < tiles.count(); i++) {
      const auto [line, pixel, upper, lower] = tiles[i];
      const int64_t row = line * s.ow + pixel;
      const auto block = [&](int64_t at) {
        return image.block(pixels.lines.begin + at / s.ow, at % s.ow, runs, piece.begin);
      };
      const Block above = block(row), below = block(lower > 0 ? row + upper : row);
      const int64_t of_run = piece.size() / kTilePairs;
      const TileRows left{above.data, below.data, above.across, of_run, of_run, above.jump};
      registers.shape(upper, lower);
      float* const at = sums + (parts.size() > 1 ? row : 0) * kStripColumns;
      finishing.spread_over(steps);
      sum_tiles_of<Number, halves::Unfinished<Element>>(lower > 0, strip.size() > 1)(
          steps, left, right, at, at + upper * kStripColumns, part > 0, finishing);
      if (last)
        finishing.start(
            p.unfinished(at, kStripColumns, first + row, upper + lower, column, columns));
    }
  }
}

// So many lines at once that what is copied of them and their sums stay in the second cache.
static inline int64_t lines_at_once(const ConvShape& s, const DirectLines& image) {
  constexpr int64_t most_floats = 64 << 10, most_rows = 768;
  int64_t count = std::min(std::max<int64_t>(most_rows / s.ow, 2), s.oh);
  while (count > 2 && image.floats(count, s.ow) > most_floats) count--;
  return count;
}

template <class Number, class Element>
void multiply_item(const Product<ImageLines<Number>, Element>& p, const Grid& grid, int64_t item) {
  const ConvShape& s = p.a.pairs;
  const Range lines = part_of(s.n * s.oh, item / grid.across, grid.down);
  const Range panels = part_of(panels_of(p.n), item % grid.across, grid.across);
  if (lines.size() == 0 || panels.size() == 0) return;
  DirectLines image(s, p.a.x, p.a.group);
  const std::vector<DeepPart> parts = deep_parts_of(image);
  const int64_t at_once = lines_at_once(s, image), strips = ceil_div(panels.size(), 2);
  float* const sums = scratch<1>(std::max(at_once * s.ow, kBlockRows) * kStripColumns);
  Registers registers;
  Finishing<halves::Unfinished<Element>> finishing;
  for (int64_t first = lines.begin; first < lines.end;) {
    const int64_t number = first / s.oh, end = std::min(lines.end, (number + 1) * s.oh);
    const int64_t blocks = ceil_div(end - first, at_once);
    const Range some = part_of(end - first, 0, blocks);
    const int64_t line = first - number * s.oh;
    const Pixels pixels{number, {line, line + some.size()}, {0, s.ow}};
    image.take(pixels);
    for (int64_t i = 0; i < strips; i++) {
      const Range strip{panels.begin + 2 * i, std::min(panels.begin + 2 * i + 2, panels.end)};
      multiply_lines(p, image, parts, pixels, strip, sums, registers, finishing);
    }
    finishing.rest();
    first += some.size();
  }
}

}  // namespace kd::amx

#endif
