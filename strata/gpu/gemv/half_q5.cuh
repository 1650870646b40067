// Q5_K on tensor cores in float16: as Q4_K (half_q4.cuh), with a fifth bit for each code.
//
// A code times its scale is at most 1,953, which float16 holds, and the 16 products of a lane sum to less than 2^22.
#pragma once
#include "gemv/half_q4.cuh"

// Bits 0 .. 3 of each byte of w, and the others of `fifths`: the compiler would make it twice, once for odd bytes.
DEVICE u32 with_fifths(u32 w, u32 fifths) {
#ifdef STRATA_ON_CPU
    return (w & 0x0f0f0f0fu) | (fifths & 0xf0f0f0f0u);
#else
    u32 r; asm("lop3.b32 %0,%1,%2,%3,0xe4;" : "=r"(r) : "r"(w), "r"(fifths), "r"(0x0f0f0f0fu)); return r;
#endif
}

// Byte i of a word of fifth bits belongs to byte i of the codes: bit 4c to the low nibbles of codes[r][k][c], bit 4c + 1 to the
// high ones.
struct HalfHeads5;
struct HalfRaw5 : HalfRaw {
    typedef HalfHeads5 Heads;
    u32 fifth[2][2];
};

struct HalfHeads5 : HalfHeads {
    DEVICE HalfHeads5(const HalfRaw5 &raw, int h, const HalfOperands &b) : HalfHeads(raw, h, b) {
#pragma unroll
        for (int r = 0; r < 2; r++) high_less[r] = mul_halves(high[r], 0xe400e400u);  // -1024
    }
    DEVICE void rows(const HalfRaw5 &raw, const HalfOperands &b, int k, int c, int odd, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 w = raw.codes[r][k][c], fifth = raw.fifth[r][k];
            u32 low_codes = with_fifths(w, c ? fifth : fifth << 4);
            u32 high_codes = with_fifths(w >> 4, c ? fifth >> 1 : fifth << 3);
            a[r] = fma_halves(with_ones(low_codes >> 8 * odd, 0x001f001fu, b.thousand), low[r], low_less[r]);
            a[2 + r] = fma_halves(with_ones(high_codes >> 8 * odd, 0x001f001fu, b.thousand), high[r], high_less[r]);
        }
    }
};

// What a thread loads of a chunk, by format.
template <class F>
struct HalfRawOf {
    typedef HalfRaw Type;
};
template <>
struct HalfRawOf<Q5_K> {
    typedef HalfRaw5 Type;
};
