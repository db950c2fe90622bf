// From scores to weights, a block of keys at a time: what was summed so far is scaled down whenever
// a greater score turns up.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_shape.h"
#include "lanes.h"
#include "partial.h"
#include "vec_math.h"

namespace kd {
namespace attending {

constexpr int kBlockKeys = 256;
constexpr int kScoreStride = kBlockKeys + 16;  // no power of two, whose multiples share cache sets
// Rows of a tile of packed queries.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 12;
#elif defined(__AVX2__)
constexpr int kRows = 6;
#else
constexpr int kRows = 4;
#endif
constexpr int kMostUnpackedRows = 8;  // read without packing; with more rows, packing pays
constexpr int kRowsInLanes = (std::max(kRows, kMostUnpackedRows) + kLanes - 1) / kLanes * kLanes;

static inline int64_t whole_vectors(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// Of some rows: the greatest score so far and, lane by lane, the sum of the weights relative to it.
struct Softmax {
  float* maximum;
  float* sum;  // [row][kLanes]

  Softmax from(int64_t row) const { return {maximum + row, sum + row * kLanes}; }
};

// What some rows found in some keys: also the values times the weights, [row][ld].
struct Result {
  float* sums;
  Softmax softmax;

  static int64_t floats(int64_t rows, int64_t ld) {
    return rows * (ld + kLanes) + (rows + 15) / 16 * 16;
  }
  Result(float* memory, int64_t rows, int64_t ld)
      : sums(memory), softmax{memory + rows * (ld + kLanes), memory + rows * ld} {}

  void start(int64_t rows, int64_t ld) const {
    std::fill(sums, sums + rows * (ld + kLanes), 0.0f);
    std::fill(softmax.maximum, softmax.maximum + rows, -INFINITY);
  }
};

static inline ivec lane_numbers() {
  ivec v;
  for (int i = 0; i < kLanes; i++) v[i] = i;
  return v;
}

struct NoMask {
  static constexpr bool changes = false;
  vec operator()(vec scores, int) const { return scores; }
  vec first(vec scores, int, int) const { return scores; }
};

struct AddedMask {
  static constexpr bool changes = true;
  const float* row;
  vec operator()(vec scores, int j) const { return scores + load(row + j); }
  vec first(vec scores, int j, int count) const { return scores + load_first(row + j, count); }
};

struct BoolMask {
  static constexpr bool changes = true;
  typedef uint8_t bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
  const uint8_t* row;
  static vec choose(bytes taken, vec scores) {
    return __builtin_convertvector(taken, ivec) != 0 ? scores : splat(-INFINITY);
  }
  vec operator()(vec scores, int j) const {
    return choose(*reinterpret_cast<const bytes*>(row + j), scores);
  }
  vec first(vec scores, int j, int count) const {
    bytes taken{};
    for (int i = 0; i < count; i++) taken[i] = row[j + i];
    return choose(taken, scores);
  }
};

// Weights that take the place of the scores they are made of.
struct InPlace {
  static constexpr bool scales = false;
  vec scaled(vec score) const { return score; }
  void keep(int, int, float* score, vec weight) const { store(score, weight); }
};

// Masks a row of scores in place, hides those from `visible` on, and returns the greatest per lane.
template <class Form, class Mask>
static inline vec mask_and_find_maximum(const Form& form, float* scores, int visible, int width,
                                        const Mask& mask) {
  const vec hidden = splat(-INFINITY);
  vec greatest = hidden;
  int j = 0;
  for (; j + kLanes <= visible; j += kLanes) {
    const vec s = mask(form.scaled(load(scores + j)), j);
    if (Mask::changes || Form::scales) store(scores + j, s);
    greatest = greater_or_second(s, greatest);
  }
  if (j < visible) {
    vec s = mask.first(form.scaled(load(scores + j)), j, visible - j);
    s = lane_numbers() < visible - j ? s : hidden;
    store(scores + j, s);
    greatest = greater_or_second(s, greatest);
    j += kLanes;
  }
  for (; j < width; j += kLanes) store(scores + j, hidden);
  return greatest;
}

// Makes weights of a row of scores and returns their sum per lane.
template <bool natural, class Form>
static inline vec make_weights(const Form& form, int row, float* scores, int width, float maximum) {
  vec sum{};
  for (int j = 0; j < width; j += kLanes) {
    vec below = load(scores + j) - splat(maximum);
    if (natural) below = below * splat(kLog2E);
    const vec weight = exp2_of_nonpositive(below);
    form.keep(row, j, scores + j, weight);
    sum += weight;
  }
  return sum;
}

// The row's mask from the given key on, as `count` neighbours in memory.
template <class Entry>
static inline const Entry* mask_row(const Group& group, const Entry* mask, Row row, int64_t key,
                                    int count, Entry* gathered) {
  const Entry* from = mask + group.mask_offset(row, key);
  if (group.shape.m_k == 1) return from;
  for (int j = 0; j < count; j++) gathered[j] = from[j * group.shape.m_k];
  return gathered;
}

// Turns the scores of `rows` rows for the keys from first_key on into weights; rescale[row] is what
// earlier sums are to be multiplied by. `width` keys, rounded up to whole vectors, are written.
template <class Form>
static inline void weigh(const Form& form, const Group& group, Row first_row, int rows,
                         int64_t first_key, int width, float* scores, const Softmax& softmax,
                         float* rescale) {
  const AttentionShape& shape = group.shape;
  vec greatest[kRowsInLanes];
  for (int r = rows; r < kRowsInLanes; r++) greatest[r] = splat(-INFINITY);
  Row row = first_row;
  for (int r = 0; r < rows; r++, row = group.after(row)) {
    const int64_t seen = group.visible_keys(row) - first_key;
    const int visible = seen < 0 ? 0 : seen < width ? static_cast<int>(seen) : width;
    float* row_scores = scores + r * kScoreStride;
    if (shape.mask) {
      float gathered[kBlockKeys];
      const AddedMask mask{mask_row(group, shape.mask, row, first_key, visible, gathered)};
      greatest[r] = mask_and_find_maximum(form, row_scores, visible, width, mask);
    } else if (shape.bool_mask) {
      uint8_t gathered[kBlockKeys];
      const BoolMask mask{mask_row(group, shape.bool_mask, row, first_key, visible, gathered)};
      greatest[r] = mask_and_find_maximum(form, row_scores, visible, width, mask);
    } else {
      greatest[r] = mask_and_find_maximum(form, row_scores, visible, width, NoMask());
    }
  }
  float subtracted[kRowsInLanes];
  for (int r = 0; r < rows; r += kLanes) {
    vec tile[kLanes];
    for (int i = 0; i < kLanes; i++) tile[i] = greatest[r + i];
    const int count = rows - r < kLanes ? rows - r : kLanes;
    const vec before = load_first(softmax.maximum + r, count);
    const vec now = greater_or_second(
        reduce_lanes(tile, [](vec a, vec b) { return greater_or_second(a, b); }), before);
    store_first(softmax.maximum + r, now, count);
    // Where nothing was seen yet, anything finite keeps infinity minus infinity away.
    const vec reference = now == splat(-INFINITY) ? vec{} : now;
    store(subtracted + r, reference);
    const vec below = before - reference;
    store(rescale + r, exp2_of_nonpositive(shape.mask ? below * splat(kLog2E) : below));
  }
  for (int r = 0; r < rows; r++) {
    float* row_scores = scores + r * kScoreStride;
    const vec sum = shape.mask ? make_weights<true>(form, r, row_scores, width, subtracted[r])
                               : make_weights<false>(form, r, row_scores, width, subtracted[r]);
    float* total = softmax.sum + r * kLanes;
    store(total, fma(load(total), splat(rescale[r]), sum));
  }
}

// The inverse of what sums of weighted values are to be divided by; zero where no key counted.
static inline float inverse_sum(const float* sum) {
  const float total = horizontal_sum(load(sum));
  return total == 0.0f ? 0.0f : 1.0f / total;
}

}  // namespace attending
}  // namespace kd
