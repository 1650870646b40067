// Experts over the link: their bytes from host memory, in wide reads, into the device layout.
#include "exact.cuh"

// One of gate, up and down. table, field: where every field of so many bits of a chunk comes from (link_fetch.py), then
// those of a chunk that is not whole. chunk_bytes: of a row; at: behind the start of a place.
struct Part {
    const u16 *table;
    int rows, row_bytes, chunk_bytes, field, block_bytes;
    i64 at;
};

// Four rows to move: n bytes from `from`, fewer than four rows' at the end of a matrix, to `to`.
struct Unit {
    const u8 *from;
    u8 *to;
    int n, part;
};

#define AHEAD 3  // reads of 16 bytes that a thread has under way while its block lays out the rows before

// Reads of a unit's first AHEAD x 4 KiB, if it is aligned for them.
DEVICE void read_ahead(const Unit &u, uint4 (&held)[AHEAD]) {
    if ((u64)u.from % 16) return;
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        int i = threadIdx.x + 256 * k;
        if (i < u.n / 16) held[k] = load_once((const uint4 *)u.from + i);
    }
}

// Bytes [first, n) in words of V; returns where the words end.
template <class V>
DEVICE int copy_words(const u8 *from, u8 *to, int first, int n) {
    int words = n / (int)sizeof(V);
    for (int i = first / (int)sizeof(V) + threadIdx.x; i < words; i += 256) ((V *)to)[i] = load_once((const V *)from + i);
    return words * (int)sizeof(V) > first ? words * (int)sizeof(V) : first;
}

// The unit's bytes into shared memory: what was read ahead, the rest, and zeros for rows that are not there.
DEVICE void settle(const Unit &u, const uint4 (&held)[AHEAD], u8 *bytes, int whole) {
    u64 place = (u64)u.from;
    int done;
    if (place % 16 == 0) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            int i = threadIdx.x + 256 * k;
            if (i < u.n / 16) ((uint4 *)bytes)[i] = held[k];
        }
        done = copy_words<uint4>(u.from, bytes, u.n < 4096 * AHEAD ? u.n / 16 * 16 : 4096 * AHEAD, u.n);
    } else {
        done = place % 8 == 0 ? copy_words<uint2>(u.from, bytes, 0, u.n)
             : place % 4 == 0 ? copy_words<u32>(u.from, bytes, 0, u.n)
             : place % 2 == 0 ? copy_words<u16>(u.from, bytes, 0, u.n) : 0;
    }
    for (int i = done + threadIdx.x; i < whole; i += 256) bytes[i] = i < u.n ? u.from[i] : 0;
}

// A field: bit in the row's part of the chunk (12 bits), row (2), 15: inverted.
template <int FIELD>
DEVICE u32 field_of(const u8 *bytes, int stride, u32 m) {
    u32 byte = bytes[stride * (m >> 12 & 3) + (m >> 3 & 511)];
    return (byte >> (m & 7) ^ 0u - (m >> 15)) & ((1u << FIELD) - 1);
}

// The words of a unit's four rows.
template <int FIELD>
DEVICE void lay_out(const u8 *bytes, const Part &p, u32 *to) {
    const int N = 32 / FIELD;  // fields of a word
    for (int w = threadIdx.x; w < p.block_bytes / 4; w += 256) {
        int inside = w % p.chunk_bytes, start = w - inside;
        const u16 *table = p.table + (start + p.chunk_bytes > p.row_bytes ? N * (i64)p.chunk_bytes : 0) + N * inside;
        u32 word = 0;
        if (w < p.row_bytes) {
#pragma unroll 2
            for (int i = 0; i < N; i += 4) {
                uint2 v = __ldg((const uint2 *)(table + i));
                word |= field_of<FIELD>(bytes + start, p.row_bytes, v.x & 0xffff) << (FIELD * i);
                word |= field_of<FIELD>(bytes + start, p.row_bytes, v.x >> 16) << (FIELD * (i + 1));
                word |= field_of<FIELD>(bytes + start, p.row_bytes, v.y & 0xffff) << (FIELD * (i + 2));
                word |= field_of<FIELD>(bytes + start, p.row_bytes, v.y >> 16) << (FIELD * (i + 3));
            }
        }
        to[w] = word;
    }
}

// Experts that post has listed (work: their number at 1, experts from 3 on, -1: none): matrices at raws (E, 3) in host
// memory to place number s at staging + s blob_bytes. A block takes four rows at a time; any grid. Dynamic shared memory:
// four of the longest rows.
__global__ void __launch_bounds__(256, 3)
link_fetch(const int *work, const u64 *raws, u8 *staging, i64 blob_bytes, const u16 *gate_table, const u16 *up_table,
           const u16 *down_table, i64 up_at, i64 down_at, int gate_rows, int up_rows, int down_rows, int gate_bytes,
           int up_bytes, int down_bytes, int gate_chunk, int up_chunk, int down_chunk, int gate_field, int up_field,
           int down_field, int gate_block, int up_block, int down_block) {
    DYNAMIC_SHARED(bytes);
    int n_gate = (gate_rows + 3) / 4, n_up = (up_rows + 3) / 4, n_all = n_gate + n_up + (down_rows + 3) / 4;
    int units = work[1] * n_all;
    auto part_of = [&](int which) {
        if (which == 0) return Part{gate_table, gate_rows, gate_bytes, gate_chunk, gate_field, gate_block, 0};
        if (which == 1) return Part{up_table, up_rows, up_bytes, up_chunk, up_field, up_block, up_at};
        return Part{down_table, down_rows, down_bytes, down_chunk, down_field, down_block, down_at};
    };
    auto locate = [&](int number) {
        Unit u = {nullptr, nullptr, 0, 0};
        if (number >= units) return u;
        int s = number / n_all, block = number % n_all, e = work[3 + s];
        if (e < 0) return u;
        u.part = block >= n_gate + n_up ? 2 : block >= n_gate;
        block -= u.part == 2 ? n_gate + n_up : u.part ? n_gate : 0;
        Part p = part_of(u.part);
        int rows = p.rows - 4 * block;
        u.n = (rows < 4 ? rows : 4) * p.row_bytes;
        u.from = (const u8 *)raws[3 * (i64)e + u.part] + (i64)4 * block * p.row_bytes;
        u.to = staging + s * blob_bytes + p.at + (i64)block * p.block_bytes;
        return u;
    };
    uint4 held[AHEAD];
    Unit u = locate(blockIdx.x);
    read_ahead(u, held);
    for (int number = blockIdx.x; number < units; number += gridDim.x) {
        Part p = part_of(u.part);
        if (u.n) settle(u, held, bytes, 4 * p.row_bytes);
        __syncthreads();
        Unit following = locate(number + gridDim.x);
        read_ahead(following, held);
        if (u.n) {
            u32 *to = (u32 *)u.to;
            if (p.field == 8) lay_out<8>(bytes, p, to);
            else if (p.field == 4) lay_out<4>(bytes, p, to);
            else if (p.field == 2) lay_out<2>(bytes, p, to);
            else lay_out<1>(bytes, p, to);
        }
        __syncthreads();
        u = following;
    }
}
