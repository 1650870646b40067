// Words of the device layout from the bytes of rows, by tables of where every bit comes from (relayout_kernel.py).
#pragma once
#include "exact.cuh"

// Word w of a chunk of four rows that lie in `bytes`, `stride` apart, from the chunk's first byte on. An entry of `map`
// tells the source of an output bit: bit in the row's part of the chunk (12 bits), row (2), 15: inverted.
DEVICE u32 relaid_word(const u8 *bytes, int stride, const u16 *map, int w) {
    u32 word = 0;
    for (int i = 0; i < 4; i++) {
        uint4 v = __ldg((const uint4 *)map + 4 * w + i);
        u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 m = pairs[j >> 1] >> 16 * (j & 1);
            u32 byte = bytes[stride * (m >> 12 & 3) + (m >> 3 & 511)];
            word |= ((byte >> (m & 7) ^ m >> 15) & 1) << (8 * i + j);
        }
    }
    return word;
}
