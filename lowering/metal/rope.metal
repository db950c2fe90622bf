#include <metal_stdlib>
using namespace metal;

// NUMBER is the type of query, key and both tables. A thread turns one pair of one head; heads of
// the query come first. Strides are those of (batch, head, token, column), of the tables those of
// (batch, token, column).

static void turn(
    device const NUMBER* x,
    device NUMBER* out,
    device const NUMBER* cosines,
    device const NUMBER* sines,
    constant long* x_strides,
    constant long* out_strides,
    constant long* cos_strides,
    constant long* sin_strides,
    long batch,
    long head,
    long token,
    long first,
    long second)
{
    device const NUMBER* of_x = x + batch * x_strides[0] + head * x_strides[1] + token * x_strides[2];
    device NUMBER* of_out =
        out + batch * out_strides[0] + head * out_strides[1] + token * out_strides[2];
    device const NUMBER* of_cos = cosines + batch * cos_strides[0] + token * cos_strides[1];
    device const NUMBER* of_sin = sines + batch * sin_strides[0] + token * sin_strides[1];
    float one = float(of_x[first * x_strides[3]]);
    float other = float(of_x[second * x_strides[3]]);
    float turned_one = one * float(of_cos[first * cos_strides[2]])
        - other * float(of_sin[first * sin_strides[2]]);
    float turned_other = other * float(of_cos[second * cos_strides[2]])
        + one * float(of_sin[second * sin_strides[2]]);
    of_out[first * out_strides[3]] = NUMBER(turned_one);
    of_out[second * out_strides[3]] = NUMBER(turned_other);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void rope(
    device const NUMBER* query [[buffer(0)]],
    device const NUMBER* key [[buffer(1)]],
    device const NUMBER* cosines [[buffer(2)]],
    device const NUMBER* sines [[buffer(3)]],
    device NUMBER* query_out [[buffer(4)]],
    device NUMBER* key_out [[buffer(5)]],
    constant long* query_strides [[buffer(6)]],
    constant long* key_strides [[buffer(7)]],
    constant long* query_out_strides [[buffer(8)]],
    constant long* key_out_strides [[buffer(9)]],
    constant long* cos_strides [[buffer(10)]],
    constant long* sin_strides [[buffer(11)]],
    constant long& query_heads [[buffer(12)]],
    constant long& tokens [[buffer(13)]],
    constant long& pairs [[buffer(14)]],
    constant long& interleaved [[buffer(15)]],
    uint3 at [[thread_position_in_grid]])
{
    long batch = long(at.z) / tokens;
    long token = long(at.z) % tokens;
    long head = at.y;
    long first = interleaved ? 2 * long(at.x) : long(at.x);
    long second = interleaved ? first + 1 : first + pairs;
    if (head < query_heads) {
        turn(query, query_out, cosines, sines, query_strides, query_out_strides, cos_strides,
             sin_strides, batch, head, token, first, second);
    } else {
        turn(key, key_out, cosines, sines, key_strides, key_out_strides, cos_strides,
             sin_strides, batch, head - query_heads, token, first, second);
    }
}
