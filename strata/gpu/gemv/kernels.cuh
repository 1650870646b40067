// The kernel that every format is compiled for: a product with a dense matrix or with those of experts, or gate and up
// of an expert with all that follows until the down product. M, 1 or 4, is the most columns at once.
#pragma once
#include "combine.cuh"
#include "gemv/core.cuh"
#include "quantise.cuh"

// The columns that a block works for: lane l of a warp knows entry `mine`, if bit l of `have` is set.
//
// An entry is what a row of a window wants from a matrix. Dense: column l. Experts: entry i wants expert ids[i]; of the
// entries, those count whose decision is a bit of `take` (decisions null: all). The blocks of an entry serve all
// entries of its expert if it is the first of them; otherwise they have nothing to do. More than M columns are shared
// out to neighbouring blocks, so that L2 serves the second reading. With M = 1 all experts are different. Or blocks have
// jobs instead of entries: their number, then a word for each, first entry of an expert | entries to pass over << 16.
struct Group {
    u32 have;
    int mine, expert;

    template <int M>
    DEVICE static Group dense(int columns) {
        u32 all = columns < 32 ? (1u << columns) - 1 : ALL_LANES;
        return {all & ((1u << M) - 1) << (blockIdx.x * M), (int)threadIdx.x & 31, 0};
    }
    DEVICE static bool taken(const u8 *decisions, u32 take, int entry) {
        return !decisions || take >> (decisions[entry] & 31) & 1;
    }
    template <int M>
    DEVICE static Group of_expert(const int *ids, const u8 *decisions, u32 take, const int *jobs, int entries) {
        int batches = M == 1 || jobs ? 1 : gridDim.x / entries, entry = blockIdx.x / batches, lane = threadIdx.x & 31;
        int from = blockIdx.x % batches * M;
        if (jobs) {
            // Asked for together, also what is no job: there are most_jobs words.
            u32 n = load_volatile(jobs), job = load_volatile(jobs + 1 + blockIdx.x);
            if (blockIdx.x >= n) return {0, 0, 0};
            from = job >> 16;
            entry = job & 0xffff;
        }
        Group g = {0, entry, ids[entry]};
        bool mine = taken(decisions, take, entry);
        if (M == 1 || !mine) {
            g.have = mine;
            return g;
        }
        int found = 0;
        for (int start = 0; start < entries; start += 32) {
            int i = start + lane;
            u32 same = __ballot_sync(ALL_LANES, i < entries && ids[i] == g.expert && taken(decisions, take, i));
            if (!found && same && start + __ffs((int)same) - 1 != entry) return g;
            for (; same; same &= same - 1, found++)
                if (lane == found) g.mine = start + __ffs((int)same) - 1;
        }
        int n = found - from < M ? found - from : M;
        if (n > 0) g.have = ((1u << n) - 1) << from;
        return g;
    }
    // Takes the next T entries off; missing ones repeat the last. Returns how many there were.
    template <int T>
    DEVICE int next(int (&entry)[T]) {
        int n = 0;
#pragma unroll
        for (int t = 0; t < T; t++) {
            if (have) {
                entry[t] = __shfl_sync(ALL_LANES, mine, __ffs((int)have) - 1);
                have &= have - 1;
                n++;
            } else {
                entry[t] = entry[t ? t - 1 : 0];
            }
        }
        return n;
    }
};

struct Quantised {
    const i8 *codes;
    const float *scales;
    const int *sums;
};

template <int T>
DEVICE Columns<T> columns_of(const Quantised &x, const int (&entry)[T], int share, int K) {
    Columns<T> c = {x.codes, x.scales, x.sums, {}};
#pragma unroll
    for (int t = 0; t < T; t++) c.row[t] = (u32)(share == 1 ? entry[t] : entry[t] / share) * (u32)K;
    return c;
}

// Chunks under way: most with one column, where little else hides the latency of memory, none where several columns of
// a format with much to unpack keep the warps busy. As much as 128 registers hold on every architecture.
template <class F, int T, int M>
struct Depth {
    static const int BYTES = sizeof(typename F::Raw);
    static const int MANY = Rotates<F>::DEPTH ? Rotates<F>::DEPTH : F::Raw::LOADED > 40 ? 1 : 2;
    static const int VALUE = M == 1 ? MANY : T == 1 ? (BYTES > 24 ? 1 : 2) : BYTES > 24 || F::ENTRIES > 1024 ? 0 : 1;
};

// Gate and up with what follows them: quantised rows of the down product in groups of 32, one row for each entry.
// codes null: a plain product. factors (3, experts) on the outputs of gate, up and down, or null.
struct Hidden {
    const u8 *up;
    i8 *codes;
    float *scales;
    int *sums;
    const float *factors;
    int experts;
    u64 *error, where;
};

template <int T>
DEVICE int entry_of(int column, const int (&entry)[T]) {
    int e = entry[0];
#pragma unroll
    for (int t = 1; t < T; t++) e = column == t ? entry[t] : e;
    return e;
}

