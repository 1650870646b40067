// Pairs of float16 and their products on tensor cores, with float32 sums.
#pragma once
#include "gemm/tensor.cuh"

#ifndef STRATA_ON_CPU

// d += a b over 16 values: a are 16 rows, b 8 columns, d 16 x 8 (tensor.cuh).
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

// Two float16 at once, one rounding each.
DEVICE u32 mul_halves(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 sub_halves(u32 a, u32 b) { u32 r; asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 fma_halves(u32 a, u32 b, u32 c) {
    u32 r; asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;
}

#else

static inline u32 both_halves(float low, float high) { return f32_half(low) | (u32)f32_half(high) << 16; }
static inline u32 mul_halves(u32 a, u32 b) {
    return both_halves(half_f32(a & 0xffff) * half_f32(b & 0xffff), half_f32(a >> 16) * half_f32(b >> 16));
}
static inline u32 sub_halves(u32 a, u32 b) {
    return both_halves(half_f32(a & 0xffff) - half_f32(b & 0xffff), half_f32(a >> 16) - half_f32(b >> 16));
}
// For whole numbers, whose products and sums float32 holds.
static inline u32 fma_halves(u32 a, u32 b, u32 c) {
    return both_halves(half_f32(a & 0xffff) * half_f32(b & 0xffff) + half_f32(c & 0xffff),
                       half_f32(a >> 16) * half_f32(b >> 16) + half_f32(c >> 16));
}

#endif  // STRATA_ON_CPU

DEVICE u32 halves(float low, float high) { return f32_half(low) | (u32)f32_half(high) << 16; }
