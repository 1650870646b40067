// Value i of a row of blocks as float32, for every format, with the bits of the format's dequantiser: lookups of single
// rows, not products. FORMAT is the ggml id. grid and signs belong to the formats with a table of points.
#pragma once
#include "exact.cuh"

enum Format {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23,
    IQ1_M = 29, BF16 = 30, MXFP4 = 39, NVFP4 = 40, Q2_0 = 42
};

// Blocks have any alignment of their size, so words are put together from bytes.
DEVICE u32 word16(const u8 *p) { return p[0] | (u32)p[1] << 8; }
DEVICE u32 word32(const u8 *p) { return word16(p) | word16(p + 2) << 16; }
DEVICE float half_at(const u8 *p) { return half_f32((u16)word16(p)); }
DEVICE int nibble(const u8 *q, int i, int run) { return q[i % run] >> (i >= run ? 4 : 0) & 15; }

// The integers of 4-bit codes: IQ4_NL's, and E2M1 doubled.
DEVICE int codebook_nl(int code) {
    u64 low = 0xf6eaddcfbfad9881ull, high = 0x7159453526190d01ull;
    return (i8)((code < 8 ? low : high) >> (8 * (code & 7)));
}
DEVICE int codebook_e2m1(int code) {
    int magnitude = (int)(0x0c08060403020100ull >> (8 * (code & 7)) & 255);
    return code & 8 ? -magnitude : magnitude;
}
// Half the value of a scale byte.
DEVICE float e8m0_half(u32 e) { return float_of(e < 2 ? 0x00200000u << e : (e - 1) << 23); }
DEVICE float e4m3_half(u32 code) {
    u32 e = code >> 3 & 15, m = code & 7;
    if (code == 0x7f) return 0.f;
    float unit = float_of((e ? e + 127 - 11 : 127 - 10) << 23);
    return mul32(i32_f32((int)(e ? 8 + m : m)), unit);
}

DEVICE float affine(float d, int scale, float dmin, int minimum, int code) {
    return sub32(mul32(mul32(d, i32_f32(scale)), i32_f32(code)), mul32(dmin, i32_f32(minimum)));
}
DEVICE float scaled(float d, int scale, int code) { return mul32(mul32(d, i32_f32(scale)), i32_f32(code)); }
// (s + offset) (d factor): exact.
DEVICE float part(float d, float factor, int s, float offset) { return mul32(add32(i32_f32(s), offset), mul32(d, factor)); }
DEVICE int signed_point(int point, u32 signs, int i) { return signs >> (i & 7) & 1 ? -point : point; }

