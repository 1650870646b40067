// Activation rows from float32 rows, one warp a group. What a value is before it is quantised: PLAIN the row itself,
// SQUEEZE silu(x / C) (also written back), SWIGLU silu(g) u times the experts' output factors.
#include "early.cuh"
#include "quantise.cuh"

// x (T, K) -> codes (T, K), scales (T, K / group), sums (T, K / 16); group = 32 V. divisor 0: no squeeze.
template <int V>
STARTS_EARLY KERNEL(256) quantise(float *x, i8 *codes, float *scales, int *sums, int groups_a_row, int groups, int divisor, u64 *error,
                     u64 where) {
    let_next_start();
    wait_for_inputs();
    int g = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (g >= groups) return;
    float *source = x + (size_t)g * 32 * V + V * lane;
    float value[V];
    bool fine = true;
#pragma unroll
    for (int i = 0; i < V; i++) {
        value[i] = source[i];
        if (divisor) {
            value[i] = silu32(div32(value[i], i32_f32(divisor)));
            source[i] = value[i];
        }
    }
    fine = quantise_group<V>(value, codes + (size_t)g * 32 * V, scales + g, sums + (size_t)g * 2 * V);
    if (!fine && lane == 0) report(error, where, NOT_FINITE, g / groups_a_row);
}

// In place for products with float matrices: x = silu(x / C).
STARTS_EARLY KERNEL(256) squeeze(float *x, int n, int divisor, int width, u64 *error, u64 where) {
    let_next_start();
    wait_for_inputs();
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    float v = silu32(div32(x[i], i32_f32(divisor)));
    x[i] = v;
    if (!finite32(v)) report(error, where, NOT_FINITE, i / width);
}
