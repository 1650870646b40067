// Down products of experts whose rows are short. K is a constant here, and with it every place in a row block; a block
// takes `per` pairs of row blocks, so that what comes before the products is done once for them, and a warp asks for the
// next pair's weights where it has used those of its own. The same bits as product (kernels.cuh).
#pragma once
#include "gemv/kernels.cuh"

// Where a thread's items lie in each section of a chunk, or of a whole step alone.
struct Places {
    const u8 *of[5];

    DEVICE void advance(u32 bytes) {
#pragma unroll
        for (int i = 0; i < 5; i++) of[i] += bytes;
    }
};

template <class LAYOUT>
struct Sections;
template <int E, int P, int I0, int B0, int I1, int B1, int I2, int B2, int I3, int B3, int I4, int B4>
struct Sections<Layout<E, P, I0, B0, I1, B1, I2, B2, I3, B3, I4, B4>> {
    typedef Layout<E, P, I0, B0, I1, B1, I2, B2, I3, B3, I4, B4> Raw;

    template <bool ALONE>
    DEVICE static Places places(const u8 *p, int row, int q) {
        const int S = ALONE ? 1 : E;
        auto item = [&](int items, int bytes) { return p + (u32)(S * bytes * (items * row + (items * q >> 3))); };
        return {{item(I0, B0), item(I1, B1), item(I2, B2), item(I3, B3), item(I4, B4)}};
    }
    // The chunk, or the step alone, `at` bytes behind the places, if `on`; otherwise undefined.
    template <bool ALONE>
    DEVICE static void load_if(bool on, const Places &p, int at, Raw &to) {
        const int S = ALONE ? 1 : E, N = E / S;
        ::load_if<S * B0>(on, p.of[0] + at, to.a);
        ::load_if<S * B1>(on, p.of[1] + at + Raw::O1 / N, to.b);
        ::load_if<S * B2>(on, p.of[2] + at + Raw::O2 / N, to.c);
        ::load_if<S * B3>(on, p.of[3] + at + Raw::O3 / N, to.d);
        ::load_if<S * B4>(on, p.of[4] + at + Raw::O4 / N, to.e);
    }
};

// Four rows of K values twice: where they lie, and what a thread loads of them.
template <class F, int K>
struct RowPair {
    typedef typename F::Raw Raw;
    static const int E = Raw::STEPS, P = Raw::BLOCKS, STEP_VALUES = P * F::VALUES, BLOCKS = K / F::VALUES,
                     CHUNKS = BLOCKS / (E * P), LEFT = BLOCKS - CHUNKS * E * P,
                     BYTES = (BLOCKS * (Raw::STEP / P) + 15) / 16 * 16;
    static_assert(K % F::VALUES == 0 && (LEFT == 0 || LEFT == P), "a row is whole steps");
    static_assert(F::MINIMUM == 0 && F::ENTRIES == 0 && F::VALUES < 256, "no sums come near, no table is filled");
    Raw chunk[CHUNKS][2], rest[2];

    DEVICE void load_chunk(bool on, const Places &chunks, int c) {
#pragma unroll
        for (int r = 0; r < 2; r++) Sections<Raw>::template load_if<false>(on, chunks, r * BYTES + c * Raw::CHUNK, chunk[c][r]);
    }
    DEVICE void load_rest(bool on, const Places &steps) {
        if constexpr (LEFT > 0)
#pragma unroll
            for (int r = 0; r < 2; r++) Sections<Raw>::template load_if<true>(on, steps, r * BYTES + CHUNKS * Raw::CHUNK, rest[r]);
    }
};

// Codes of T columns of K values, then their scales, as they lie in shared memory.
template <int K>
struct Near {
    enum { CODES = K / 16, SCALES = K / 128, PIECES = CODES + SCALES };
    static_assert(K % 128 == 0, "a column is whole pieces of 16 bytes");

    template <int T>
    DEVICE static void bring(const Quantised &x, const int (&entry)[T], uint4 *area) {
#pragma unroll 1
        for (int i = threadIdx.x; i < T * PIECES; i += blockDim.x) {
            int t = T == 1 ? 0 : i / PIECES, piece = i - t * PIECES;
            u32 row = (u32)entry_of(t, entry) * (u32)(K / 128);  // in pieces of scales; eight times that of codes
            bool code = piece < CODES;
            const uint4 *from = code ? (const uint4 *)x.codes + (8 * row + piece)
                                     : (const uint4 *)x.scales + (row + piece - CODES);
            area[code ? t * CODES + piece : T * CODES + t * SCALES + piece - CODES] = *from;
        }
    }
    template <int T>
    DEVICE static Columns<T> columns(const uint4 *area) {
        Columns<T> c = {(const i8 *)area, (const float *)(area + T * CODES), nullptr, {}};
#pragma unroll
        for (int t = 0; t < T; t++) c.row[t] = t * K;
        return c;
    }
};

