// Attention on tensor cores: operands of products of float16 (halves.cuh) out of tiles of cells.
//
// A tile has one cell a row. a are 16 rows, b 8 columns, d 16 x 8: thread 4g + t holds d of rows g (d[0], d[1]) and g + 8
// (d[2], d[3]), columns 2t and 2t + 1.
#pragma once
#include "halves.cuh"

#ifndef STRATA_ON_CPU

// b of 16 cells (rows of a tile of `stride` float16, from `tile` on) and 8 neighbouring values of each.
DEVICE void cells_down(const u16 *tile, int stride, u32 (&b)[2]) {
    u32 at = (u32)__cvta_generic_to_shared(tile + (threadIdx.x & 15) * stride);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(at) : "memory");
}

#else

static inline void cells_down(const u16 *tile, int stride, u32 (&b)[2]) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    for (int half = 0; half < 2; half++) {
        const u16 *cell = tile + (8 * half + 2 * t) * stride + g;
        b[half] = cell[0] | (u32)cell[stride] << 16;
    }
}

#endif  // STRATA_ON_CPU

