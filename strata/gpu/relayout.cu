// Bytes of the file into the device layout (relayout.py), by tables of where every bit comes from.
#include "exact.cuh"

// One chunk, or what is left of a row behind the last one, of four rows. An entry of `map` tells the source of an
// output bit: bit in the row's part of the chunk (12 bits), row (2), 15: inverted. Output behind the table becomes 0.
//
// Grid: (row blocks, chunks + 1 if something is left). chunk_bytes: bytes of a row in a chunk; row_bytes: of the whole
// row.
KERNEL(256) relayout(const u8 *raw, u8 *out, const u16 *map, int rows, int row_bytes, int chunk_bytes,
                     i64 row_block_bytes) {
    DYNAMIC_SHARED(bytes);
    int chunks = row_bytes / chunk_bytes, piece = blockIdx.y, at = piece * chunk_bytes;
    bool last = piece == chunks;
    int n = last ? row_bytes - at : chunk_bytes;
    for (int r = 0; r < 4; r++) {
        i64 row = (i64)blockIdx.x * 4 + r;
        const u8 *from = raw + row * row_bytes + at;
        for (int i = threadIdx.x; i < n; i += 256) bytes[chunk_bytes * r + i] = row < rows ? from[i] : 0;
    }
    __syncthreads();
    const uint4 *source = (const uint4 *)(map + (last ? 32 * (i64)chunk_bytes : 0));
    u32 *to = (u32 *)(out + blockIdx.x * row_block_bytes + 4 * (i64)at);
    int words = piece + 1 == (int)gridDim.y ? (int)(row_block_bytes - 4 * (i64)at) / 4 : n;
    for (int w = threadIdx.x; w < words; w += 256) {
        u32 word = 0;
        for (int i = 0; i < 4 && w < n; i++) {
            uint4 v = __ldg(source + 4 * w + i);
            u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                u32 m = pairs[j >> 1] >> 16 * (j & 1);
                u32 byte = bytes[chunk_bytes * (m >> 12 & 3) + (m >> 3 & 511)];
                word |= ((byte >> (m & 7) ^ m >> 15) & 1) << (8 * i + j);
            }
        }
        to[w] = word;
    }
}
