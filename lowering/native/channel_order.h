// Images whose channels lie side by side (last), and images of which each channel is a picture of
// its own (in rows): one made of the other.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "partial.h"
#include "turn_over.h"

namespace kd {

// The same as turn_over, number by number.
static inline void turn_over_narrow(const Matrix& m, const float* from, float* to,
                                    int64_t ld_to) {
  for (int64_t j = 0; j < m.columns; j++)
    for (int64_t i = 0; i < m.rows; i++) to[j * ld_to + i] = from[i * m.ld + j];
}

// A few rows whose columns become one line, vector by vector: squares would be almost empty.
template <int rows>
void weave(const Matrix& m, const float* from, float* to, int64_t ld_to) {
  ivec lanes[rows][rows];  // [vector of the line][row]: where each lane's number is, or was
  for (int v = 0; v < rows; v++)
    for (int r = 0; r < rows; r++)
      for (int lane = 0; lane < kLanes; lane++) {
        const int at = v * kLanes + lane;
        lanes[v][r][lane] = at % rows == r ? kLanes + at / rows : lane;
      }
  int64_t j = 0;
  for (; ld_to == rows && j + kLanes <= m.columns; j += kLanes) {
#pragma GCC unroll 8
    for (int v = 0; v < rows; v++) {
      vec line{};
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) line = pick(line, load(from + r * m.ld + j), lanes[v][r]);
      store(to + j * rows + v * kLanes, line);
    }
  }
  turn_over_narrow({rows, m.columns - j, m.ld}, from + j, to + j * ld_to, ld_to);
}

// Some images of so many channels and pixels.
struct Images {
  int64_t count, channels, pixels;
  int64_t floats() const { return count * channels * pixels; }
};

static inline void reorder_channels(const Images& images, const float* from, float* to, bool last,
                                    int threads) {
  constexpr int64_t floats_per_item = 16384;
  constexpr double floats_per_thread = 65536;
  const int64_t channels = images.channels, pixels = images.pixels;
  const auto turn = channels >= kLanes / 2  ? turn_over<float>
                    : last && channels == 2 ? weave<2>
                    : last && channels == 3 ? weave<3>
                    : last && channels == 4 ? weave<4>
                                            : turn_over_narrow;
  const int64_t parts = std::max<int64_t>(1, channels * pixels / floats_per_item);
  threads = useful_threads(threads, static_cast<double>(images.floats()), floats_per_thread);
  for_each_item(images.count * parts, threads, [&](int64_t item) {
    const int64_t image = item / parts * channels * pixels;
    const Range some = part_of(pixels, item % parts, parts);
    const int64_t in_rows = image + some.begin, in_last = image + some.begin * channels;
    if (last)
      turn({channels, some.size(), pixels}, from + in_rows, to + in_last, channels);
    else
      turn({some.size(), channels, channels}, from + in_last, to + in_rows, pixels);
  });
}

}  // namespace kd
