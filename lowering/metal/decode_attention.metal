#include <metal_stdlib>
using namespace metal;

// NUMBER is the type of query, key and value; MASK that of the mask, bool or NUMBER, and MASKED how
// it works: 0 there is none, 1 false hides a key, 2 it is added to the scores.
//
// A threadgroup takes one head of one sequence, with one query. Its simdgroups share the keys, each
// with a softmax of its own; a lane holds every 32nd number of the head. Strides are those of
// (batch, head, row, column).

constant constexpr int SIMDGROUPS = 8;
constant constexpr int LANES = 32;
constant constexpr int LARGEST = 256;
constant constexpr int HELD = LARGEST / LANES;

[[max_total_threads_per_threadgroup(256)]]
kernel void decode_attention(
    device const NUMBER* query [[buffer(0)]],
    device const NUMBER* key [[buffer(1)]],
    device const NUMBER* value [[buffer(2)]],
    device const MASK* mask [[buffer(3)]],
    device NUMBER* out [[buffer(4)]],
    constant long* query_strides [[buffer(5)]],
    constant long* key_strides [[buffer(6)]],
    constant long* value_strides [[buffer(7)]],
    constant long* mask_strides [[buffer(8)]],
    constant long& keys [[buffer(9)]],
    constant long& heads [[buffer(10)]],
    constant long& heads_per_key_head [[buffer(11)]],
    constant long& size [[buffer(12)]],
    constant long& value_size [[buffer(13)]],
    constant float& scale [[buffer(14)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd_index [[simdgroup_index_in_threadgroup]])
{
    threadgroup float tops[SIMDGROUPS];
    threadgroup float totals[SIMDGROUPS];
    threadgroup float sums[SIMDGROUPS * LARGEST];

    long head = group.x;
    long batch = group.y;
    long key_head = head / heads_per_key_head;
    device const NUMBER* of_query = query + batch * query_strides[0] + head * query_strides[1];
    device const NUMBER* of_key = key + batch * key_strides[0] + key_head * key_strides[1];
    device const NUMBER* of_value = value + batch * value_strides[0] + key_head * value_strides[1];
#if MASKED
    device const MASK* of_mask = mask + batch * mask_strides[0] + head * mask_strides[1];
#endif

    float held_query[HELD];
    float held_sum[HELD];
    for (int i = 0; i < HELD; ++i) {
        long column = lane + i * LANES;
        held_query[i] = column < size ? scale * float(of_query[column * query_strides[3]]) : 0.0f;
        held_sum[i] = 0.0f;
    }
    float top = -INFINITY;
    float total = 0.0f;

    for (long row = simd_index; row < keys; row += SIMDGROUPS) {
#if MASKED == 1
        if (!of_mask[row * mask_strides[3]]) {  // the same for all lanes of a simdgroup
            continue;
        }
#endif
        float score = 0.0f;
        for (int i = 0; i < HELD; ++i) {
            long column = lane + i * LANES;
            if (column < size) {
                long at = row * key_strides[2] + column * key_strides[3];
                score += held_query[i] * float(of_key[at]);
            }
        }
        score = simd_sum(score);
#if MASKED == 2
        score += float(of_mask[row * mask_strides[3]]);
#endif
        float higher = fmax(top, score);
        // Nothing but -infinity so far: every weight is zero, and no difference is NaN.
        float level = higher == -INFINITY ? 0.0f : higher;
        float shrink = precise::exp(top - level);
        float weight = precise::exp(score - level);
        total = total * shrink + weight;
        for (int i = 0; i < HELD; ++i) {
            long column = lane + i * LANES;
            if (column < value_size) {
                long at = row * value_strides[2] + column * value_strides[3];
                held_sum[i] = held_sum[i] * shrink + weight * float(of_value[at]);
            }
        }
        top = higher;
    }

    if (lane == 0) {
        tops[simd_index] = top;
        totals[simd_index] = total;
    }
    for (int i = 0; i < HELD; ++i) {
        long column = lane + i * LANES;
        if (column < value_size) {
            sums[simd_index * LARGEST + column] = held_sum[i];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float highest = -INFINITY;
    for (int s = 0; s < SIMDGROUPS; ++s) {
        highest = fmax(highest, float(tops[s]));
    }
    float level = highest == -INFINITY ? 0.0f : highest;
    float whole = 0.0f;
    for (int s = 0; s < SIMDGROUPS; ++s) {
        whole += float(totals[s]) * precise::exp(float(tops[s]) - level);
    }
    for (long column = thread_index; column < value_size; column += SIMDGROUPS * LANES) {
        float found = 0.0f;
        for (int s = 0; s < SIMDGROUPS; ++s) {
            found += float(sums[s * LARGEST + column]) * precise::exp(float(tops[s]) - level);
        }
        // A query that sees no key gives zeros.
        long at = (batch * heads + head) * value_size + column;
        out[at] = NUMBER(whole == 0.0f ? 0.0f : found / whole);
    }
}
