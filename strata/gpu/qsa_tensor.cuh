// Attention on tensor cores: products of float16 with float32 sums, and operands out of tiles of cells.
//
// A tile has one cell a row. a are 16 rows, b 8 columns, d 16 x 8: thread 4g + t holds d of rows g (d[0], d[1]) and g + 8
// (d[2], d[3]), columns 2t and 2t + 1.
#pragma once
#include "gemm/tensor.cuh"

#ifndef STRATA_ON_CPU

// d += a b over 16 values.
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if AMPERE
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int k = 0; k < 2; k++)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#endif
}

// b of 16 cells (rows of a tile of `stride` float16, from `tile` on) and 8 neighbouring values of each.
DEVICE void cells_down(const u16 *tile, int stride, u32 (&b)[2]) {
    u32 at = (u32)__cvta_generic_to_shared(tile + (threadIdx.x & 15) * stride);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(at) : "memory");
}

// Two float16 at once, one rounding each.
DEVICE u32 mul_halves(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 sub_halves(u32 a, u32 b) { u32 r; asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }

#else

static inline u32 both_halves(float low, float high) { return f32_half(low) | (u32)f32_half(high) << 16; }
static inline u32 mul_halves(u32 a, u32 b) {
    return both_halves(half_f32(a & 0xffff) * half_f32(b & 0xffff), half_f32(a >> 16) * half_f32(b >> 16));
}
static inline u32 sub_halves(u32 a, u32 b) {
    return both_halves(half_f32(a & 0xffff) - half_f32(b & 0xffff), half_f32(a >> 16) - half_f32(b >> 16));
}
static inline void cells_down(const u16 *tile, int stride, u32 (&b)[2]) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    for (int half = 0; half < 2; half++) {
        const u16 *cell = tile + (8 * half + 2 * t) * stride + g;
        b[half] = cell[0] | (u32)cell[stride] << 16;
    }
}

#endif  // STRATA_ON_CPU

DEVICE u32 halves(float low, float high) { return f32_half(low) | (u32)f32_half(high) << 16; }
