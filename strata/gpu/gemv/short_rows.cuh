// Down products of experts whose rows are short. K is a constant here, and with it every place in a row block; a block
// takes `per` pairs of row blocks, so that what comes before the products is done once for them, and a warp asks for the
// next pair's weights where it has used those of its own. The same bits as product (kernels.cuh).
#pragma once
#include "gemv/wanted.cuh"

#define SHORT_THREADS 128

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

// Codes of MOST columns of K values, then their scales, as they lie in shared memory.
template <int K, int MOST>
struct Near {
    enum { CODES = K / 16, SCALES = K / 128, PIECES = CODES + SCALES,
           HELD = (MOST * PIECES + SHORT_THREADS - 1) / SHORT_THREADS };
    static_assert(K % 128 == 0, "a column is whole pieces of 16 bytes");
    uint4 held[HELD];  // what a thread brings

    // Asks for the columns of a group's entries.
    DEVICE void load(const Quantised &x, const Group &g) {
        int n = __popc(g.have), first = __ffs((int)g.have) - 1;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            int i = threadIdx.x + k * SHORT_THREADS, t = i / PIECES, at = i - t * PIECES;
            u32 entry = __shfl_sync(ALL_LANES, g.mine, first + t);
            u32 row = entry * (u32)(K / 128);  // in pieces of scales; eight times that of codes
            const uint4 *from = at < CODES ? (const uint4 *)x.codes + (8 * row + at)
                                           : (const uint4 *)x.scales + (row + at - CODES);
            if (t < n) held[k] = *from;
        }
    }
    DEVICE void store(int n, uint4 *area) const {
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            int i = threadIdx.x + k * SHORT_THREADS, t = i / PIECES, at = i - t * PIECES;
            if (t < n) area[at < CODES ? t * CODES + at : MOST * CODES + t * SCALES + at - CODES] = held[k];
        }
    }
    template <int T>
    DEVICE static Columns<T> columns(const uint4 *area) {
        Columns<T> c = {(const i8 *)area, (const float *)(area + MOST * CODES), nullptr, {}};
#pragma unroll
        for (int t = 0; t < T; t++) c.row[t] = t * K;
        return c;
    }
};

// The pairs of a warp: from its own first one on every WARPS-th up to `end`.
template <class F, int K>
struct Pairs {
    typedef RowPair<F, K> Pair;
    enum { WARPS = SHORT_THREADS / 32, BYTES = 2 * Pair::BYTES };
    typedef typename Pair::Raw Raw;
    Places chunks, steps;
    Pair w;
    int pair, end, row, q;

    DEVICE Pairs(int first, int end)
        : pair(first + (threadIdx.x >> 5)), end(end), row(threadIdx.x >> 3 & 3), q(threadIdx.x & 7) {}
    // Asks for the first. Warps without one load the last of all: all bring the columns.
    DEVICE void start(const u8 *matrix) {
        const u8 *at = opaque(matrix + (u64)((u32)min(pair, end - 1) * (u32)BYTES));
        chunks = Sections<Raw>::template places<false>(at, row, q);
        steps = Sections<Raw>::template places<true>(at, row, q);
#pragma unroll
        for (int c = 0; c < Pair::CHUNKS; c++) w.load_chunk(true, chunks, c);
        w.load_rest(true, steps);
    }
    // Row of the matrix: that of the first pair's eight that Own has in row block r.
    DEVICE int row_of(int r) const { return 8 * pair + 4 * r + row; }
    // All of them times columns that are near; put(output) is called once a pair.
    template <int T, class P>
    DEVICE void multiply(const Columns<T> &near, P put) {
        const u32 further = opaque((u32)BYTES * (u32)WARPS);  // as a constant it takes registers, for addresses ahead
#pragma unroll 1
        for (int left = end - pair; left > 0; left -= WARPS) {
            bool more = left > WARPS;
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
            put(lanes.template output<F>(q));
        }
    }
};

// Entries computed elsewhere get zeros, so that what follows meets no garbage.
DEVICE void no_outputs(float *y, int first, int end) {
#pragma unroll 1
    for (int row = 8 * first + threadIdx.x; row < 8 * end; row += SHORT_THREADS) y[row] = 0.f;
}

// Where the matrices of experts lie.
struct Matrices {
    const u8 *weights;
    const u64 *addresses;
    int part;
    i64 stride;

    DEVICE const u8 *of(int expert) const {
        return addresses ? (const u8 *)addresses[3 * expert + part] : weights + expert * stride;
    }
};

// A block for one column.
template <class F, int K>
DEVICE void block_of_one(const Matrices &matrices, const int *ids, const u8 *decisions, int take, const int *jobs, int columns,
                         const Quantised &x, float *y, i64 y_stride, int first, int end, int experts,
                         const Combine &combine) {
    typedef Pairs<F, K> P;
    __shared__ uint4 area[Near<K, 1>::PIECES];
    // As in product.
    if (threadIdx.x < 32) {
        const u8 *matrix = likely_matrix(matrices.weights, matrices.stride, matrices.addresses, matrices.part, ids, jobs,
                                         columns, experts);
        if (matrix) bring_early(matrix + (u32)first * (u32)P::BYTES, (end - first) * P::BYTES, threadIdx.x, 32);
    }
    wait_for_inputs();
    let_next_start();
    Group g = Group::of_expert<1>(ids, decisions, take, jobs, columns);
    if (!g.have) {
        if (!jobs) no_outputs(y + g.mine * y_stride, first, end);
        return;
    }
    P pairs(first, end);
    pairs.start(matrices.of(g.expert));
    Near<K, 1> near;
    near.load(x, g);
    near.store(1, area);
    __syncthreads();
    Own<2, 1> own(pairs.q);
    int row = pairs.row_of(own.r), entry = __shfl_sync(ALL_LANES, g.mine, 0);
    pairs.template multiply<1>(near.template columns<1>(area), [&](float out) {
        if (own.first) {
            if (combine.sums) combine.add(entry, g.expert, row, out);
            else y[entry * y_stride + row] = out;
        }
        row += 8 * P::WARPS;
    });
}

