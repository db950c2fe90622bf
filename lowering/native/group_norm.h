// Group norm: mean and variance of each group of an image's channels, scale and shift of each
// channel, an activation. Layer norm of whole images and instance norm are its two ends.
#pragma once

#include <cmath>
#include <vector>

#include "epilogue.h"
#include "moments.h"

namespace kd {

struct GroupNorm {
  int64_t images, groups, channels, pixels;  // channels: of one group
  const float *weight, *bias;  // of all channels of an image, or null
  double eps;
  Act act;
  float a, b;

  int64_t channels_of_image() const { return groups * channels; }
  int64_t numbers_of_image() const { return channels_of_image() * pixels; }
};

// (x - mean) * scale + shift, for each channel. Not x * scale + shift: what the product is rounded by
// grows with the mean, and what is taken off first does not.
struct PerChannel {
  std::vector<float> mean, scale, shift;

  explicit PerChannel(int64_t channels)
      : mean(padded(channels)), scale(padded(channels)), shift(padded(channels)) {}

  static size_t padded(int64_t channels) { return static_cast<size_t>(channels + kLanes); }

  // For the channels of a group; the first one is at `into` here, and at `first` in its image.
  void set(const GroupNorm& n, int64_t into, int64_t first, const Moments& group) {
    const double factor = 1 / std::sqrt(group.squares / group.count + n.eps);
    const float rounded = static_cast<float>(group.mean);
    for (int64_t c = 0; c < n.channels; c++) {
      const double times = n.weight ? n.weight[first + c] : 1, plus = n.bias ? n.bias[first + c] : 0;
      const auto at = static_cast<size_t>(into + c);
      mean[at] = rounded;
      scale[at] = static_cast<float>(factor * times);
      shift[at] = static_cast<float>(plus + (rounded - group.mean) * factor * times);
    }
  }
};

template <class Element>
static inline void store_lanes_of(Element* p, vec v, int lanes) {
  if (lanes == kLanes)
    store_floats(p, v);
  else
    store_floats_first(p, v, lanes);
}

// --- in rows: a group's numbers lie behind each other ---------------------------------------------

template <class Element>
static inline void apply_to_lines(const GroupNorm& n, const PerChannel& by, int64_t from,
                                  int64_t channels, const Element* x, Element* out) {
  with_activation(n.act, [&](auto act) {
    for (int64_t c = 0; c < channels; c++) {
      const auto at = static_cast<size_t>(from + c);
      const vec mean = splat(by.mean[at]), scale = splat(by.scale[at]), shift = splat(by.shift[at]);
      const int64_t line = c * n.pixels;
      for (int64_t i = 0; i < n.pixels; i += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, n.pixels - i));
        const vec v = fma(load_lanes(x + line + i, lanes) - mean, scale, shift);
        store_lanes_of(out + line + i, activate(act, v, n.a, n.b), lanes);
      }
    }
  });
}

// With fewer groups than this a group is divided among threads.
constexpr int64_t kFewGroups = 16;

template <class Element>
static inline void norm_few_groups(const GroupNorm& n, const Element* x, Element* out,
                                   int threads) {
  const int64_t all = n.images * n.groups, size = n.channels * n.pixels;
  const int64_t parts = std::clamp<int64_t>(kMostParts / all, 1, n.channels);
  std::vector<Moments> found(static_cast<size_t>(all * parts));
  for_each_item(all * parts, threads, [&](int64_t item) {
    const Range some = part_of(n.channels, item % parts, parts);
    const Element* const first = x + item / parts * size + some.begin * n.pixels;
    moments_of_lines(&found[static_cast<size_t>(item)], first, Lines{1, some.size() * n.pixels, 0});
  });
  PerChannel by(all * n.channels);
  for (int64_t group = 0; group < all; group++) {
    Moments whole;
    for (int64_t part = 0; part < parts; part++) {
      const Moments& one = found[static_cast<size_t>(group * parts + part)];
      whole.add(one.count, one.mean, one.squares);
    }
    by.set(n, group * n.channels, group % n.groups * n.channels, whole);
  }
  for_each_item(all * parts, threads, [&](int64_t item) {
    const Range some = part_of(n.channels, item % parts, parts);
    const int64_t channel = item / parts * n.channels + some.begin, at = channel * n.pixels;
    apply_to_lines(n, by, channel, some.size(), x + at, out + at);
  });
}

template <class Element>
static inline void norm_in_rows(const GroupNorm& n, const Element* x, Element* out, int threads) {
  const int64_t all = n.images * n.groups, size = n.channels * n.pixels;
  if (all < kFewGroups) return norm_few_groups(n, x, out, threads);
  for_each_item(all, threads, [&](int64_t group) {
    Moments whole;
    moments_of_lines(&whole, x + group * size, Lines{1, size, 0});
    PerChannel by(n.channels);
    by.set(n, 0, group % n.groups * n.channels, whole);
    apply_to_lines(n, by, 0, n.channels, x + group * size, out + group * size);
  });
}

// --- channels last: each lane is a channel --------------------------------------------------------

constexpr int64_t kPixelsAtOnce = 64;  // added up in floats, and these sums in double precision

// Of the distances from some number that is near the mean, for each channel.
struct ChannelSums {
  std::vector<double> sum, squares;

  explicit ChannelSums(int64_t channels)
      : sum(PerChannel::padded(channels)), squares(PerChannel::padded(channels)) {}

  void add(const ChannelSums& other) {
    for (size_t c = 0; c < sum.size(); c++)
      sum[c] += other.sum[c], squares[c] += other.squares[c];
  }
};

