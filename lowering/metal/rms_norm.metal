#include <metal_stdlib>
using namespace metal;

// NUMBER is the type of the rows, WEIGHT that of the weight. A threadgroup takes one row.

[[max_total_threads_per_threadgroup(512)]]
kernel void rms_norm(
    device const NUMBER* x [[buffer(0)]],
    device const NUMBER* residual [[buffer(1)]],
    device const WEIGHT* weight [[buffer(2)]],
    device NUMBER* out [[buffer(3)]],
    device NUMBER* sum [[buffer(4)]],
    constant long& columns [[buffer(5)]],
    constant long& x_stride [[buffer(6)]],
    constant long& residual_stride [[buffer(7)]],
    constant long& has_residual [[buffer(8)]],
    constant long& has_weight [[buffer(9)]],
    constant float& eps [[buffer(10)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 threads [[threads_per_threadgroup]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd_index [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]])
{
    threadgroup float partial[32];
    long row = group.y;
    device const NUMBER* of_x = x + row * x_stride;
    device const NUMBER* of_residual = residual + row * residual_stride;
    device NUMBER* of_sum = sum + row * columns;
    device NUMBER* of_out = out + row * columns;

    float squares = 0.0f;
    for (long column = thread_index; column < columns; column += threads.x) {
        NUMBER value = of_x[column];
        if (has_residual) {
            value = NUMBER(float(value) + float(of_residual[column]));
            of_sum[column] = value;  // read again below, by this very thread
        }
        squares += float(value) * float(value);
    }
    squares = simd_sum(squares);
    if (lane == 0) {
        partial[simd_index] = squares;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Every simdgroup adds up for itself, which saves another barrier.
    float total = simd_sum(lane < simdgroups ? float(partial[lane]) : 0.0f);
    float scale = precise::rsqrt(total / float(columns) + eps);

    for (long column = thread_index; column < columns; column += threads.x) {
        float value = has_residual ? float(of_sum[column]) : float(of_x[column]);
        value *= scale;
        if (has_weight) {
            value *= float(weight[column]);
        }
        of_out[column] = NUMBER(value);
    }
}
