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

// One thread's share of alpha * a b, of the first matrices of each.
static inline void multiply_unpacked(int thread, int team, int64_t m, int64_t n, int64_t k,
                                     const MatrixBatch& a, const MatrixBatch& b, float* c,
                                     int64_t ldc, float alpha, const Epilogue& e) {
  if (m <= kMostDotRows && a.column == 1 && b.row == 1 && b.column != 1)
    return dot_share(thread, team, m, n, k, a.data, a.row, b.data, b.column, alpha, c, ldc, e);
  multiply_share(thread, team, m, n, k, StridedRows{a.data, a.row, a.column},
                 StridedColumns(b.data, b.row, b.column, m, n, alpha), c, ldc, e);
}

static inline void gemm_unpacked(int64_t m, int64_t n, int64_t k, const float* a,
                                 int64_t a_stride_m, int64_t a_stride_k, const float* b,
                                 int64_t b_stride_k, int64_t b_stride_n, float* c, int64_t ldc,
                                 const Epilogue& e, int threads) {
  if (m == 0 || n == 0) return;
  threads = useful_threads(threads, static_cast<double>(m) * n * k, kWorkPerThread);
  in_parallel(threads, [&](int thread, int team) {
    multiply_unpacked(thread, team, m, n, k, {a, 0, a_stride_m, a_stride_k},
                      {b, 0, b_stride_k, b_stride_n}, c, ldc, 1, e);
  });
}

// c[i] = alpha * a[i] b[i] for each i of the batch.
static inline void bmm(int64_t batch, int64_t m, int64_t n, int64_t k, const MatrixBatch& a,
                       const MatrixBatch& b, float* c, int64_t c_batch, int64_t ldc, float alpha,
                       int threads) {
  if (m == 0 || n == 0) return;
  threads = useful_threads(threads, static_cast<double>(batch) * m * n * k, kWorkPerThread);
  in_parallel(threads, [&](int thread, int team) {
    const auto product = [&](int64_t i, int index, int parts) {
      multiply_unpacked(index, parts, m, n, k, {a.data + i * a.batch, 0, a.row, a.column},
                        {b.data + i * b.batch, 0, b.row, b.column}, c + i * c_batch, ldc, alpha,
                        Epilogue{});
    };
    // Those that cannot be dealt out evenly are shared.
    const int64_t even = batch / team * team;
    const Range mine = part_of(even, thread, team);
    for (int64_t i = mine.begin; i < mine.end; i++) product(i, 0, 1);
    for (int64_t i = even; i < batch; i++) product(i, thread, team);
  });
}

}  // namespace kd
