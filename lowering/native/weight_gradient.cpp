// Gradients of the weights of convolutions without groups, of images channels last.
//
// Of each tap a product: outputs x pixels, by pixels x inputs, one of them moved. Some hundred pixels
// at a time are laid out once for all taps, the image with its zeros around it; a chain is as long.

#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <vector>

#include "counters.h"
#include "from_python.h"
#include "image_tensors.h"
#include "microkernel.h"
#include "parallel.h"

namespace kd {
namespace {

constexpr int kVectors = 2;                     // of inputs
constexpr int kOutputs = kLanes == 16 ? 12 : 6;  // accumulators beside them fill the registers
constexpr int64_t kInputs = kVectors * kLanes;
constexpr int64_t kPixels = 256;  // in a chain of sums, up to twice as many
constexpr int64_t kLaidOut = 4 << 20;  // floats of images for a chunk

struct Window {
  int64_t taps[2], stride[2], padding[2], dilation[2];

  // So many pixels of an image are read for so many outputs.
  int64_t reach(int dim, int64_t outputs) const {
    return (outputs - 1) * stride[dim] + (taps[dim] - 1) * dilation[dim] + 1;
  }
};

struct Sizes {
  int64_t images, inputs, outputs, image[2], result[2];
};

// A line of outputs: of which image, the how manieth, and where what it reads was laid out.
struct Line {
  int64_t image, row, at;
};

// Lines whose gradients are multiplied together.
struct Chunk {
  std::vector<Line> lines;
  int64_t laid_out = 0;  // pixels of images

