// The extents of a convolution of images.
#pragma once

#include <cstdint>

namespace kd {

// Input [n][h][w][ci], output [n][oh][ow][co]; ci and co are totals over all groups. Padding is that
// above and to the left; how much there is below and to the right follows from the output's size.
struct ConvShape {
  int64_t n, h, w, ci, co, kh, kw, sh, sw, ph, pw, dh, dw, groups, oh, ow;
  // Floats from a pixel to the next: more than its channels where those are some of a larger image's.
  int64_t ldx, ldy;

  int64_t group_inputs() const { return ci / groups; }
  int64_t group_outputs() const { return co / groups; }
  int64_t depth() const { return kh * kw * group_inputs(); }
  int64_t pixels() const { return n * oh * ow; }
  int64_t values() const { return pixels() * co; }
  // Each output pixel depends on one input pixel, the one at the same place.
  bool pointwise() const {
    return kh == 1 && kw == 1 && sh == 1 && sw == 1 && ph == 0 && pw == 0 && oh == h && ow == w;
  }
};

}  // namespace kd
