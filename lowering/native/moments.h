// Sums for each channel of a batch: means and variances of BatchNorm, and what its gradient needs.
// Floats are added a few at a time, and these sums in double precision.
#pragma once

#include <algorithm>
#include <vector>

#include "elements.h"
#include "parallel.h"
#include "vec_math.h"

namespace kd {

// x[outer][channels][inner]. Images as torch lays them have inner > 1; matrices, and images with
// their channels last, are `outer` rows of channels.
struct Channels {
  int64_t outer, channels, inner;

  bool in_rows() const { return inner == 1; }
  double count() const { return static_cast<double>(outer * inner); }
};

// Both of some numbers, in double precision.
struct Moments {
  double count = 0, mean = 0, squares = 0;  // of the distances from the mean

  void add(double other_count, double other_mean, double other_squares) {
    const double total = count + other_count, away = other_mean - mean;
    squares += other_squares + away * away * count * other_count / total;
    mean += away * other_count / total;
    count = total;
  }
};

struct Sums {
  double grad = 0, dot = 0;  // of g and of g * (x - mean)
};

constexpr int64_t kRowsAtOnce = 64;      // added up in floats
constexpr int64_t kNumbersAtOnce = 1024;  // of a line, kLanes at a time
constexpr int64_t kGroup = 4 * kLanes;   // channels that a thread takes at a time
constexpr int64_t kMostParts = 64;

// --- channels side by side: each lane is one ------------------------------------------------------

// Adds up f(row, vector of channels) over `rows`, for up to kGroup channels.
template <class Values>
static inline void add_rows(float* sums, int64_t rows, int64_t channels, const Values& values) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= channels; c += 2 * kLanes) {
    vec first{}, second{};
    for (int64_t row = 0; row < rows; row++) {
      first += values(row, c, kLanes);
      second += values(row, c + kLanes, kLanes);
    }
    store(sums + c, first), store(sums + c + kLanes, second);
  }
  for (; c < channels; c += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, channels - c));
    vec sum{};
    for (int64_t row = 0; row < rows; row++) sum += values(row, c, lanes);
    store(sums + c, sum);
  }
}

template <class Element>
static inline vec load_lanes(const Element* p, int lanes) {
  return lanes == kLanes ? load_floats(p) : load_floats_first(p, lanes);
}

static inline void moments_of_rows(Moments* into, const float* x, int64_t row, Range rows,
                                   int64_t channels) {
  for (int64_t at = rows.begin; at < rows.end; at += kRowsAtOnce) {
    const int64_t size = std::min(kRowsAtOnce, rows.end - at);
    const float* const block = x + at * row;
    const auto value = [&](int64_t i, int64_t c, int lanes) {
      return load_lanes(block + i * row + c, lanes);
    };
    float mean[kGroup], off[kGroup], squares[kGroup];
    add_rows(mean, size, channels, value);
    for (int64_t c = 0; c < channels; c++) mean[c] /= static_cast<float>(size);
    add_rows(off, size, channels, [&](int64_t i, int64_t c, int lanes) {
      return value(i, c, lanes) - load(mean + c);
    });
    add_rows(squares, size, channels, [&](int64_t i, int64_t c, int lanes) {
      const vec d = value(i, c, lanes) - load(mean + c);
      return d * d;
    });
    for (int64_t c = 0; c < channels; c++) {  // the mean was rounded: by off / size
      const double rounded = off[c] / static_cast<double>(size);
      into[c].add(static_cast<double>(size), mean[c] + rounded, squares[c] - rounded * off[c]);
    }
  }
}

static inline void sums_of_rows(Sums* into, const float* grad, const float* x, const float* mean,
                                int64_t row, Range rows, int64_t channels) {
  for (int64_t at = rows.begin; at < rows.end; at += kRowsAtOnce) {
    const int64_t size = std::min(kRowsAtOnce, rows.end - at);
    float sum[kGroup], dot[kGroup];
    add_rows(sum, size, channels, [&](int64_t i, int64_t c, int lanes) {
      return load_lanes(grad + (at + i) * row + c, lanes);
    });
    add_rows(dot, size, channels, [&](int64_t i, int64_t c, int lanes) {
      const int64_t place = (at + i) * row + c;
      return load_lanes(grad + place, lanes) *
             (load_lanes(x + place, lanes) - load_lanes(mean + c, lanes));
    });
    for (int64_t c = 0; c < channels; c++) into[c].grad += sum[c], into[c].dot += dot[c];
  }
}

// --- a channel's numbers side by side -------------------------------------------------------------

// Some lines of one channel, or a part of one: `size` numbers each.
struct Lines {
  int64_t count, size, apart;