// Scale and minimum of sub-block j of Q4_K and Q5_K, from 12 bytes.
DEVICE void six_bits(const u8 *s, int j, int &scale, int &minimum) {
    if (j < 4) {
        scale = s[j] & 63;
        minimum = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        minimum = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

template <int FORMAT>
DEVICE float value_of(const u8 *row, int index, const i8 *grid, const u8 *signs) {
    if (FORMAT == F32) return float_of(word32(row + 4 * (size_t)index));
    if (FORMAT == F16) return half_at(row + 2 * (size_t)index);
    if (FORMAT == BF16) return bf16_f32((u16)word16(row + 2 * (size_t)index));
    const int values = FORMAT == Q2_0 || FORMAT == NVFP4 ? 64
                       : FORMAT == Q4_0 || FORMAT == Q4_1 || FORMAT == Q5_0 || FORMAT == Q5_1 || FORMAT == Q8_0 ||
                               FORMAT == IQ4_NL || FORMAT == MXFP4
                           ? 32
                           : 256;
    const int bytes = FORMAT == Q4_0 || FORMAT == IQ4_NL || FORMAT == Q2_0 ? 18
                      : FORMAT == Q4_1                                     ? 20
                      : FORMAT == Q5_0                                     ? 22
                      : FORMAT == Q5_1                                     ? 24
                      : FORMAT == Q8_0                                     ? 34
                      : FORMAT == MXFP4                                    ? 17
                      : FORMAT == NVFP4                                    ? 36
                      : FORMAT == Q2_K                                     ? 84
                      : FORMAT == Q3_K || FORMAT == IQ3_S                  ? 110
                      : FORMAT == Q4_K                                     ? 144
                      : FORMAT == Q5_K                                     ? 176
                      : FORMAT == Q6_K                                     ? 210
                      : FORMAT == IQ2_XXS                                  ? 66
                      : FORMAT == IQ2_XS                                   ? 74
                      : FORMAT == IQ2_S                                    ? 82
                      : FORMAT == IQ3_XXS                                  ? 98
                      : FORMAT == IQ1_S                                    ? 50
                      : FORMAT == IQ1_M                                    ? 56
                                                                           : 136;
    const u8 *b = row + (size_t)(index / values) * bytes;
    int i = index % values;
    float d = half_at(b);  // where it is first in the block
    if (FORMAT == Q4_0) return mul32(d, i32_f32(nibble(b + 2, i, 16) - 8));
    if (FORMAT == Q4_1) return add32(mul32(d, i32_f32(nibble(b + 4, i, 16))), half_at(b + 2));
    if (FORMAT == Q5_0) return mul32(d, i32_f32((nibble(b + 6, i, 16) | (int)(word32(b + 2) >> i & 1) << 4) - 16));
    if (FORMAT == Q5_1)
        return add32(mul32(d, i32_f32(nibble(b + 8, i, 16) | (int)(word32(b + 4) >> i & 1) << 4)), half_at(b + 2));
    if (FORMAT == Q8_0) return mul32(d, i32_f32((i8)b[2 + i]));
    if (FORMAT == IQ4_NL) return mul32(d, i32_f32(codebook_nl(nibble(b + 2, i, 16))));
    if (FORMAT == MXFP4) return mul32(e8m0_half(b[0]), i32_f32(codebook_e2m1(nibble(b + 1, i, 16))));
    if (FORMAT == NVFP4)
        return mul32(e4m3_half(b[i / 16]), i32_f32(codebook_e2m1(nibble(b + 4 + 8 * (i / 16), i % 16, 8))));
    if (FORMAT == Q2_0) return mul32(d, i32_f32((b[2 + i / 4] >> (2 * (i & 3)) & 3) - 1));
    int plane = (i & 127) / 32, in32 = i & 31, pair = 32 * (i / 64) + in32;
    if (FORMAT == Q2_K) {
        int code = b[16 + 32 * (i / 128) + in32] >> (2 * plane) & 3, s = b[i / 16];
        return affine(half_at(b + 80), s & 15, half_at(b + 82), s >> 4, code);
    }
    if (FORMAT == Q3_K) {
        int code = (b[32 + 32 * (i / 128) + in32] >> (2 * plane) & 3) + 4 * (b[in32] >> (i / 32) & 1) - 4, j = i / 16;
        int low = j < 8 ? b[96 + j] & 15 : b[96 + j - 8] >> 4, high = b[104 + (j & 3)] >> (2 * (j / 4)) & 3;
        return scaled(half_at(b + 108), (low | high << 4) - 32, code);
    }
    if (FORMAT == Q4_K || FORMAT == Q5_K) {
        int scale, minimum, code = b[(FORMAT == Q4_K ? 16 : 48) + pair] >> (i & 32 ? 4 : 0) & 15;
        if (FORMAT == Q5_K) code |= (b[16 + in32] >> (i / 32) & 1) << 4;
        six_bits(b + 4, i / 32, scale, minimum);
        return affine(d, scale, half_at(b + 2), minimum, code);
    }
    if (FORMAT == Q6_K) {
        int low = b[64 * (i / 128) + (i & 63)] >> (i & 64 ? 4 : 0) & 15;
        int high = b[128 + 32 * (i / 128) + in32] >> (2 * plane) & 3;
        return scaled(half_at(b + 208), (i8)b[192 + i / 16], (low | high << 4) - 32);
    }
    if (FORMAT == IQ4_XS) {
        int j = i / 32, low = b[4 + j / 2] >> (4 * (j & 1)) & 15, high = word16(b + 2) >> (2 * j) & 3;
        return scaled(d, (low | high << 4) - 32, codebook_nl(nibble(b + 8 + 16 * j, in32, 16)));
    }
    int eight = i / 8, in8 = eight & 3, sub = i / 32;
    if (FORMAT == IQ2_XXS) {
        u32 aux = word32(b + 2 + 8 * sub + 4);
        int point = grid[8 * b[2 + 8 * sub + in8] + (i & 7)];
        return mul32(part(d, 0.25f, aux >> 28, 0.5f), i32_f32(signed_point(point, signs[aux >> (7 * in8) & 127], i)));
    }
    if (FORMAT == IQ2_XS) {
        u32 q = word16(b + 2 + 2 * eight);
        int s = b[66 + sub] >> (i & 16 ? 4 : 0) & 15, point = grid[8 * (q & 511) + (i & 7)];
        return mul32(part(d, 0.25f, s, 0.5f), i32_f32(signed_point(point, signs[q >> 9], i)));
    }
    if (FORMAT == IQ2_S) {
        int n = b[2 + eight] | (b[66 + sub] >> (2 * in8) & 3) << 8, s = b[74 + sub] >> (i & 16 ? 4 : 0) & 15;
        return mul32(part(d, 0.25f, s, 0.5f), i32_f32(signed_point(grid[8 * n + (i & 7)], b[34 + eight], i)));
    }
    if (FORMAT == IQ3_XXS) {
        u32 aux = word32(b + 66 + 4 * sub);
        int point = grid[4 * b[2 + i / 4] + (i & 3)];
        return mul32(part(d, 0.5f, aux >> 28, 0.5f), i32_f32(signed_point(point, signs[aux >> (7 * in8) & 127], i)));
    }
    if (FORMAT == IQ3_S) {
        int n = b[2 + i / 4] | (b[66 + sub] >> (i / 4 & 7) & 1) << 8, s = b[106 + sub / 2] >> (sub & 1 ? 4 : 0) & 15;
        return mul32(part(d, 1.f, 2 * s, 1.f), i32_f32(signed_point(grid[4 * n + (i & 3)], b[74 + eight], i)));
    }
    if (FORMAT == IQ1_S) {
        u32 h = word16(b + 34 + 2 * sub);
        int n = b[2 + eight] | (h >> (3 * in8) & 7) << 8;
        return mul32(part(d, 0.125f, 2 * (h >> 12 & 7), 1.f), i32_f32(8 * grid[8 * n + (i & 7)] + (h & 0x8000 ? -1 : 1)));
    }
    // IQ1_M
    u32 h = b[32 + eight / 2] >> (eight & 1 ? 4 : 0) & 15, n = b[eight] | (h & 7) << 8;
    u32 s0 = word16(b + 48), s1 = word16(b + 50), s2 = word16(b + 52), s3 = word16(b + 54);
    float scale = half_f32((u16)(s0 >> 12 | (s1 >> 8 & 0xf0) | (s2 >> 4 & 0xf00) | (s3 & 0xf000)));
    int j = i / 16, s = word16(b + 48 + 2 * (j / 4)) >> (3 * (j & 3)) & 7;
    return mul32(part(scale, 0.125f, 2 * s, 1.f), i32_f32(8 * grid[8 * n + (i & 7)] + (h & 8 ? -1 : 1)));
}
