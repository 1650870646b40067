// The device layout back into bytes of the file, by tables of where every bit lies (restore_kernel.py).
#include "relayout.cuh"

// One chunk, or what is left of a row behind the last one, of four rows. An entry of `map` tells where a bit of the four
// rows' parts, side by side, lies in the chunk (14 bits); 15: inverted.
//
// Grid: (row blocks, chunks + 1 if something is left). chunk_bytes: bytes of a row in a chunk; row_bytes: of the whole
// row. Dynamic shared memory: a chunk of four rows, twice.
KERNEL(256) restore(const u8 *relaid, u8 *raw, const u16 *map, int rows, int row_bytes, int chunk_bytes,
                    i64 row_block_bytes) {
    DYNAMIC_SHARED(bytes);
    u32 *chunk = (u32 *)bytes, *back = chunk + chunk_bytes;
    int chunks = row_bytes / chunk_bytes, piece = blockIdx.y, at = piece * chunk_bytes;
    bool last = piece == chunks;
    int n = last ? row_bytes - at : chunk_bytes;
    const u32 *from = (const u32 *)(relaid + blockIdx.x * row_block_bytes + 4 * (i64)at);
    for (int w = threadIdx.x; w < n; w += 256) chunk[w] = from[w];
    __syncthreads();
    // An entry counts bits from the start of the chunk: as if rows were 512 bytes apart.
    const u16 *source = map + (last ? 32 * (i64)chunk_bytes : 0);
    for (int w = threadIdx.x; w < n; w += 256) back[w] = relaid_word(bytes, 512, source, w);
    __syncthreads();
    for (int r = 0; r < 4; r++) {
        i64 row = (i64)blockIdx.x * 4 + r;
        u8 *to = raw + row * row_bytes + at;
        for (int i = threadIdx.x; row < rows && i < n; i += 256) to[i] = ((const u8 *)back)[n * r + i];
    }
}
