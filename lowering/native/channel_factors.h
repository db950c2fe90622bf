// Squeeze and excitation: the mean of each channel's pixels, and a factor for each channel of an image
// that a convolution of single pixels reads.
#pragma once

#include "blocked.h"

namespace kd {

// So many pixels are added up as floats, these sums in double precision. Which pixels do not depend
// on the number of threads.
constexpr int64_t kPixelsAtOnce = 64;

// Of some pixels: all channels, four vectors side by side, so that memory is read in runs.
static inline void sums_of_pixels(const float* x, int64_t ld, int64_t pixels, int64_t channels,
                                  float* sums) {
  constexpr int wide = 4;
  int64_t c = 0;
  for (; c + wide * kLanes <= channels; c += wide * kLanes) {
    vec sum[wide] = {};
    for (int64_t p = 0; p < pixels; p++)
#pragma GCC unroll 4
      for (int j = 0; j < wide; j++) sum[j] += load(x + p * ld + c + j * kLanes);
    for (int j = 0; j < wide; j++) store(sums + c + j * kLanes, sum[j]);
  }
  for (; c < channels; c += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(channels - c, kLanes));
    vec sum{};
    for (int64_t p = 0; p < pixels; p++) sum += load_first(x + p * ld + c, lanes);
    store_first(sums + c, sum, lanes);
  }
}

// Of the pixels of images, `ldx` floats from one to the next; of the means so many from image to image.
static inline void means_of_pixels(const float* x, int64_t ldx, int64_t images, int64_t pixels,
                                   int64_t channels, float* means, int64_t ldy, int threads) {
  const int64_t parts = ceil_div(pixels, kPixelsAtOnce);
  float* const sums = scratch<5>(images * parts * channels);
  const double work = static_cast<double>(images) * pixels * channels;
  for_each_item(images * parts, useful_threads(threads, work, kWorkPerThread), [&](int64_t item) {
    const Range some = part_of(pixels, item % parts, parts);
    sums_of_pixels(x + (item / parts * pixels + some.begin) * ldx, ldx, some.size(), channels,
                   sums + item * channels);
  });
  for (int64_t image = 0; image < images; image++) {
    for (int64_t c = 0; c < channels; c++) {
      double sum = 0;
      for (int64_t part = 0; part < parts; part++)
        sum += sums[(image * parts + part) * channels + c];
      means[image * ldy + c] = static_cast<float>(sum / static_cast<double>(pixels));
    }
  }
}

// Rows of `a`, the pixels of images, times a factor for each of an image's channels.
struct ScaledRows {
  static constexpr double kMaking = 6;
  const float* a;
  int64_t lda;
  const float* factors;
  int64_t ld_factors, rows_of_image;

  Block block(int64_t row, int64_t rows, int64_t k, int64_t depth, float* buffer) const {
    const int64_t ld = spread_out(depth);
    for (int64_t i = 0; i < rows; i++) {
      const float* by = factors + (row + i) / rows_of_image * ld_factors + k;
      const float* from = a + (row + i) * lda + k;
      float* to = buffer + i * ld;
      int64_t j = 0;
      for (; j + kLanes <= depth; j += kLanes) store(to + j, load(from + j) * load(by + j));
      const int left = static_cast<int>(depth - j);
      if (left > 0) store_first(to + j, load_first(from + j, left) * load_first(by + j, left), left);
    }
    return {buffer, ld, 1};
  }
};

}  // namespace kd
