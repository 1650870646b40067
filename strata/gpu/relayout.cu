// Bytes of the file into the device layout (relayout.py), by tables of where every bit comes from.
#include "relayout.cuh"

// One chunk, or what is left of a row behind the last one, of four rows. Output behind the table becomes 0.
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
    const u16 *source = map + (last ? 32 * (i64)chunk_bytes : 0);
    u32 *to = (u32 *)(out + blockIdx.x * row_block_bytes + 4 * (i64)at);
    int words = piece + 1 == (int)gridDim.y ? (int)(row_block_bytes - 4 * (i64)at) / 4 : n;
    for (int w = threadIdx.x; w < words; w += 256) to[w] = w < n ? relaid_word(bytes, chunk_bytes, source, w) : 0;
}
