// Scores of complete blocks for 4 indexer heads of 128 values: eight threads share four pooled keys, which are all on their
// way at once, and go through the heads two at a time. Product p = 4 h + j is of head h and key j; thread c has p ^ c in its
// place. Scores are not negative, and a NaN stays one.
#pragma once
#include "head_sums.cuh"

#define WIDE_THREADS 128
#define WIDE_KEYS 16  // blocks of cells of a warp

DEVICE float positive(float s) { return s != s ? s : s > 0.f ? s : 0.f; }

// Number j of the four keys of thread c of eight, from number b on.
DEVICE int own_key(int b, int c, int j) { return b + (j ^ c & 3); }

// A thread's values of its keys, of which `there` lie in memory: those behind them are read as the last one.
DEVICE void load_keys(const float *keys, int b, int c, int there, float4 (&key)[4][4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int own = own_key(b, c, j);
        const float4 *x = (const float4 *)keys + (size_t)(own < there ? own : there - 1) * 32 + c;
#pragma unroll
        for (int k = 0; k < 4; k++) key[j][k] = x[8 * k];
    }
}

// scores (T, most) of the keys, for rows from position `start` on. q (T, 4, 128) in shared memory.
DEVICE void score_keys(const float4 *q, const float4 (&key)[4][4], int b, int c, int start, float *scores, int T, int block,
                       int budget, int most, u64 *error, u64 where) {
#pragma unroll 1
    for (int row = 0; row < T; row++) {
        float s[2];
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            float v[32];
#pragma unroll
            for (int i = 0; i < 32; i++) v[i] = 0.f;
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float4 x = q[(4 * row + 2 * pair + (h ^ c >> 2)) * 32 + 8 * k + c];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        int p = 4 * (4 * h + j);
                        v[p] = fma32(x.x, key[j][k].x, v[p]);
                        v[p + 1] = fma32(x.y, key[j][k].y, v[p + 1]);
                        v[p + 2] = fma32(x.z, key[j][k].z, v[p + 2]);
                        v[p + 3] = fma32(x.w, key[j][k].w, v[p + 3]);
                    }
                }
            s[pair] = positive(eight_sums<true>(v));
        }
        // Threads 0..3 of eight hold heads 0 and 2 of their four keys, threads 4..7 heads 1 and 3.
        float head0 = __shfl_xor_sync(ALL_LANES, s[0], 4), head2 = __shfl_xor_sync(ALL_LANES, s[1], 4);
        float total = add32(add32(add32(head0, s[0]), head2), s[1]);
        int own = b + (c & 3), n = (start + row + 1) / block;
        if (c >= 4 && own < n) {
            scores[(size_t)row * most + own] = total;
            if (!finite32(total) && n > budget) report(error, where, NOT_FINITE, row);
        }
    }
}
