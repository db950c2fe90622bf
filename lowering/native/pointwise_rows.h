// Convolutions of single pixels on images in rows, into images in rows: each channel of the output is
// a sum of channels of the input, and pixels are the lanes. Nothing is reordered.
#pragma once

#include "conv_shape.h"
#include "gemm.h"

namespace kd {

// The pixels of one image; under its channels lies a row of ones, which a bias is multiplied by.
class PixelColumns {
 public:
  static constexpr double kMaking = 6;

  PixelColumns(const float* image, int64_t channels, int64_t pixels)
      : image_(image), channels_(channels), pixels_(pixels) {}

  bool at_hand() const { return false; }

  // All panels at once, so that memory is read in order.
  Block block(int64_t panel, int64_t panels, int64_t k, int64_t depth) const {
    float* const made = scratch<1>(kColumnsBuffer);
    const int64_t size = depth * kLanes, last = panels - 1;
    const int in_last = columns_of_panel(pixels_, panel + last);
    for (int64_t p = 0; p < depth; p++) {
      const float* from = image_ + (k + p) * pixels_ + panel * kLanes;
      const bool ones = k + p == channels_;
      float* to = made + p * kLanes;
      for (int64_t i = 0; i < last; i++, to += size, from += kLanes)
        store(to, ones ? splat(1.0f) : load(from));
      store(to, ones ? splat(1.0f) : in_last == kLanes ? load(from) : load_first(from, in_last));
    }
    return {made, size, kLanes};
  }

 private:
  const float* image_;
  int64_t channels_, pixels_;
};

static inline bool pointwise_rows_suits(const ConvShape& s) {
  return s.pointwise() && s.groups == 1;
}

static inline int64_t pointwise_rows_packed_size(const ConvShape& s) { return s.co * (s.ci + 1); }

// [co][ci + 1], the last of which is the bias; scale: a factor for each output, or nullptr.
static inline void pointwise_rows_pack(float* packed, const float* w, const float* scale,
                                       const float* bias, const ConvShape& s) {
  for (int64_t o = 0; o < s.co; o++, packed += s.ci + 1, w += s.ci) {
    const float factor = scale != nullptr ? scale[o] : 1.0f;
    for (int64_t c = 0; c < s.ci; c++) packed[c] = w[c] * factor;
    packed[s.ci] = bias != nullptr ? bias[o] : 0.0f;
  }
}

// What the epilogue reads beside the output lies in rows as well; it has no bias.
static inline void pointwise_rows(const ConvShape& s, const float* x, const float* packed, float* y,
                                  const Epilogue& e, int threads) {
  const int64_t m = s.co, n = s.h * s.w, k = s.ci + 1;
  threads = useful_threads(threads, static_cast<double>(s.n) * m * n * k, kWorkPerThread);
  const Grid grid = grid_of(m, n, k, s.n >= 4 * threads ? 1 : threads, MatrixRows::kMaking,
                            PixelColumns::kMaking);
  for_each_item(s.n * grid.items(), threads, [&](int64_t at) {
    const int64_t image = at / grid.items();
    multiply_item(grid, at % grid.items(), m, n, k, MatrixRows{packed, k},
                  PixelColumns(x + image * s.ci * n, s.ci, n), y + image * m * n, n,
                  e.at(image * m, 0));
  });
}

}  // namespace kd
