// Rows of K values in BF16 by 128 threads, two lanes each of four rows, whose weights are asked for before the activations are
// there: an activation that a thread loads serves all four.
#pragma once
#include "float_rows.cuh"

#define HELD_ROWS 4

template <int K>
struct HeldRows {
    enum { STEPS = K / 256, ROW = 2 * K };
    static_assert(K % 256 == 0, "whole steps");
    u32 w[HELD_ROWS][STEPS];
    int t;  // first of the two lanes

    DEVICE explicit HeldRows(int thread) : t(2 * thread) {}
    DEVICE void bring(int r, const u8 *row) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) w[r][s] = load_ahead(row + 2 * t + 512 * s);
    }
    // Lanes of N columns, 256 of every column and row, into shared memory. column: where each begins in x. With `renew` words
    // of the next four rows, one behind the other, take the places of those that have been used.
    template <int N>
    DEVICE void times(const float *x, const u32 (&column)[N], float *lanes, bool renew = false, const u8 *next = nullptr) {
        float acc[N][HELD_ROWS][2];
#ifndef STRATA_ON_CPU
#pragma unroll
        for (int r = 0; r < HELD_ROWS; r++)
#pragma unroll
            for (int s = 0; s < STEPS; s++) asm volatile("" : "+r"(w[r][s]));  // not unpacked in front of a loop
#endif
#pragma unroll
        for (int c = 0; c < N; c++)
#pragma unroll
            for (int r = 0; r < HELD_ROWS; r++) acc[c][r][0] = acc[c][r][1] = 0.f;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            float2 v[N];
#pragma unroll
            for (int c = 0; c < N; c++) v[c] = *(const float2 *)(x + column[c] + t + 256 * s);
#pragma unroll
            for (int r = 0; r < HELD_ROWS; r++) {
                float low = float_of(w[r][s] << 16), high = float_of(w[r][s] & 0xffff0000u);
                if (renew) w[r][s] = load_ahead(next + 2 * t + (ROW * r + 512 * s));
#pragma unroll
                for (int c = 0; c < N; c++) {
                    acc[c][r][0] = fma32(low, v[c].x, acc[c][r][0]);
                    acc[c][r][1] = fma32(high, v[c].y, acc[c][r][1]);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < N; c++)
#pragma unroll
            for (int r = 0; r < HELD_ROWS; r++)
                *(float2 *)&lanes[256 * (HELD_ROWS * c + r) + t] = make_float2(acc[c][r][0], acc[c][r][1]);
    }
};
