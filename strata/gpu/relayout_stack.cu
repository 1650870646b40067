// Several matrices of one shape at once: bytes of the file into the device layout, each to a place of its own.
#include "exact.cuh"

// The field of `FIELD` bits whose lowest bit an entry names: bit in the row's part of the chunk (12 bits), row (2),
// 15: inverted. Rows lie `stride` bytes apart.
template <int FIELD>
DEVICE u32 field_at(const u8 *bytes, int stride, u32 entry) {
    u32 byte = bytes[stride * (entry >> 12 & 3) + (entry >> 3 & 511)];
    return (byte >> (entry & 7) ^ 0u - (entry >> 15)) & ((1u << FIELD) - 1);
}

// Matrix z lies at places[2 z] and goes to places[2 z + 1]. One chunk, or what is left of a row behind the last one, of
// four rows; output behind the table becomes 0. table: where every field of FIELD bits of a chunk comes from, then those
// of what is left.
//
// Grid: (row blocks, chunks + 1 if something is left, matrices). chunk_bytes: bytes of a row in a chunk; row_bytes: of
// the whole row. Dynamic shared memory: four rows of a chunk.
template <int FIELD>
KERNEL(256) relayout_stack(const u64 *places, const u16 *table, int rows, int row_bytes, int chunk_bytes,
                           i64 row_block_bytes) {
    DYNAMIC_SHARED(bytes);
    const int N = 32 / FIELD;  // fields of a word
    int chunks = row_bytes / chunk_bytes, piece = blockIdx.y, at = piece * chunk_bytes;
    bool last = piece == chunks;
    int n = last ? row_bytes - at : chunk_bytes, present = rows - 4 * (int)blockIdx.x;
    const u8 *from = (const u8 *)places[2 * blockIdx.z] + (i64)blockIdx.x * 4 * row_bytes + at;
    if (((u64)from | row_bytes | n) % 4 == 0) {
        for (int i = threadIdx.x; i < n; i += 256) {
            int r = i / (n / 4), w = i - r * (n / 4);
            ((u32 *)bytes)[i] = r < present ? *(const u32 *)(from + (i64)r * row_bytes + 4 * w) : 0;
        }
    } else {
        for (int r = 0; r < 4; r++)
            for (int i = threadIdx.x; i < n; i += 256) bytes[n * r + i] = r < present ? from[(i64)r * row_bytes + i] : 0;
    }
    __syncthreads();
    if (last) table += N * (i64)chunk_bytes;
    u32 *to = (u32 *)((u8 *)places[2 * blockIdx.z + 1] + blockIdx.x * row_block_bytes + 4 * (i64)at);
    int words = piece + 1 == (int)gridDim.y ? (int)(row_block_bytes - 4 * (i64)at) / 4 : n;
    for (int w = threadIdx.x; w < words; w += 256) {
        u32 word = 0;
        if (w < n) {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                uint2 v = __ldg((const uint2 *)(table + N * w + i));
                word |= field_at<FIELD>(bytes, n, v.x & 0xffff) << (FIELD * i);
                word |= field_at<FIELD>(bytes, n, v.x >> 16) << (FIELD * (i + 1));
                word |= field_at<FIELD>(bytes, n, v.y & 0xffff) << (FIELD * (i + 2));
                word |= field_at<FIELD>(bytes, n, v.y >> 16) << (FIELD * (i + 3));
            }
        }
        to[w] = word;
    }
}
