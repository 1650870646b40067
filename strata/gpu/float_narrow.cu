// Products of many float32 rows with float matrices of a few rows: one warp a row of x, which it reads once.
#include "sums.cuh"

// Four values of a float matrix of kind 0 (F32), 1 (F16) or 2 (BF16), from element `at` on, a multiple of 4.
DEVICE float4 four_of(const void *w, int kind, size_t at) {
    if (kind == 0) return *(const float4 *)((const float *)w + at);
    uint2 v = *(const uint2 *)((const u16 *)w + at);
    u16 h[4] = {(u16)(v.x & 0xffff), (u16)(v.x >> 16), (u16)(v.y & 0xffff), (u16)(v.y >> 16)};
    if (kind == 1) return make_float4(half_f32(h[0]), half_f32(h[1]), half_f32(h[2]), half_f32(h[3]));
    return make_float4(bf16_f32(h[0]), bf16_f32(h[1]), bf16_f32(h[2]), bf16_f32(h[3]));
}

// y (T, N) = x (T, K) times w (N, K); K a multiple of 4. A lane sums every 32nd group of four values, ascending.
template <int N>
KERNEL(256) float_narrow(const float *x, const void *w, int kind, float *y, int T, int K) {
    int row = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (row >= T) return;
    float sum[N];
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] = 0.f;
    const float *mine = x + (size_t)row * K;
#pragma unroll 2
    for (int i = 4 * lane; i < K; i += 128) {
        float4 a = *(const float4 *)(mine + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float4 b = four_of(w, kind, (size_t)j * K + i);
            sum[j] = fma32(a.x, b.x, sum[j]);
            sum[j] = fma32(a.y, b.y, sum[j]);
            sum[j] = fma32(a.z, b.z, sum[j]);
            sum[j] = fma32(a.w, b.w, sum[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        float s = warp_tree(sum[j]);
        if (lane == 0) y[(size_t)row * N + j] = s;
    }
}
