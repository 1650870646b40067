// The two kernels that every format is compiled for: a product, and gate and up of an expert with all that follows until
// the down product. M, 1 or 4, is the most columns at once; both take the matrices of a dense layer or those of experts.
#pragma once
#include "gemv/core.cuh"
#include "quantise.cuh"

// The columns that a block works for: lane l of a warp knows entry `mine`, if bit l of `have` is set.
//
// An entry is what a row of a window wants from a matrix. Dense (ids null): column l. Experts: entry row * choices + j wants
// expert ids[entry]; `decisions` (null: all taken) and the bits of `take` say which entries count. The block of an entry
// serves all entries of its expert, if that entry is the first of them; otherwise it has nothing to do. A row names an
// expert once at most.
struct Group {
    u32 have;
    int mine, expert;

    template <int M>
    DEVICE static Group dense(int columns) {
        int lane = threadIdx.x & 31, from = blockIdx.x * M;
        u32 all = columns < 32 ? (1u << columns) - 1 : ALL_LANES;
        return {all & ((1u << M) - 1) << from, lane, 0};
    }
    DEVICE static bool taken(const int *decisions, u32 take, int entry) {
        return !decisions || take >> (decisions[entry] & 31) & 1;
    }
    template <int M>
    DEVICE static Group of_expert(const int *ids, const int *decisions, u32 take, int rows, int choices) {
        int entry = blockIdx.x, lane = threadIdx.x & 31;
        Group g = {0, -1, ids[entry]};
        if (!taken(decisions, take, entry)) return g;
        if (M == 1 && rows == 1) {
            g.mine = entry;
            g.have = 1;
            return g;
        }
        if (lane < rows)
            for (int j = lane * choices; j < (lane + 1) * choices; j++)
                if (ids[j] == g.expert && taken(decisions, take, j)) g.mine = j;
        g.have = __ballot_sync(ALL_LANES, g.mine >= 0);
        if (__ffs((int)g.have) - 1 != entry / choices) g.have = 0;
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
    for (int t = 0; t < T; t++) c.row[t] = (u32)(entry[t] / share) * (u32)K;
    return c;
}

// Chunks under way: more with few columns, where little else hides the latency of memory.
#define DEPTH_FOR(T) ((T) == 1 ? 3 : 1)

template <class F, int T>
DEVICE void multiply_rows(const u8 *weights, Group &g, const Quantised &x, int share, const u32 *table, float *y,
                          i64 y_stride, int rows, int K) {
    int lane = threadIdx.x & 31, q = lane & 7;
    int first = (blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5)) * 2, last = (rows - 1) >> 2;
    int entry[T];
    int n = g.next<T>(entry);
    size_t bytes = row_block_bytes<F>(K);
    const u8 *block[2] = {weights + first * bytes, weights + (first < last ? first + 1 : last) * bytes};
    float out[2][T];
    multiply<F, 2, T, DEPTH_FOR(T)>(block, K, columns_of(x, entry, share, K), table, out);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = 4 * (first + r) + (lane >> 3);
#pragma unroll
        for (int t = 0; t < T; t++)
            if (q == r * T + t && t < n && row < rows) y[entry[t] * y_stride + row] = out[r][t];
    }
}

// y[entry][row] = matrix times x. A warp takes eight rows. Dense: grid (column groups, row tiles), the matrix at
// `weights`. Experts: grid (entries, row tiles), matrices at addresses[3 expert + part]; x has a row for `share` entries.
template <class F, int M>
__global__ void __launch_bounds__(256, 2)
product(const u8 *weights, const u64 *addresses, int part, const int *ids, const int *decisions, int take, int columns,
        int choices, int share, const i8 *codes, const float *scales, const int *sums, float *y, i64 y_stride, int rows,
        int K, const u32 *tables) {
    __shared__ uint4 space[F::TABLE / 4 + !F::TABLE];
    u32 *table = (u32 *)space;
    Group g = ids ? Group::of_expert<M>(ids, decisions, take, columns, choices) : Group::dense<M>(columns);
    if (!g.have) return;
    const u8 *matrix = ids ? (const u8 *)addresses[3 * g.expert + part] : weights;
    stage<F>(table, tables);
    if ((blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5)) * 8 >= rows) return;
    Quantised x = {codes, scales, sums};
    if constexpr (M == 1) {
        multiply_rows<F, 1>(matrix, g, x, share, table, y, y_stride, rows, K);
    } else {
        while (g.have) {
            int n = __popc(g.have);
            if (n == 1)
                multiply_rows<F, 1>(matrix, g, x, share, table, y, y_stride, rows, K);
            else if (n == 2)
                multiply_rows<F, 2>(matrix, g, x, share, table, y, y_stride, rows, K);
            else
                multiply_rows<F, M>(matrix, g, x, share, table, y, y_stride, rows, K);
        }
    }
}

