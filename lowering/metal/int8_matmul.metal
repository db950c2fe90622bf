#include <metal_stdlib>
using namespace metal;

// NUMBER is the type of the rows and of the bias. A simdgroup takes one column of the result for up
// to eight rows, so that the weight is read once for all of them, four numbers at a time.

constant constexpr int ROWS = 8;

[[max_total_threads_per_threadgroup(128)]]
kernel void int8_matmul(
    device const NUMBER* x [[buffer(0)]],
    device const char4* weight [[buffer(1)]],
    device const float* scale [[buffer(2)]],
    device const NUMBER* bias [[buffer(3)]],
    device NUMBER* out [[buffer(4)]],
    constant long& rows [[buffer(5)]],
    constant long& columns [[buffer(6)]],
    constant long& depth [[buffer(7)]],
    constant long& x_stride [[buffer(8)]],
    constant long& has_bias [[buffer(9)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd_index [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]])
{
    long column = long(group.x) * simdgroups + simd_index;
    long first = long(group.y) * ROWS;
    if (column >= columns) {  // the same for all lanes of a simdgroup
        return;
    }
    long left = rows - first;
    int count = left < ROWS ? int(left) : ROWS;
    long fours = depth / 4;
    device const char4* of_weight = weight + column * fours;
    float sums[ROWS];
    for (int row = 0; row < ROWS; ++row) {
        sums[row] = 0.0f;
    }
    for (long four = lane; four < fours; four += 32) {
        char4 four_of_them = of_weight[four];
        float4 numbers = float4(float(four_of_them.x), float(four_of_them.y), float(four_of_them.z), float(four_of_them.w));
        for (int row = 0; row < count; ++row) {
            device const NUMBER* of_x = x + (first + row) * x_stride + 4 * four;
            sums[row] += float(of_x[0]) * numbers.x + float(of_x[1]) * numbers.y
                + float(of_x[2]) * numbers.z + float(of_x[3]) * numbers.w;
        }
    }
    for (int row = 0; row < count; ++row) {
        float found = simd_sum(sums[row]) * scale[column];
        if (has_bias) {
            found += float(bias[column]);
        }
        if (lane == 0) {
            out[(first + row) * columns + column] = NUMBER(found);
        }
    }
}