// Warp t quantises column t of n, 32 rows that are tile `tile` of entry entry_at(t).
template <class E>
DEVICE void quantise_hidden(const E &entry_at, int n, int expert, int width, int tile, const Hidden &h, float (*columns)[32]) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (warp >= n) return;
    float value[1] = {columns[warp][lane]};
    size_t group = (size_t)entry_at(warp) * (width / 32) + tile;
    if (!quantise_group<1>(value, h.codes + 32 * group, h.scales + group, h.sums + 2 * group) && lane == 0)
        report(h.error, h.where, NOT_FINITE, expert);
}

// SwiGLU of gate a and up b in row `row` of the 32 of a tile and column `column`, if `mine`; then quantise_hidden.
template <class E>
DEVICE void finish_hidden(float a, float b, bool mine, int row, int column, const E &entry_at, int n, int expert, int width,
                          int tile, const Hidden &h, float (*columns)[32]) {
    if (h.factors) {
        a = mul32(a, h.factors[expert]);
        b = mul32(b, h.factors[h.experts + expert]);
    }
    if (mine) columns[column][row] = swiglu32(a, b);
    __syncthreads();
    quantise_hidden(entry_at, n, expert, width, tile, h, columns);
}

// Whether a lone column of K values is brought near (gemv/choices.py has the same).
DEVICE bool brings_column(int K) { return K % 64 == 0 && K + K / 4 + K / 8 <= 16 << 10; }

// Tile `tile` of the rows. put(entry, row, output): where outputs go that no gate and up take.
template <class F, int T, int M, class P>
DEVICE void rows_of_block(const u8 *weights, Group &g, const Quantised &x, int share, const u32 *table, int rows, int K,
                          const Hidden &h, float (*columns)[32], u8 *area, int tile, P put) {
    int lane = threadIdx.x & 31, q = lane & 7, warp = tile * (blockDim.x >> 5) + (threadIdx.x >> 5);
    int first = h.codes ? warp : 2 * warp, last = (rows - 1) >> 2;
    int entry[T];
    Group again = g;
    g.next<T>(entry);
    u32 bytes = (u32)row_block_bytes<F>(K);
    auto row_block = [&](const u8 *matrix, int i) { return matrix + (u64)(u32)i * bytes; };
    // With one column, warps behind the last row do its work again: all bring the column into shared memory.
    const u8 *block[2] = {row_block(weights, M == 1 ? min(first, last) : first),
                          h.codes ? row_block(h.up, first) : row_block(weights, min(first + 1, last))};
    auto inputs = [&]() {
        Columns<T> c = columns_of(x, entry, share, K);
        if constexpr (M == 1) {
            c = bring_column<F, 2>(c, K, area, threadIdx.x, blockDim.x);
            __syncthreads();
        }
        return c;
    };
    float out = multiply_by<F, 2, T, Depth<F, T, M>::VALUE>(block, K, inputs, table);
    again.have = opaque(again.have);  // found again rather than kept: registers are what limits four columns
    int n = again.next<T>(entry);
    Own<2, T> own(q);
    if (h.codes) {
        float up = __shfl_xor_sync(ALL_LANES, out, 4);  // threads of the first row have gate
        finish_hidden(out, up, own.r == 0 && own.first, 4 * (threadIdx.x >> 5) + (lane >> 3), own.t,
                      [&](int t) { return entry_of(t, entry); }, n, g.expert, rows, tile, h, columns);
        return;
    }
    int row = 4 * (first + own.r) + (lane >> 3);
    if (own.first && own.t < n && row < rows) put(entry_of(own.t, entry), row, out);
}

// Where the matrix of a block's expert lies, by words that may still change or were never written: an entry or an expert
// that there is not is not looked up. Null if the block has none, or if nobody says how many experts there are.
DEVICE const u8 *likely_matrix(const u8 *weights, i64 stride, const u64 *addresses, int part, const int *ids,
                               const int *jobs, int entries, int experts) {
    if (!CAN_PEEK) return nullptr;
    int entry = blockIdx.x;
    if (jobs) {
        int n = peek(jobs), job = peek(jobs + 1 + entry);
        if (entry >= n) return nullptr;
        entry = job & 0xffff;
        if (entry >= entries) return nullptr;
    }
    int e = peek(ids + entry);
    if ((u32)e >= (u32)experts) return nullptr;
    if (!addresses) return weights + e * stride;
    const int *words = (const int *)(addresses + 3 * e + part);
    return (const u8 *)((u64)(u32)peek(words) | (u64)(u32)peek(words + 1) << 32);
}