template <class Element>
static inline void add_pixels(double* sum, double* squares, const Element* x, int64_t pixels,
                              int64_t channels, const float* near) {
  for (int64_t at = 0; at < pixels; at += kPixelsAtOnce) {
    const int64_t end = std::min(pixels, at + kPixelsAtOnce);
    for (int64_t c = 0; c < channels; c += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, channels - c));
      const vec from = load(near + c);
      vec sums[2] = {}, products[2] = {};
      int64_t pixel = at;
      for (; pixel + 2 <= end; pixel += 2)
        for (int i = 0; i < 2; i++) {
          const vec d = load_lanes(x + (pixel + i) * channels + c, lanes) - from;
          sums[i] += d;
          products[i] = fma(d, d, products[i]);
        }
      if (pixel < end) {
        const vec d = load_lanes(x + pixel * channels + c, lanes) - from;
        sums[0] += d;
        products[0] = fma(d, d, products[0]);
      }
      const vec all = sums[0] + sums[1], all_squares = products[0] + products[1];
      for (int i = 0; i < lanes; i++) sum[c + i] += all[i], squares[c + i] += all_squares[i];
    }
  }
}

// How the pixels of an image are cut: the same for every number of threads, and so are the results.
static inline int64_t parts_of_image(const GroupNorm& n) {
  return std::clamp<int64_t>(n.pixels / kPixelsAtOnce, 1, kMostParts);
}

template <class Element>
static inline ChannelSums sums_of_image(const GroupNorm& n, const Element* x,
                                        const PerChannel& near, int threads) {
  const int64_t channels = n.channels_of_image(), parts = parts_of_image(n);
  std::vector<ChannelSums> found(static_cast<size_t>(parts), ChannelSums(channels));
  for_each_item(parts, threads, [&](int64_t part) {
    const Range some = part_of(n.pixels, part, parts);
    ChannelSums& into = found[static_cast<size_t>(part)];
    add_pixels(into.sum.data(), into.squares.data(), x + some.begin * channels, some.size(),
               channels, near.mean.data());
  });
  for (size_t part = 1; part < found.size(); part++) found[0].add(found[part]);
  return found[0];
}

// Says whether all groups were near enough to their means: else the squares are mostly those of the
// distance, and lose the digits that are asked for.
static inline bool set_from_sums(const GroupNorm& n, const ChannelSums& found, PerChannel& by) {
  bool near = true;
  const double count = static_cast<double>(n.channels * n.pixels);
  for (int64_t first = 0; first < n.channels_of_image(); first += n.channels) {
    double sum = 0, squares = 0;
    for (int64_t c = first; c < first + n.channels; c++)
      sum += found.sum[static_cast<size_t>(c)], squares += found.squares[static_cast<size_t>(c)];
    const double away = sum / count, of_the_distance = away * sum;
    const double rest = squares - of_the_distance;
    near &= !(of_the_distance > rest);
    const double mean = static_cast<double>(by.mean[static_cast<size_t>(first)]) + away;
    by.set(n, first, first, Moments{count, mean, rest < 0 ? 0 : rest});
  }
  return near;
}

// A number near the mean of each group: the mean of a few pixels' channels.
template <class Element>
static inline void guess_means(const GroupNorm& n, const Element* x, PerChannel& by) {
  const int64_t channels = n.channels_of_image(), taken = std::min<int64_t>(n.pixels, 8);
  ChannelSums some(channels);
  add_pixels(some.sum.data(), some.squares.data(), x + (n.pixels - taken) / 2 * channels, taken,
             channels, by.mean.data());
  set_from_sums({1, n.groups, n.channels, taken, nullptr, nullptr, 0, Act::none, 0, 0}, some, by);
}

template <class Element>
static inline void apply_to_pixels(const GroupNorm& n, const PerChannel& by, Range pixels,
                                   const Element* x, Element* out) {
  const int64_t channels = n.channels_of_image();
  with_activation(n.act, [&](auto act) {
    for (int64_t pixel = pixels.begin; pixel < pixels.end; pixel++)
      for (int64_t c = 0; c < channels; c += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, channels - c));
        const int64_t at = pixel * channels + c;
        const vec d = load_lanes(x + at, lanes) - load(by.mean.data() + c);
        const vec v = fma(d, load(by.scale.data() + c), load(by.shift.data() + c));
        store_lanes_of(out + at, activate(act, v, n.a, n.b), lanes);
      }
  });
}

template <class Element>
static inline void norm_pixels(const GroupNorm& n, const Element* x, Element* out, int threads) {
  PerChannel by(n.channels_of_image());
  guess_means(n, x, by);
  if (!set_from_sums(n, sums_of_image(n, x, by, threads), by))
    set_from_sums(n, sums_of_image(n, x, by, threads), by);
  const int64_t parts = parts_of_image(n);
  for_each_item(parts, threads, [&](int64_t part) {
    apply_to_pixels(n, by, part_of(n.pixels, part, parts), x, out);
  });
}

// With fewer images than this an image is divided among threads.
constexpr int64_t kFewImages = 8;

template <class Element>
static inline void norm_channels_last(const GroupNorm& n, const Element* x, Element* out,
                                      int threads) {
  const bool few = n.images < kFewImages;
  for_each_item(n.images, few ? 1 : threads, [&](int64_t image) {
    const int64_t at = image * n.numbers_of_image();
    norm_pixels(n, x + at, out + at, few ? threads : 1);
  });
}

}  // namespace kd
