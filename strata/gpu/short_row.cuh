// Dot products with short rows, 256 <= K <= 512, in 16 bits: four threads a row, which needs a sixth of the exchanges of a
// warp a row. Thread p holds lanes 8 t .. 8 t + 7 for t = p, p + 4, .., 28 + p, so that the distances 128, 64 and 32 of the
// tree stay inside; weights stay in registers for all rows of activations.
#pragma once
#include "float_rows.cuh"

// EXTRA: how many t have values behind the first 256.
template <int KIND, int EXTRA>
struct ShortRow {
    uint4 first[8], second[EXTRA];

    DEVICE void load(const u8 *row, int p, int K) {
#pragma unroll
        for (int m = 0; m < 8; m++) first[m] = load_once((const uint4 *)(row + 16 * (p + 4 * m)));
#pragma unroll
        for (int m = 0; m < EXTRA; m++) {
            bool there = 8 * (p + 4 * m) + 256 < K;
            second[m] = there ? load_once((const uint4 *)(row + 16 * (p + 4 * m) + 512)) : make_uint4(0, 0, 0, 0);
        }
    }

    DEVICE static void add_terms(const uint4 &packed, const float *at, float (&v)[8]) {
        float4 a = *(const float4 *)at, b = *(const float4 *)(at + 4);
        float values[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 half = j & 1 ? words[j >> 1] >> 16 : words[j >> 1] & 0xffffu;
            v[j] = fma32(KIND == F16_VALUES ? half_f32((u16)half) : float_of(half << 16), values[j], v[j]);
        }
    }

    // The sum over x (K,), in all four threads of the row.
    DEVICE float times(const float *x, int p, int K) const {
        const float *column = x + 8 * p;
        auto leaf = [&](int m, float (&v)[8]) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = 0.f;
            add_terms(first[m], column + 32 * m, v);
            if (m < EXTRA && 8 * (p + 4 * m) + 256 < K) add_terms(second[m < EXTRA ? m : 0], column + 32 * m + 256, v);
        };
        auto add_to = [&](float (&v)[8], const float (&other)[8]) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = add32(v[j], other[j]);
        };
        float sums[8], right[8], one[8];
        leaf(0, sums), leaf(4, one), add_to(sums, one);
        leaf(2, right), leaf(6, one), add_to(right, one), add_to(sums, right);
        float left[8];
        leaf(1, left), leaf(5, one), add_to(left, one);
        leaf(3, right), leaf(7, one), add_to(right, one), add_to(left, right);
        add_to(sums, left);
        float four[4], two[2];
        bool upper = p & 2, odd = p & 1;
#pragma unroll
        for (int j = 0; j < 4; j++)  // distance 16
            four[j] = add32(upper ? sums[j + 4] : sums[j], __shfl_xor_sync(ALL_LANES, upper ? sums[j] : sums[j + 4], 2));
#pragma unroll
        for (int j = 0; j < 2; j++)  // 8
            two[j] = add32(odd ? four[j + 2] : four[j], __shfl_xor_sync(ALL_LANES, odd ? four[j] : four[j + 2], 1));
        float s = add32(upper ? two[1] : two[0], __shfl_xor_sync(ALL_LANES, upper ? two[0] : two[1], 2));  // 4
        s = add32(s, __shfl_xor_sync(ALL_LANES, s, 1));                                                   // 2
        s = add32(s, __shfl_xor_sync(ALL_LANES, s, 2));                                                   // 1
        return add32(s, 0.f);
    }
};

// A branch's output that waits to be added to hyper-connection streams, one value for each row of a matrix:
// streams (T, C, D) += strength (T, C) y (T, D). streams null: nothing waits.
struct Branch {
    float *streams;
    const float *y, *strength;
    int D;
};

DEVICE void add_branch(const Branch &b, int c, int row, int rows) {
    float *p = b.streams + (size_t)c * rows + row;
    *p = fma32(b.strength[c * (rows / b.D) + row / b.D], b.y[(size_t)c * b.D + row % b.D], *p);
}