// y[entry][row] = matrix times x; a warp takes eight rows. Or, with h_codes, gate (the matrix) and up, SwiGLU and the
// quantiser; a block of 256 threads takes 32 rows. Or, with c_sums and M 1, the result of all experts: see Combine.
//
// Dense: grid (column groups, row tiles). Experts: columns entries, grid (columns * column groups or jobs, row tiles); the
// matrices of expert e lie at addresses[3 e + part] (up one further), or `stride` bytes apart. x has a row for `share`
// entries.
template <class F, int M>
DEVICE void block_of_product(const u8 *weights, const u8 *up, const u64 *addresses, int part, i64 stride, const int *ids,
                             const u8 *decisions, int take, const int *jobs, int columns, int share, const Quantised &x,
                             float *y, i64 y_stride, int rows, int K, Hidden h, const Combine &c) {
    const i8 *h_codes = h.codes;
    __shared__ uint4 space[F::TABLE / 4 + !F::TABLE];
    __shared__ float hidden[M][32];
    DYNAMIC_SHARED(area);  // a lone column
    u32 *table = (u32 *)space;
    Group g;
    if (ids) {
        // The kernel in front of a down product starts after the router, so that the experts are most likely known.
        if (M == 1 && !h_codes) {
            size_t bytes = row_block_bytes<F>(K);
            int first = 2 * (blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5)), blocks = ((rows + 3) >> 2) - first;
            const u8 *matrix = blocks > 0 ? likely_matrix(weights, stride, addresses, part, ids, jobs, columns, h.experts)
                                             : nullptr;
            if (matrix) bring_early(matrix + first * bytes, (blocks < 2 ? 1 : 2) * (u32)bytes, threadIdx.x & 31, 32);
        }
        wait_for_inputs();
        let_next_start();
        g = Group::of_expert<M>(ids, decisions, take, jobs, columns);
        if (!g.have) {
            // Entries computed elsewhere get zeros, so that what follows meets no garbage.
            if (!jobs && !h_codes && !Group::taken(decisions, take, g.mine)) {
                int row = blockIdx.y * (blockDim.x / 4) + threadIdx.x;
                if (threadIdx.x < blockDim.x / 4 && row < rows) y[g.mine * y_stride + row] = 0.f;
            }
            return;
        }
        if (addresses) {
            weights = (const u8 *)addresses[3 * g.expert + part];
            if (h_codes) up = (const u8 *)addresses[3 * g.expert + part + 1];
        } else {
            weights += g.expert * stride;
            up += g.expert * stride;
        }
    } else {
        let_next_start();
        g = Group::dense<M>(columns);
    }
    stage<F>(table);
    const bool LATE = M == 1 || F::ENTRIES == 0;  // grid formats have no registers left to wait behind the first loads
    if (!LATE) wait_for_inputs();
    // A lone column comes near, as with M = 1: most experts of a window are wanted by one of its rows.
    const bool NEAR = M == 1 || LoneNear<F>::VALUE;
    int n = __popc(g.have);
    bool alone = M == 1 || (n == 1 && (!NEAR || brings_column(K)));
    if (!(NEAR && alone) && !h_codes && (blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5)) * 8 >= rows) {
        if (LATE) wait_for_inputs();
        return;
    }
    h.up = up;
    auto put = [&](int entry, int row, float out) {
        if (M == 1 && c.sums) c.add(entry, c.factors ? ids[entry] : 0, row, out);  // found again: registers
        else y[entry * y_stride + row] = out;
    };
    if (alone)
        rows_of_block<F, 1, NEAR ? 1 : M>(weights, g, x, share, table, rows, K, h, hidden, area, blockIdx.y, put);
    else if (n <= 2)
        rows_of_block<F, M == 1 ? 1 : 2, M>(weights, g, x, share, table, rows, K, h, hidden, area, blockIdx.y, put);
    else
        rows_of_block<F, M, M>(weights, g, x, share, table, rows, K, h, hidden, area, blockIdx.y, put);
}

// Three blocks a processor with one column of a format that loads little; Q8_0 has four chunks under way instead.
template <class F, int M>
STARTS_EARLY __global__ void __launch_bounds__(256, M == 1 && F::VALUES == 32 && F::MINIMUM == 0 && F::Raw::LOADED <= 20 && F::Raw::BLOCKS > 2 ? 3 : 2)
product(const u8 *weights, const u8 *up, const u64 *addresses, int part, i64 stride, const int *ids,
        const u8 *decisions, int take, const int *jobs, int columns, int share, const i8 *codes, const float *scales, const int *sums,
        float *y, i64 y_stride, int rows, int K, i8 *h_codes, float *h_scales, int *h_sums, const float *factors,
        int experts, u64 *error, u64 where, u64 *c_sums, u32 *arrived, const float *c_weights, const float *shared,
        const float *gate) {
    Combine c = {c_sums, c_weights, factors, shared, gate, y, error, where};
    block_of_product<F, M>(weights, up, addresses, part, stride, ids, decisions, take, jobs, columns, share,
                           {codes, scales, sums}, y, y_stride, rows, K,
                           {up, h_codes, h_scales, h_sums, factors, experts, error, where}, c);
    // Blocks with nothing to do come here too.
    int tile = blockDim.x >> 2, first = blockIdx.y * tile;
    if (M == 1 && c.sums) c.finish(arrived + blockIdx.y, gridDim.x, first, min(first + tile, rows));
}
