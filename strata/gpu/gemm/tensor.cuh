// Tensor-core products of one warp and copies into shared memory that run beside the arithmetic.
//
// Both kinds of product take blocks of 32 bytes along the summed axis, 32 int8 or 16 bfloat16: a are 16 rows, b 8
// columns. Thread 4g + t holds bytes 8t .. 8t + 7 of rows g (a[0], a[2]) and g + 8 (a[1], a[3]) and of column g (b). That
// is not the order of the instruction's description, but the same one on both sides, and a sum has no order.
// d: rows g (d[0], d[1]) and g + 8 (d[2], d[3]), columns 2t and 2t + 1.
#pragma once
#include "sums.cuh"

#ifndef STRATA_ON_CPU

#if __CUDA_ARCH__ >= 800
#define AMPERE 1
#else
#define AMPERE 0
#endif

// d = c + a b, exact.
DEVICE void mma_s8(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2], int c) {
#if AMPERE
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = c;
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
            : "+r"(d[2 * (i & 1)]), "+r"(d[2 * (i & 1) + 1])
            : "r"(a[i]), "r"(b[i >> 1]));
#endif
}

// d += a b in float32, in the order of the hardware.
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if AMPERE
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    // Turing has no such product: every thread gets its operands from the others.
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll 1
    for (int k = 0; k < 4; k++) {
        u32 rows[4], columns[4];
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i] = __shfl_sync(ALL_LANES, a[i], 4 * g + k);
#pragma unroll
        for (int i = 0; i < 4; i++) columns[i] = __shfl_sync(ALL_LANES, b[i >> 1], 4 * (2 * t + (i & 1)) + k);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 x = rows[(i >> 1) + 2 * half], y = columns[(i & 1) + 2 * half];
                d[i] = fma32(float_of(x << 16), float_of(y << 16), d[i]);
                d[i] = fma32(float_of(x & 0xffff0000u), float_of(y & 0xffff0000u), d[i]);
            }
    }
#endif
}

// 16, 8 or 4 bytes to shared memory; zeros instead if there are none. They are there after a copy_wait and a barrier.
template <int BYTES>
DEVICE void copy(void *to, const void *from, bool some = true) {
#if AMPERE
    u32 at = (u32)__cvta_generic_to_shared(to);
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(at), "l"(from), "r"(some ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0],[%1],%2,%3;" ::"r"(at), "l"(from), "n"(BYTES),
                     "r"(some ? BYTES : 0) : "memory");
#else
    if (BYTES == 16) *(uint4 *)to = some ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
    if (BYTES == 8) *(uint2 *)to = some ? *(const uint2 *)from : make_uint2(0, 0);
    if (BYTES == 4) *(u32 *)to = some ? *(const u32 *)from : 0;
#endif
}
// Ends a group of copies.
DEVICE void copy_commit() {
#if AMPERE
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most LATER groups are on their way.
template <int LATER>
DEVICE void copy_wait() {
#if AMPERE
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#endif
}

#endif  // STRATA_ON_CPU

// A tile has 64 bytes of every row, in two halves of 32, each a block of a product. Halves change places in every second
// pair of rows, so that the threads of a product, four rows at a time, meet all banks.
DEVICE u32 in_tile(int row, int half) { return row * 64 + ((half ^ row >> 1) & 1) * 32; }

// 16 bytes, number `unit` of 4, of a row into a tile.
DEVICE void copy_unit(u8 *tile, int row, int unit, const void *from, bool some = true) {
    copy<16>(tile + in_tile(row, unit >> 1) + 16 * (unit & 1), from, some);
}
// Where this thread finds its part of block 0 of eight rows as columns of a product, from `row` (a multiple of 8) on. That
// of block 1 is the same place ^ 32, that of the next eight rows the same + 512.
DEVICE u32 columns_at(int row) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    return in_tile(row + g, 0) + 8 * t;
}
DEVICE void columns_of(const u8 *at, u32 (&b)[2]) {
    uint2 v = *(const uint2 *)at;
    b[0] = v.x, b[1] = v.y;
}

// The other operand comes in pairs of rows, whose words of four bytes alternate: a thread finds all of its operand in one
// place, in the order of its registers. A tile has 128 bytes of every pair; halves change places in every second pair.
DEVICE u32 in_pairs(int pair, int half) { return pair * 128 + ((half ^ pair) & 1) * 64; }

// 16 bytes, number `unit` of 8, of a pair into a tile.
DEVICE void copy_pair_unit(u8 *tile, int pair, int unit, const void *from, bool some = true) {
    copy<16>(tile + in_pairs(pair, unit >> 2) + 16 * (unit & 3), from, some);
}
// Where this thread finds its part of block 0 of eight pairs, from `pair` (a multiple of 8) on: first rows are rows 0 .. 7
// of a product, second ones rows 8 .. 15. That of block 1 is the same place ^ 64, that of the next eight pairs + 1024.
DEVICE u32 rows_at(int pair) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    return in_pairs(pair + g, 0) + 16 * t;
}
DEVICE void rows_of(const u8 *at, u32 (&a)[4]) {
    uint4 v = *(const uint4 *)at;
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
}
