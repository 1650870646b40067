// Softmax within a tile of attention, which has one order whatever kernel scored it.
#pragma once
#include "exact.cuh"
#include "sums.cuh"

#define TILE 64

// Scores p (heads, 64) of `width` cells become exp(score - top), zero behind them. The largest score and the sum of the
// terms of head h go to stats[(first + h) * most_tiles + tile]. For blocks of N_THREADS, between two barriers.
template <int N_THREADS>
DEVICE void softmax_tile(float *p, int heads, int width, int lane, int warp, float2 *stats, size_t first, int most_tiles,
                         int tile) {
    for (int h = warp; h < heads; h += N_THREADS / 32) {
        float a = lane < width ? p[h * TILE + lane] : 0.f, b = lane + 32 < width ? p[h * TILE + lane + 32] : 0.f;
        float top = __shfl_sync(ALL_LANES, a, 0);  // not read from p by all lanes: lane 0 writes there soon
        if (lane < width) top = larger(a, top);
        if (lane + 32 < width) top = larger(b, top);
#pragma unroll
        for (int half = 16; half; half >>= 1) top = larger(__shfl_xor_sync(ALL_LANES, top, half), top);
        a = lane < width ? exp32(sub32(a, top)) : 0.f;
        b = lane + 32 < width ? exp32(sub32(b, top)) : 0.f;
        p[h * TILE + lane] = a;
        p[h * TILE + lane + 32] = b;
        float l = warp_tree(add32(a, b));
        if (lane == 0) stats[(first + h) * most_tiles + tile] = make_float2(top, l);
    }
}