// The products with the columns of a group, which are near.
template <class F, int K, int T>
DEVICE void products_of_group(Pairs<F, K> &pairs, Group g, float *y, i64 y_stride, const uint4 *area) {
    int entry[T], n = g.next<T>(entry);
    Own<2, T> own(pairs.q);
    bool mine = own.first && own.t < n;
    u32 to = entry_of(own.t, entry) * (u32)y_stride + pairs.row_of(own.r);
    pairs.template multiply<T>(Near<K, 4>::template columns<T>(area), [&](float out) {
        if (mine) y[to] = out;
        to += 8 * Pairs<F, K>::WARPS;
    });
}

// A block for up to four columns. It guesses its group by ids that may still change, and asks for its first weights before
// the wait. Behind it ids and columns are asked for together, and a warp that guessed wrong begins anew. What it guessed is
// loaded, so only where matrices lie `stride` apart: a word of a table may itself be old.
template <class F, int K>
DEVICE void block_of_several(const Matrices &matrices, const int *ids, const u8 *decisions, int take, const int *jobs,
                             int columns, const Quantised &x, float *y, i64 y_stride, int first, int end, int experts) {
    typedef Pairs<F, K> P;
    __shared__ uint4 area[4 * Near<K, 4>::PIECES];
    P pairs(first, end);
    Near<K, 4> near;
    Group g;
    Ids seen;
    bool guessed = false;
    bool plain = !decisions && !jobs && !matrices.addresses && columns <= Ids::MOST && columns == gridDim.y;
    if (CAN_PEEK && plain && experts) {
        seen = Ids::of(0, columns, [&](int k) { return peek(ids + k); });
        Wanted w(blockIdx.y, seen.at(blockIdx.y), true);
        w.look(seen, 0, [](int) { return true; });
        g = w.group(0);
        guessed = g.have && (u32)g.expert < (u32)experts;
        if (guessed) {
            const u8 *matrix = matrices.weights + g.expert * matrices.stride;
            pairs.start(matrix);
            const u8 *more = matrix + (u32)(first + P::WARPS) * (u32)P::BYTES;
            int n = (end - first - P::WARPS) * P::BYTES;
#pragma unroll 1
            for (int at = threadIdx.x * LINE; at < n; at += SHORT_THREADS * LINE) bring_early(more + at, 1, 0, 1);
        }
    }
    wait_for_inputs();
    let_next_start();
    if (guessed) {
        Ids now = Ids::of(0, columns, [&](int k) { return ids[k]; });
        near.load(x, g);
        guessed = now.same(seen);
    }
    if (!guessed) {
        g = group_of_expert(blockIdx.y, gridDim.y, ids, decisions, take, jobs, columns);
        if (!g.have) {
            int entry = jobs ? 0 : blockIdx.y / (gridDim.y / columns);
            if (!jobs && !Group::taken(decisions, take, entry)) no_outputs(y + entry * y_stride, first, end);
            return;
        }
        pairs.start(matrices.of(g.expert));
        near.load(x, g);
    }
    int n = __popc(g.have);
    near.store(n, area);
    __syncthreads();
    if (n == 1) products_of_group<F, K, 1>(pairs, g, y, y_stride, area);
    else if (n == 2) products_of_group<F, K, 2>(pairs, g, y, y_stride, area);
    else products_of_group<F, K, 4>(pairs, g, y, y_stride, area);
}

// As product, with ids and without gate and up: a block takes `per` pairs of row blocks. Grid: with M = 1 (columns or jobs,
// tiles), else (tiles, columns * column groups or jobs): what has nothing to do comes last. rows is a multiple of 8; x has a
// row for each entry. experts: how many there are, if ids may be looked at before they are certain, or 0.
template <class F, int K, int M>
STARTS_EARLY __global__ void __launch_bounds__(SHORT_THREADS, M == 1 ? 6 : 5)
short_rows(const u8 *weights, const u8 *, const u64 *addresses, int part, i64 stride, const int *ids, const u8 *decisions,
           int take, const int *jobs, int columns, int, const i8 *codes, const float *scales, const int *, float *y,
           i64 y_stride, int rows, int, i8 *, float *, int *, const float *factors, int experts, u64 *error, u64 where,
           u64 *c_sums, u32 *arrived, const float *c_weights, const float *shared, const float *gate, int per) {
    Matrices matrices = {weights, addresses, part, stride};
    Quantised x = {codes, scales, nullptr};
    int tile = M == 1 ? blockIdx.y : blockIdx.x, first = per * tile, end = min(first + per, rows >> 3);
    if constexpr (M == 1) {
        Combine c = {c_sums, c_weights, factors, shared, gate, y, error, where};
        block_of_one<F, K>(matrices, ids, decisions, take, jobs, columns, x, y, y_stride, first, end, experts, c);
        // Blocks with nothing to do come here too.
        if (c.sums) c.finish(arrived + tile, gridDim.x, 8 * first, 8 * end);
    } else {
        block_of_several<F, K>(matrices, ids, decisions, take, jobs, columns, x, y, y_stride, first, end, experts);
    }
}