// The products of a block: pairs from `pair` on, a warp every warps-th up to `end`.
template <class F, int K, int T, int M>
DEVICE void products_of_pairs(const u8 *matrix, Group &g, const Quantised &x, float *y, i64 y_stride, int pair, int end,
                              const Combine &combine, uint4 *area) {
    typedef RowPair<F, K> Pair;
    typedef typename Pair::Raw Raw;
    int lane = threadIdx.x & 31, row = lane >> 3, q = lane & 7, warps = blockDim.x >> 5;
    int entry[T], n = g.next<T>(entry);
    pair += threadIdx.x >> 5;
    // Warps without a pair load the last one's: all bring the columns.
    const u8 *at = opaque(matrix + (u64)((u32)min(pair, end - 1) * (u32)(2 * Pair::BYTES)));
    Places chunks = Sections<Raw>::template places<false>(at, row, q), steps = Sections<Raw>::template places<true>(at, row, q);
    Pair w;
#pragma unroll
    for (int c = 0; c < Pair::CHUNKS; c++) w.load_chunk(true, chunks, c);
    w.load_rest(true, steps);
    Near<K>::template bring<T>(x, entry, area);
    __syncthreads();
    const Columns<T> near = Near<K>::template columns<T>(area);
    const u32 further = (u32)(2 * Pair::BYTES) * (u32)warps;
    Own<2, T> own(q);
    int mine = entry_of(own.t, entry), own_row = 4 * own.r + row;
#pragma unroll 1
    for (; pair < end; pair += warps) {
        bool more = pair + warps < end;
        chunks.advance(further), steps.advance(further);
        Lanes<2, T> lanes;
        lanes.clear();
#pragma unroll
        for (int c = 0; c < Pair::CHUNKS; c++) {
#pragma unroll
            for (int e = 0; e < Raw::STEPS; e++)
                add_step<F, 2, T, true>(w.chunk[c], e, q, (c * Raw::STEPS + e) * Pair::STEP_VALUES, near, nullptr, lanes);
            w.load_chunk(more, chunks, c);
        }
        if constexpr (Pair::LEFT > 0) {
            add_step<F, 2, T, true>(w.rest, 0, q, Pair::CHUNKS * Raw::STEPS * Pair::STEP_VALUES, near, nullptr, lanes);
            w.load_rest(more, steps);
        }
        float out = lanes.template output<F>(q);
        if (own.first && own.t < n) {
            int to = 8 * pair + own_row;
            if (M == 1 && combine.sums) combine.add(mine, g.expert, to, out);
            else y[mine * y_stride + to] = out;
        }
    }
}

template <class F, int K, int M>
DEVICE void block_of_pairs(const u8 *weights, const u64 *addresses, int part, i64 stride, const int *ids, const u8 *decisions,
                           int take, const int *jobs, int columns, const Quantised &x, float *y, i64 y_stride, int rows,
                           int per, const Combine &combine) {
    typedef RowPair<F, K> Pair;
    __shared__ uint4 area[M * Near<K>::PIECES];
    int pair = blockIdx.y * per, end = min(pair + per, rows >> 3);
    // As in product; with several columns most blocks start when the one in front has ended.
    if (M == 1 && threadIdx.x < 32) {
        const u8 *matrix = likely_matrix(weights, stride, addresses, part, ids, jobs);
        if (matrix) bring_early(matrix + (u32)pair * (u32)(2 * Pair::BYTES), (end - pair) * 2 * Pair::BYTES, threadIdx.x, 32);
    }
    wait_for_inputs();
    let_next_start();
    Group g = Group::of_expert<M>(ids, decisions, take, jobs, columns);
    if (!g.have) {
        // Entries computed elsewhere get zeros, so that what follows meets no garbage.
        if (!jobs && !Group::taken(decisions, take, g.mine))
            for (int row = 8 * pair + threadIdx.x; row < 8 * end; row += blockDim.x) y[g.mine * y_stride + row] = 0.f;
        return;
    }
    const u8 *matrix = addresses ? (const u8 *)addresses[3 * g.expert + part] : weights + g.expert * stride;
    int n = __popc(g.have);
    if (M == 1 || n == 1)
        products_of_pairs<F, K, 1, M>(matrix, g, x, y, y_stride, pair, end, combine, area);
    else if (n == 2)
        products_of_pairs<F, K, M == 1 ? 1 : 2, M>(matrix, g, x, y, y_stride, pair, end, combine, area);
    else
        products_of_pairs<F, K, M, M>(matrix, g, x, y, y_stride, pair, end, combine, area);
}

// As product, with ids and without gate and up: grid (columns * column groups or jobs, tiles of `per` pairs). rows is a
// multiple of 8; x has a row for each entry.
template <class F, int K, int M>
STARTS_EARLY __global__ void __launch_bounds__(128, M == 1 ? 6 : 5)
short_rows(const u8 *weights, const u8 *, const u64 *addresses, int part, i64 stride, const int *ids, const u8 *decisions,
           int take, const int *jobs, int columns, int, const i8 *codes, const float *scales, const int *, float *y,
           i64 y_stride, int rows, int, i8 *, float *, int *, const float *factors, int, u64 *error, u64 where,
           u64 *c_sums, u32 *arrived, const float *c_weights, const float *shared, const float *gate, int per) {
    Combine c = {c_sums, c_weights, factors, shared, gate, y, error, where};
    block_of_pairs<F, K, M>(weights, addresses, part, stride, ids, decisions, take, jobs, columns, {codes, scales, nullptr},
                            y, y_stride, rows, per, c);
    // Blocks with nothing to do come here too.
    int first = 8 * per * blockIdx.y, end = min(first + 8 * per, rows);
    if (M == 1 && c.sums) c.finish(arrived + blockIdx.y, gridDim.x, first, end);
}