// What gate_up writes: quantised rows of the down product, one for each entry, in groups of 32.
struct Hidden {
    i8 *codes;
    float *scales;
    int *sums;
    const float *factors;
    int experts, width;
    u64 *error, where;
};

// Rows of gate and up side by side in a thread: they share the activations, and meet in SwiGLU. The 32 rows of a block
// are one group of the quantised row.
template <class F, int T>
DEVICE void gate_up_rows(const u8 *gate, const u8 *up, Group &g, const Quantised &x, int share, const u32 *table, int K,
                         const Hidden &h, float (*rows)[32]) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int entry[T];
    int n = g.next<T>(entry);
    size_t at = (blockIdx.y * 8 + warp) * row_block_bytes<F>(K);
    const u8 *block[2] = {gate + at, up + at};
    float out[2][T];
    multiply<F, 2, T, DEPTH_FOR(T)>(block, K, columns_of(x, entry, share, K), table, out);
#pragma unroll
    for (int t = 0; t < T; t++) {
        float a = out[0][t], b = out[1][t];
        if (h.factors) {
            a = mul32(a, h.factors[g.expert]);
            b = mul32(b, h.factors[h.experts + g.expert]);
        }
        if ((lane & 7) == t) rows[t][4 * warp + (lane >> 3)] = swiglu32(a, b);
    }
    __syncthreads();
    int mine = entry[0];
#pragma unroll
    for (int t = 1; t < T; t++) mine = warp == t ? entry[t] : mine;
    if (warp < n) {
        float value[1] = {rows[warp][lane]};
        size_t group = (size_t)mine * (h.width / 32) + blockIdx.y;
        if (!quantise_group<1>(value, h.codes + 32 * group, h.scales + group, h.sums + 2 * group) && lane == 0)
            report(h.error, h.where, NOT_FINITE, g.expert);
    }
    __syncthreads();
}

// Grid (column groups or entries, width / 32), 256 threads. factors: (3, experts) on the outputs of gate, up and down.
template <class F, int M>
__global__ void __launch_bounds__(256, 2)
gate_up(const u8 *gate, const u8 *up, const u64 *addresses, const int *ids, const int *decisions, int take, int columns,
        int choices, int share, const i8 *codes, const float *scales, const int *sums, i8 *h_codes, float *h_scales,
        int *h_sums, const float *factors, int experts, int width, int K, const u32 *tables, u64 *error, u64 where) {
    __shared__ uint4 space[F::TABLE / 4 + !F::TABLE];
    __shared__ float rows[M][32];
    u32 *table = (u32 *)space;
    Group g = ids ? Group::of_expert<M>(ids, decisions, take, columns, choices) : Group::dense<M>(columns);
    if (!g.have) return;
    if (ids) {
        gate = (const u8 *)addresses[3 * g.expert];
        up = (const u8 *)addresses[3 * g.expert + 1];
    }
    stage<F>(table, tables);
    Quantised x = {codes, scales, sums};
    Hidden h = {h_codes, h_scales, h_sums, factors, experts, width, error, where};
    if constexpr (M == 1) {
        gate_up_rows<F, 1>(gate, up, g, x, share, table, K, h, rows);
    } else {
        while (g.have) {
            int n = __popc(g.have);
            if (n == 1)
                gate_up_rows<F, 1>(gate, up, g, x, share, table, K, h, rows);
            else if (n == 2)
                gate_up_rows<F, 2>(gate, up, g, x, share, table, K, h, rows);
            else
                gate_up_rows<F, M>(gate, up, g, x, share, table, K, h, rows);
        }
    }
}