  // As many lines of an image as are left and fit in, then those of the next one.
  Chunk(const Window& window, const Sizes& s, int64_t first, int64_t last) {
    const int64_t width = window.reach(1, s.result[1]);
    for (int64_t line = first; line < last;) {
      const int64_t image = line / s.result[0], row = line % s.result[0];
      const int64_t rows = std::min(last - line, s.result[0] - row);
      for (int64_t i = 0; i < rows; i++)
        lines.push_back({image, row + i, laid_out + i * window.stride[0] * width});
      laid_out += window.reach(0, rows) * width;
      line += rows;
    }
  }
};

// So that all chunks have about as many. Where a pixel is the result of a whole image, so many
// pixels would be as many images: there the memory that they are laid out in decides.
int64_t lines_of_chunk(const Window& window, const Sizes& s) {
  const int64_t lines = s.images * s.result[0];
  const int64_t laid_out = lines * window.reach(0, 1) * window.reach(1, s.result[1]) * s.inputs;
  const int64_t chunks = std::max({int64_t{1}, lines * s.result[1] / kPixels, laid_out / kLaidOut});
  return ceil_div(lines, std::min(chunks, lines));
}

// `count` channels of a pixel, and zeros behind them.
template <int64_t width>
inline void lay_out(float* to, const float* from, int64_t count) {
  for (int64_t c = 0; c < width; c++) to[c] = c < count ? from[c] : 0.0f;
}

template <>
inline void lay_out<kInputs>(float* to, const float* from, int64_t count) {
  if (count < kInputs) {
    for (int64_t c = 0; c < kInputs; c++) to[c] = c < count ? from[c] : 0.0f;
  } else {
    for (int v = 0; v < kVectors; v++) store(to + v * kLanes, load(from + v * kLanes));
  }
}

void lay_out_gradient(float* to, const float* grad, const Chunk& chunk, const Sizes& s,
                      int64_t first) {
  const int64_t count = std::min<int64_t>(kOutputs, s.outputs - first);
  for (const Line& line : chunk.lines) {
    const float* from =
        grad + (line.image * s.result[0] + line.row) * s.result[1] * s.outputs + first;
    for (int64_t x = 0; x < s.result[1]; x++, from += s.outputs, to += kOutputs)
      lay_out<kOutputs>(to, from, count);
  }
}

void lay_out_row(float* to, const float* row, const Window& window, const Sizes& s, int64_t count) {
  const int64_t width = window.reach(1, s.result[1]);
  for (int64_t x = 0; x < width; x++, to += kInputs) {
    const int64_t at = x - window.padding[1];
    const bool inside = row != nullptr && at >= 0 && at < s.image[1];
    lay_out<kInputs>(to, inside ? row + at * s.inputs : row, inside ? count : 0);
  }
}

// What lines of one image read lies once, also where they overlap.
void lay_out_image(float* to, const float* image, const Chunk& chunk, const Window& window,
                   const Sizes& s, int64_t first) {
  const int64_t count = std::min<int64_t>(kInputs, s.inputs - first);
  const int64_t width = window.reach(1, s.result[1]);
  for (size_t i = 0; i < chunk.lines.size();) {
    const Line& line = chunk.lines[i];
    size_t end = i + 1;
    while (end < chunk.lines.size() && chunk.lines[end].image == line.image) end++;
    const int64_t rows = window.reach(0, static_cast<int64_t>(end - i));
    for (int64_t r = 0; r < rows; r++) {
      const int64_t y = line.row * window.stride[0] - window.padding[0] + r;
      const bool inside = y >= 0 && y < s.image[0];
      const float* from = image + ((line.image * s.image[0] + y) * s.image[1]) * s.inputs + first;
      lay_out_row(to + (line.at + r * width) * kInputs, inside ? from : nullptr, window, s, count);
    }
    i = end;
  }
}

// What one tap of some outputs and inputs gets from the lines of a chunk; added, but of the first one.
void add_products(float* sums, bool first, const float* grad, const float* image,
                  const std::vector<Line>& lines, int64_t pixels, int64_t step) {
  vec sum[kOutputs][kVectors] = {};
  for (const Line& line : lines) {
    const float* at = image + line.at * kInputs;
    for (int64_t x = 0; x < pixels; x++, at += step, grad += kOutputs) {
      vec in[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) {
        in[v] = load(at + v * kLanes);
        hold_in_register(in[v]);
      }
#pragma GCC unroll 12
      for (int o = 0; o < kOutputs; o++) {
        const vec by = broadcast(grad + o);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) sum[o][v] = multiply_add(by, in[v], sum[o][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int o = 0; o < kOutputs; o++) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++, sums += kLanes)
      store(sums, first ? sum[o][v] : load(sums) + sum[o][v]);
  }
}

// Panels of outputs and inputs, and how many numbers lie laid out in each.
struct Panels {
  int64_t outputs, inputs, taps;

  int64_t count() const { return outputs * inputs; }
  int64_t size() const { return taps * kOutputs * kInputs; }
};

// [inputs / 16][outputs / 6][taps][6][16] (with vectors of 8) to [outputs][inputs][taps]. Are all
// finite?
bool put_in_order(float* to, const float* sums, const Sizes& s, const Panels& panels) {
  std::atomic<bool> finite{true};
  for_each_item(s.outputs, threads(), [&](int64_t o) {
    float* next = to + o * s.inputs * panels.taps;
    float zero = 0.0f;
    for (int64_t i = 0; i < s.inputs; i++) {
      const int64_t panel = i / kInputs * panels.outputs + o / kOutputs;
      const float* from = sums + panel * panels.size() + o % kOutputs * kInputs + i % kInputs;
      for (int64_t t = 0; t < panels.taps; t++) {
        *next++ = from[t * kOutputs * kInputs];
        zero += from[t * kOutputs * kInputs] * 0.0f;
      }
    }
    if (zero != 0.0f) finite = false;
  });
  return finite;
}

bool weight_gradient_of(float* to, const float* grad, const float* image, const Window& window,
                        const Sizes& s) {
  const int64_t width = window.reach(1, s.result[1]);
  const Panels panels{ceil_div(s.outputs, int64_t{kOutputs}), ceil_div(s.inputs, kInputs),
                      window.taps[0] * window.taps[1]};
  // Lines that are next to each other in memory for each pair of panels: apart, one after another
  // was waited for.
  const Tensor sums = at::empty({panels.count() * panels.size()}, at::kFloat);
  float* const into = sums.mutable_data_ptr<float>();
  std::vector<float> images, grads;
  const int64_t lines = s.images * s.result[0], step = lines_of_chunk(window, s);
  for (int64_t first = 0; first < lines; first += step) {
    const Chunk chunk(window, s, first, std::min(lines, first + step));
    const int64_t pixels = static_cast<int64_t>(chunk.lines.size()) * s.result[1];
    const int64_t image_panel = chunk.laid_out * kInputs, grad_panel = pixels * kOutputs;
    images.resize(std::max(images.size(), static_cast<size_t>(panels.inputs * image_panel)));
    grads.resize(std::max(grads.size(), static_cast<size_t>(panels.outputs * grad_panel)));
    for_each_item(panels.inputs + panels.outputs, threads(), [&](int64_t item) {
      const int64_t out = item - panels.inputs;
      if (out < 0)
        lay_out_image(&images[static_cast<size_t>(item * image_panel)], image, chunk, window, s,
                      item * kInputs);
      else
        lay_out_gradient(&grads[static_cast<size_t>(out * grad_panel)], grad, chunk, s,
                         out * kOutputs);
    });
    for_each_item(panels.count(), threads(), [&](int64_t item) {
      const float* own_image = &images[static_cast<size_t>(item / panels.outputs * image_panel)];
      const float* own_grad = &grads[static_cast<size_t>(item % panels.outputs * grad_panel)];
      for (int64_t t = 0; t < panels.taps; t++) {
        const int64_t y = t / window.taps[1], x = t % window.taps[1];
        const int64_t moved = y * window.dilation[0] * width + x * window.dilation[1];
        add_products(into + item * panels.size() + t * kOutputs * kInputs, first == 0, own_grad,
                     own_image + moved * kInputs, chunk.lines, s.result[1],
                     window.stride[1] * kInputs);
      }
    });
  }
  return put_in_order(to, into, s, panels);
}

Tensor weight_gradient(const Tensor& grad, const Tensor& x, at::IntArrayRef kernel,
                       at::IntArrayRef stride, at::IntArrayRef padding,
                       at::IntArrayRef dilation) {
  Window window;
  for (size_t d = 0; d < 2; d++) {
    window.taps[d] = kernel[d], window.stride[d] = stride[d];
    window.padding[d] = padding[d], window.dilation[d] = dilation[d];
  }
  const Sizes sizes{x.size(0), x.size(1), grad.size(1), {x.size(2), x.size(3)},
                    {grad.size(2), grad.size(3)}};
  const Tensor out = at::empty({grad.size(1), x.size(1), kernel[0], kernel[1]}, x.options());
  count(kWeightGradient);
  if (out.numel() == 0) return out;
  if (grad.numel() == 0 || x.numel() == 0) return out.zero_();
  const Tensor own_grad = channels_last(grad), own_x = channels_last(x);
  if (weight_gradient_of(out.mutable_data_ptr<float>(), own_grad.const_data_ptr<float>(),
                         own_x.const_data_ptr<float>(), window, sizes))
    return out;
  // Infinite times the zeros around an image is no number. oneDNN leaves them out.
  const auto theirs = at::convolution_backward(own_grad, own_x, out, std::nullopt, stride, padding,
                                               dilation, false, {0, 0}, 1, {false, true, false});
  return std::get<1>(theirs).contiguous();
}

const from_python::Offered offered("openmp_weight_gradient", from_python::entry<weight_gradient>);

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_dispatch, library) {
  // No tag: what lowering/image_layouts.py tells Inductor counts.
  library.def(
      "openmp_weight_gradient(Tensor grad, Tensor x, int[] kernel, int[] stride, int[] padding, "
      "int[] dilation) -> Tensor");
}

TORCH_LIBRARY_IMPL(kernel_dispatch, CPU, library) {
  library.impl("openmp_weight_gradient", weight_gradient);
}

// Part of the backward that AOTAutograd made, which does not differentiate it.
TORCH_LIBRARY_IMPL(kernel_dispatch, Autograd, library) {
  library.impl("openmp_weight_gradient", torch::CppFunction::makeFallthrough());
}

}  // namespace kd
