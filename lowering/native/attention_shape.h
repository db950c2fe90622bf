// What attention computes, and where its tensors lie.
#pragma once

#include <cstdint>

namespace kd {

// softmax(q k^T * scale + mask) v for each head. Strides are in elements; last dimensions are
// contiguous. Heads share keys and values in groups of heads / kv_heads.
struct AttentionShape {
  int64_t batch, heads, kv_heads, lq, lk, d, dv;
  int64_t q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l;
  const float* mask = nullptr;         // added to the scores
  const uint8_t* bool_mask = nullptr;  // 1: takes part. A row without any gives zeros, as in torch
  int64_t m_b = 0, m_h = 0, m_q = 0, m_k = 0;  // 0: the same for all
  bool causal = false;                         // key j takes part for query i if j <= i
  float scale = 1.0f;
};

namespace attending {

constexpr float kLog2E = 0x1.715476p+0f;

struct Row {
  int64_t head, query;
};

// One head of the keys. The queries of all heads that share it are its rows, head by head.
struct Group {
  const AttentionShape& shape;
  int64_t batch, kv_head;

  int64_t heads() const { return shape.heads / shape.kv_heads; }
  int64_t rows() const { return heads() * shape.lq; }
  Row row(int64_t index) const {
    return {kv_head * heads() + index / shape.lq, index % shape.lq};
  }
  Row after(Row row) const {
    return row.query + 1 < shape.lq ? Row{row.head, row.query + 1} : Row{row.head + 1, 0};
  }

  int64_t query_offset(Row row) const {
    return batch * shape.q_b + row.head * shape.q_h + row.query * shape.q_l;
  }
  int64_t output_offset(Row row) const {
    return batch * shape.o_b + row.head * shape.o_h + row.query * shape.o_l;
  }
  int64_t mask_offset(Row row, int64_t key) const {
    return batch * shape.m_b + row.head * shape.m_h + row.query * shape.m_q + key * shape.m_k;
  }
  int64_t key_offset(int64_t key) const {
    return batch * shape.k_b + kv_head * shape.k_h + key * shape.k_l;
  }
  int64_t value_offset(int64_t key) const {
    return batch * shape.v_b + kv_head * shape.v_h + key * shape.v_l;
  }

  // How many keys, from the first on, the row may see; and what any of `count` rows may see.
  int64_t visible_keys(Row row) const {
    return shape.causal && row.query + 1 < shape.lk ? row.query + 1 : shape.lk;
  }
  int64_t visible_keys(Row first, int64_t count) const {
    const int64_t last = first.query + count - 1;
    return visible_keys(Row{first.head, last < shape.lq ? last : shape.lq - 1});
  }
};

// Scores are in units of log2, so that a power of two makes a weight: the queries are scaled so.
// A mask to be added is in natural units, and times log2(e) the lowest float would be infinite.
static inline float query_scale(const AttentionShape& shape) {
  return shape.mask ? shape.scale : shape.scale * kLog2E;
}

}  // namespace attending
}  // namespace kd