  double numbers() const { return static_cast<double>(count * size); }
};

// Adds up f(place, lanes) over all numbers; lanes beyond a line's end are zero.
template <class Values>
static inline float add_lines(const Lines& lines, const Values& values) {
  vec first{}, second{};
  const int64_t whole = lines.size - lines.size % kLanes;
  const int lanes = static_cast<int>(lines.size - whole);
  for (int64_t line = 0; line < lines.count; line++) {
    const int64_t start = line * lines.apart;
    int64_t i = 0;
    for (; i + 2 * kLanes <= whole; i += 2 * kLanes) {
      first += values(start + i, kLanes);
      second += values(start + i + kLanes, kLanes);
    }
    if (i < whole) first += values(start + i, kLanes);
    if (lanes > 0) second += values(start + whole, lanes);
  }
  return horizontal_sum(first + second);
}

// body(place, Lines) for pieces of kNumbersAtOnce numbers or a little more.
template <class Body>
static inline void for_each_piece(const Lines& all, const Body& body) {
  const int64_t together = std::max<int64_t>(1, kNumbersAtOnce / all.size);
  for (int64_t line = 0; line < all.count; line += together) {
    const int64_t count = std::min(together, all.count - line);
    for (int64_t i = 0; i < all.size; i += kNumbersAtOnce) {
      const int64_t size = std::min(kNumbersAtOnce, all.size - i);
      body(line * all.apart + i, Lines{count, size, all.apart});
    }
  }
}

template <class Element>
static inline vec distances(const Element* p, int lanes, vec mean) {
  vec d = load_lanes(p, lanes) - mean;
  if (lanes == kLanes) return d;
  for (int i = lanes; i < kLanes; i++) d[i] = 0;
  return d;
}

template <class Element>
static inline void moments_of_lines(Moments* into, const Element* x, const Lines& all) {
  for_each_piece(all, [&](int64_t at, const Lines& lines) {
    const Element* const piece = x + at;
    const float count = static_cast<float>(lines.numbers());
    const vec mean = splat(
        add_lines(lines, [&](int64_t i, int lanes) { return load_lanes(piece + i, lanes); }) /
        count);
    const double off = add_lines(
        lines, [&](int64_t i, int lanes) { return distances(piece + i, lanes, mean); });
    const double squares = add_lines(lines, [&](int64_t i, int lanes) {
      const vec d = distances(piece + i, lanes, mean);
      return d * d;
    });
    const double rounded = off / count;  // the mean was rounded, by this
    into->add(count, mean[0] + rounded, squares - rounded * off);
  });
}

static inline void sums_of_lines(Sums* into, const float* grad, const float* x, float mean,
                                 const Lines& all) {
  for_each_piece(all, [&](int64_t at, const Lines& lines) {
    into->grad += add_lines(
        lines, [&](int64_t i, int lanes) { return load_lanes(grad + at + i, lanes); });
    into->dot += add_lines(lines, [&](int64_t i, int lanes) {
      return load_lanes(grad + at + i, lanes) * distances(x + at + i, lanes, splat(mean));
    });
  });
}

// --- a whole batch --------------------------------------------------------------------------------

// What one thread computes at a time: some channels of some of the outer dimension. The same for
// every number of threads, and so are the results.
struct Parts {
  int64_t groups, group, parts;

  explicit Parts(const Channels& s)
      : groups(s.in_rows() ? ceil_div(s.channels, kGroup) : s.channels),
        group(s.in_rows() ? kGroup : 1),
        parts(std::clamp<int64_t>(kMostParts / groups, 1,
                                  ceil_div(s.outer, s.in_rows() ? kRowsAtOnce : 1))) {}
};

// of_rows(into, first number, Range rows, channels) and of_lines(into, channel, first number,
// Lines) fill one Result for each channel; results[part * channels + channel].
template <class Result, class OfRows, class OfLines>
static inline std::vector<Result> over_channels(const Channels& s, int threads,
                                                const OfRows& of_rows, const OfLines& of_lines) {
  const Parts p(s);
  std::vector<Result> results(static_cast<size_t>(p.parts * s.channels));
  for_each_item(p.groups * p.parts, threads, [&](int64_t item) {
    const int64_t part = item / p.groups, channel = item % p.groups * p.group;
    const Range outer = part_of(s.outer, part, p.parts);
    Result* const into = results.data() + part * s.channels + channel;
    if (s.in_rows())
      of_rows(into, channel, outer, std::min(p.group, s.channels - channel));
    else
      of_lines(into, channel, (outer.begin * s.channels + channel) * s.inner,
               Lines{outer.size(), s.inner, s.channels * s.inner});
  });
  return results;
}

}  // namespace kd
