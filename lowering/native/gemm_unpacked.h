// Products of operands that are used once: blocks of them are put in order on the way.
#pragma once

#include "dot.h"
#include "gemm.h"

namespace kd {

struct StridedRows {
  static constexpr double kMaking = 2;
  const float* a;
  int64_t stride_m, stride_k;

  Block block(int64_t row, int64_t rows, int64_t k, int64_t depth, float* buffer) const {
    const float* from = a + row * stride_m + k * stride_k;
    if (stride_k == 1) return MatrixRows{a, stride_m}.block(row, rows, k, depth, buffer);
    if (stride_m == 1 && rows >= kLanes) {
      const int64_t ld = spread_out(rows);
      for (int64_t p = 0; p < depth; p++) copy_row(buffer + p * ld, from + p * stride_k, rows);
      return {buffer, 1, ld};
    }
    return {from, stride_m, stride_k};
  }
};

class StridedColumns {
 public:
  static constexpr double kMaking = 12;

  // In blocks so few rows that making panels costs more than it saves, rows of the matrix itself
  // serve as well, if they consist of whole vectors.
  StridedColumns(const float* b, int64_t stride_k, int64_t stride_n, int64_t m, int64_t n,
                 float scale)
      : b_(b), stride_k_(stride_k), stride_n_(stride_n), n_(n), scale_(scale),
        at_hand_(stride_n == 1 && n % kLanes == 0 && scale == 1 && m <= 2 * kLanes) {}

  bool at_hand() const { return at_hand_; }

  Block block(int64_t panel, int64_t panels, int64_t k, int64_t depth) const {
    const float* from = b_ + k * stride_k_ + panel * kLanes * stride_n_;
    if (at_hand_) return {from, kLanes, stride_k_};
    float* made = scratch<1>(kColumnsBuffer);
    const int64_t size = depth * kLanes;
    if (stride_n_ == 1) {
      pack_lines(made, from, panel, panels, depth);
    } else {
      for (int64_t i = 0; i < panels; i++)
        pack_panel(made + i * size, from + i * kLanes * stride_n_, depth,
                   columns_of_panel(n_, panel + i), stride_k_, stride_n_);
    }
    if (scale_ != 1)
      for (int64_t i = 0; i < panels * size; i += kLanes)
        store(made + i, load(made + i) * splat(scale_));
    return {made, size, kLanes};
  }

 private:
  // All panels at once, so that memory is read in order.
  void pack_lines(float* made, const float* from, int64_t panel, int64_t panels,
                  int64_t depth) const {
    const int last = columns_of_panel(n_, panel + panels - 1);
    for (int64_t p = 0; p < depth; p++, made += kLanes, from += stride_k_) {
      for (int64_t i = 0; i + 1 < panels; i++)
        store(made + i * depth * kLanes, load(from + i * kLanes));
      const int64_t i = panels - 1;
      store(made + i * depth * kLanes,
            last == kLanes ? load(from + i * kLanes) : load_first(from + i * kLanes, last));
    }
  }

  const float* b_;
  int64_t stride_k_, stride_n_, n_;
  float scale_;
  bool at_hand_;
};

// One of two matrices; strides of the batch, of rows and of columns.
struct MatrixBatch {
  const float* data;
  int64_t batch, row, column;
};

// alpha * a b, cut into items; of the first matrices of each.
class UnpackedProduct {
 public:
  UnpackedProduct(int64_t m, int64_t n, int64_t k, const MatrixBatch& a, const MatrixBatch& b,
                  float alpha, int team)
      : m_(m), n_(n), k_(k), a_(a), b_(b), alpha_(alpha),
        dots_(m <= kMostDotRows && a.column == 1 && b.row == 1 && b.column != 1) {
    if (dots_)
      grid_.across = team > 1 ? std::min<int64_t>(panels_of(n), 4 * team) : 1;
    else
      grid_ = grid_of(m, n, k, team, StridedRows::kMaking, StridedColumns::kMaking);
  }

  int64_t items() const { return grid_.items(); }

  void operator()(int64_t batch, int64_t item, float* c, int64_t ldc, const Epilogue& e) const {
    const float *a = a_.data + batch * a_.batch, *b = b_.data + batch * b_.batch;
    if (dots_)
      return dot_panels(part_of(panels_of(n_), item, grid_.across), m_, n_, k_, a, a_.row, b,
                        b_.column, alpha_, c, ldc, e);
    multiply_item(grid_, item, m_, n_, k_, StridedRows{a, a_.row, a_.column},
                  StridedColumns(b, b_.row, b_.column, m_, n_, alpha_), c, ldc, e);
  }

 private:
  int64_t m_, n_, k_;
  MatrixBatch a_, b_;
  float alpha_;
  bool dots_;
  Grid grid_;
};

static inline void gemm_unpacked(int64_t m, int64_t n, int64_t k, const float* a,
                                 int64_t a_stride_m, int64_t a_stride_k, const float* b,
                                 int64_t b_stride_k, int64_t b_stride_n, float* c, int64_t ldc,
                                 const Epilogue& e, int threads) {
  if (m == 0 || n == 0) return;
  threads = useful_threads(threads, static_cast<double>(m) * n * k, kWorkPerThread);
  const UnpackedProduct product(m, n, k, {a, 0, a_stride_m, a_stride_k},
                                {b, 0, b_stride_k, b_stride_n}, 1, threads);
  for_each_item(product.items(), threads,
                [&](int64_t item) { product(0, item, c, ldc, e); });
}

// c[i] = alpha * a[i] b[i] for each i of the batch.
static inline void bmm(int64_t batch, int64_t m, int64_t n, int64_t k, const MatrixBatch& a,
                       const MatrixBatch& b, float* c, int64_t c_batch, int64_t ldc, float alpha,
                       int threads) {
  if (m == 0 || n == 0) return;
  threads = useful_threads(threads, static_cast<double>(batch) * m * n * k, kWorkPerThread);
  // Of a large batch each product is an item.
  const int team = batch >= 4 * threads ? 1 : threads;
  const UnpackedProduct product(m, n, k, a, b, alpha, team);
  const int64_t items = product.items();
  for_each_item(batch * items, threads, [&](int64_t item) {
    product(item / items, item % items, c + item / items * c_batch, ldc, Epilogue{});
  });
}

}  // namespace kd
