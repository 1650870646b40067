// Several matrices of one shape at once: bytes of the file into the device layout, each to a place of its own or, where
// a block takes whole rows, to the one it comes from.
#include "exact.cuh"

// The field of `FIELD` bits whose lowest bit an entry names: bit in the row's part of the chunk (12 bits), row (2),
// 15: inverted. Rows lie `stride` bytes apart.
template <int FIELD>
DEVICE u32 field_at(const u8 *bytes, int stride, u32 entry) {
    u32 byte = bytes[stride * (entry >> 12 & 3) + (entry >> 3 & 511)];
    return (byte >> (entry & 7) ^ 0u - (entry >> 15)) & ((1u << FIELD) - 1);
}

// n bytes of each of four rows, in units of U; rows that are not there become zeros.
template <class U>
DEVICE void read_rows(U *to, const u8 *from, int row_bytes, int n, int present) {
    int units = n / (int)sizeof(U);
    for (int r = 0; r < 4; r++)
        for (int i = threadIdx.x; i < units; i += 256)
            to[units * r + i] = r < present ? *(const U *)(from + (i64)r * row_bytes + i * sizeof(U)) : U();
}

// Matrix z lies at places[2 z] and goes to places[2 z + 1]. A block takes `together` chunks, or what is left of them and
// of a row, of four rows; output behind the table becomes 0. table: where every field of FIELD bits of a chunk comes
// from, then those of what is left behind the last chunk.
//
// Grid: (row blocks, chunks + 1 if something is left, by `together`, matrices). chunk_bytes: bytes of a row in a chunk;
// row_bytes: of the whole row. Dynamic shared memory: four rows of a block's bytes, 16-byte aligned.
template <int FIELD>
KERNEL(256) relayout_stack(const u64 *places, const u16 *table, int rows, int row_bytes, int chunk_bytes, int together,
                           i64 row_block_bytes) {
    DYNAMIC_SHARED(bytes);
    const int N = 32 / FIELD;  // fields of a word
    int at = blockIdx.y * together * chunk_bytes, n = min(together * chunk_bytes, row_bytes - at);
    int present = rows - 4 * (int)blockIdx.x;
    const u8 *from = (const u8 *)places[2 * blockIdx.z] + (i64)blockIdx.x * 4 * row_bytes + at;
    if (n == row_bytes && present >= 4 && ((u64)from | 4 * n) % 16 == 0) {  // four rows are one run
        for (int i = threadIdx.x; i < n / 4; i += 256) ((uint4 *)bytes)[i] = ((const uint4 *)from)[i];
    } else if (((u64)from | row_bytes | n) % 4 == 0) {
        read_rows((u32 *)bytes, from, row_bytes, n, present);
    } else {
        read_rows(bytes, from, row_bytes, n, present);
    }
    __syncthreads();
    u32 *to = (u32 *)((u8 *)places[2 * blockIdx.z + 1] + blockIdx.x * row_block_bytes + 4 * (i64)at);
    int words = blockIdx.y + 1 == gridDim.y ? (int)(row_block_bytes - 4 * (i64)at) / 4 : n;
    int chunk = 0, inside = threadIdx.x, whole = row_bytes / chunk_bytes * chunk_bytes;
    for (int w = threadIdx.x; w < words; w += 256, inside += 256) {
        while (inside >= chunk_bytes) inside -= chunk_bytes, chunk += chunk_bytes;
        u32 word = 0;
        if (w < n) {
            const u16 *fields = table + N * ((at + chunk == whole ? chunk_bytes : 0) + inside);
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                uint2 v = __ldg((const uint2 *)(fields + i));
                word |= field_at<FIELD>(bytes + chunk, n, v.x & 0xffff) << (FIELD * i);
                word |= field_at<FIELD>(bytes + chunk, n, v.x >> 16) << (FIELD * (i + 1));
                word |= field_at<FIELD>(bytes + chunk, n, v.y & 0xffff) << (FIELD * (i + 2));
                word |= field_at<FIELD>(bytes + chunk, n, v.y >> 16) << (FIELD * (i + 3));
            }
        }
        to[w] = word;
    }
}
