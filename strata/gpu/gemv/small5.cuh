// 5-bit codes in blocks of 32 values: Q5_0 and Q5_1.
//
// The fifth bits of a thread's 16 codes are one u16 a step: bit 4k + i belongs to byte k of word i, words in the order
// low 0, high 0, low 1, high 1. For Q5_0 they are stored inverted.
#pragma once
#include "gemv/small.cuh"

// Nibble k of the u16 to the low half of byte k.
DEVICE u32 spread_nibbles(u32 bits) {
    u32 pairs = (bits | bits << 8) & 0x00ff00ffu;
    return (pairs | pairs << 4) & 0x0f0f0f0fu;
}

struct Q5_0 : HalvesFrom<EIGHTHS, 0> {
    typedef Layout<2, 4, 8, 8, 8, 2, 4, 2> Raw;
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
        u32 fifth = spread_nibbles(raw.b[0] >> 16 * e & 0xffffu);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 w = raw.a[2 * e + j];
            s.low[j] = (w << 3 & 0x78787878u) | (fifth << (7 - 2 * j) & 0x80808080u);  // 8 (code - 16)
            s.high[j] = (w >> 1 & 0x78787878u) | (fifth << (6 - 2 * j) & 0x80808080u);
        }
        s.d = half_of(raw.c, e);
        return s;
    }
};

struct Q5_1 : HalvesFrom<WHOLE, 1> {
    typedef Layout<2, 4, 8, 8, 8, 2, 4, 4> Raw;
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
        u32 fifth = spread_nibbles(raw.b[0] >> 16 * e & 0xffffu);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 w = raw.a[2 * e + j];
            s.low[j] = (w & 0x0f0f0f0fu) | (fifth << (4 - 2 * j) & 0x10101010u);
            s.high[j] = (w >> 4 & 0x0f0f0f0fu) | (fifth << (3 - 2 * j) & 0x10101010u);
        }
        s.d = half_of(raw.c, 2 * e);
        s.least.words[0] = raw.c[e] >> 16;
        return s;
    }
};
