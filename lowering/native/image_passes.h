// What is done to images pixel by pixel: copies, norms, activations, sums and products.
#pragma once

#include "channel_norm.h"
#include "placed_images.h"

namespace kd {

// change(pixel) is a function of (vector, channel, lanes) for all vectors of that pixel's channels.
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
      const auto changed = change(pixel);
      int64_t c = 0;
      for (; c + kLanes <= channels; c += kLanes) store(to + c, changed(load(from + c), c, kLanes));
      const int left = static_cast<int>(channels - c);
      if (left > 0) store_first(to + c, changed(load_first(from + c, left), c, left), left);
    }
  });
}

inline void copy_pixels(const PlacedImage& x, const PlacedImage& y, int threads) {
  change_pixels(x, y, threads,
                [](int64_t) { return [](vec v, int64_t, int) { return v; }; });
}

// Each pixel of x as often as y is larger.
inline void enlarge(const PlacedImage& x, const PlacedImage& y, int threads) {
  const int64_t height = y.sizes[2], width = x.sizes[3], channels = x.channels();
  const int64_t lines = y.sizes[0] * height;
  const int64_t down = height / std::max<int64_t>(x.sizes[2], 1);
  const int64_t right = y.sizes[3] / std::max<int64_t>(width, 1);
  const double work = 2.0 * static_cast<double>(y.pixels()) * static_cast<double>(channels);
  for_each_item(lines, useful_threads(threads, work, kWorkPerThread), [&](int64_t line) {
    const float* from = x.data + (line / height * x.sizes[2] + line % height / down) * width * x.ld;
    float* to = y.data + line * y.sizes[3] * y.ld;
    for (int64_t pixel = 0; pixel < width; pixel++, from += x.ld)
      for (int64_t i = 0; i < right; i++, to += y.ld) {
        int64_t c = 0;
        for (; c + kLanes <= channels; c += kLanes) store(to + c, load(from + c));
        const int left = static_cast<int>(channels - c);
        if (left > 0) store_first(to + c, load_first(from + c, left), left);
      }
  });
}

// A row of numbers, if there is one: one for each channel of a pixel.
struct RowIfAny {
  const float* data;

  template <class Use>
  __attribute__((always_inline)) vec apply(vec v, int64_t c, int lanes, const Use& use) const {
    if (data == nullptr) return v;
    return use(v, lanes == kLanes ? load(data + c) : load_first(data + c, lanes));
  }
};

// Factors of each image's channels, `ld` from an image to the next.
struct ImageFactors {
  const float* data = nullptr;
  int64_t ld = 0;
};

// y = act((scale * x + shift) * factors + before) * times + after, of which only x has to be there. y
// may lie where one of the operands does. The epilogue has no bias.
inline void pointwise_pass(const PlacedImage& x, const PlacedImage& y, const ChannelNorm& norm,
                           const ImageFactors& factors, const Epilogue& e, int threads) {
  const int64_t of_image = std::max<int64_t>(x.sizes[2] * x.sizes[3], 1);
  const auto times = [](vec v, vec row) { return v * row; };
  const auto plus = [](vec v, vec row) { return v + row; };
  with_activation(e.act, [&](auto act) {
    change_pixels(x, y, threads, [&](int64_t pixel) {
      const Epilogue at = e.at(pixel, 0);
      const RowIfAny of_channels{factors.data ? factors.data + pixel / of_image * factors.ld : nullptr};
      return [&norm, &times, &plus, act, at, of_channels](vec v, int64_t c, int lanes) {
        if (norm.scale != nullptr) v = norm.of(v, c, lanes);
        v = of_channels.apply(v, c, lanes, times);
        v = RowIfAny{at.before}.apply(v, c, lanes, plus);
        v = activate(act(), v, at.a, at.b);
        v = RowIfAny{at.times}.apply(v, c, lanes, times);
        return RowIfAny{at.after}.apply(v, c, lanes, plus);
      };
    });
  });
}

}  // namespace kd
