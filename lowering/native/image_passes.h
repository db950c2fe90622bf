// What is done to images pixel by pixel: copies, norms and activations.
#pragma once

#include "channel_norm.h"
#include "placed_images.h"

namespace kd {

// change(vector, channel, lanes) of all vectors of channels of all pixels, on several threads.
template <class Change>
void change_pixels(const PlacedImage& x, const PlacedImage& y, int threads, const Change& change) {
  constexpr int64_t pixels_of_item = 64;
  constexpr double work_of_number = 4;  // in multiplications
  const int64_t pixels = x.pixels(), channels = x.channels();
  const double work = work_of_number * static_cast<double>(pixels) * static_cast<double>(channels);
  const int64_t items = ceil_div(pixels, pixels_of_item);
  for_each_item(items, useful_threads(threads, work, kWorkPerThread), [&](int64_t item) {
    const Range some = part_of(pixels, item, items);
    for (int64_t pixel = some.begin; pixel < some.end; pixel++) {
      const float* from = x.data + pixel * x.ld;
      float* to = y.data + pixel * y.ld;
      int64_t c = 0;
      for (; c + kLanes <= channels; c += kLanes) store(to + c, change(load(from + c), c, kLanes));
      const int left = static_cast<int>(channels - c);
      if (left > 0) store_first(to + c, change(load_first(from + c, left), c, left), left);
    }
  });
}

inline void copy_pixels(const PlacedImage& x, const PlacedImage& y, int threads) {
  change_pixels(x, y, threads, [](vec v, int64_t, int) { return v; });
}

// y = act(scale * x + shift); no scale: an activation alone.
inline void normalize_pixels(const PlacedImage& x, const PlacedImage& y, const ChannelNorm& norm,
                             const Epilogue& e, int threads) {
  with_activation(e.act, [&](auto act) {
    if (norm.scale == nullptr)
      return change_pixels(x, y, threads,
                           [&](vec v, int64_t, int) { return activate(act(), v, e.a, e.b); });
    change_pixels(x, y, threads, [&](vec v, int64_t c, int lanes) {
      return activate(act(), norm.of(v, c, lanes), e.a, e.b);
    });
  });
}

}  // namespace kd
