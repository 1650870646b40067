// Products of one input with up to five dense matrices of different formats as one launch: the bits of `product` and
// `float_gemv`. A warp takes a unit of one matrix, eight rows of a quantised one or two rows of a float one, so small
// matrices fill processors that large ones leave idle, and nothing waits for a fork. With several columns of formats that
// can go there a kernel of their own has them on tensor cores: every block has units of one matrix only, and two neighbouring
// warps take 16 rows. No block is to take longer than others: Q6_K, of few rows there, stays as it is, four rows a warp, and
// blocks of BF16 hold rows in registers.
#include "float_rows.cuh"
#include "gemv/byte_block.cuh"
#include "gemv/k.cuh"
#include "gemv/kernels.cuh"
#include "gemv/q8_0.cuh"
#include "held_rows.cuh"

// Behind the float kinds: formats by number, as gemv/mixed.py has them.
enum { FIRST_FORMAT = 3, IS_Q3_K = FIRST_FORMAT, IS_Q4_K, IS_Q5_K, IS_Q6_K, IS_IQ4_XS };

struct Part {
    const u8 *w;
    float *y;
    int rows, kind, unit;
};

#define PARTS                                                                                                          \
    const u8 *w0, float *y0, int n0, int k0, const u8 *w1, float *y1, int n1, int k1, const u8 *w2, float *y2, int n2, \
        int k2, const u8 *w3, float *y3, int n3, int k3, const u8 *w4, float *y4, int n4, int k4

// Which matrix a unit belongs to; w null behind the last one. HALF: the units of a matrix are a multiple of the block's warps, a
// power of two, and the last ones may have no rows.
template <bool HALF>
DEVICE Part part_of(int unit, PARTS) {
    auto units = [](int rows, int kind) {
        int n = kind < FIRST_FORMAT ? (rows + 1) >> 1 : HALF && kind == IS_Q6_K ? (rows + 3) >> 2 : (rows + 7) >> 3;
        int warps = blockDim.x >> 5;
        return HALF ? (n + warps - 1) & -warps : n;
    };
    int n = units(n0, k0);
    if (unit < n) return {w0, y0, n0, k0, unit};
    unit -= n, n = units(n1, k1);
    if (unit < n) return {w1, y1, n1, k1, unit};
    unit -= n, n = units(n2, k2);
    if (unit < n) return {w2, y2, n2, k2, unit};
    unit -= n, n = units(n3, k3);
    if (unit < n) return {w3, y3, n3, k3, unit};
    unit -= n, n = units(n4, k4);
    if (unit < n) return {w4, y4, n4, k4, unit};
    return {nullptr, nullptr, 0, 0, 0};
}

// Four R rows a warp.
template <class F, int T, int M, int R>
DEVICE void quantised_unit(const Part &p, const Quantised &x, int from, int n, int K, u8 *area) {
    int lane = threadIdx.x & 31, q = lane & 7, last = (p.rows - 1) >> 2;
    size_t bytes = row_block_bytes<F>(K);
    const u8 *block[R];
#pragma unroll
    for (int r = 0; r < R; r++) block[r] = p.w + min(R * p.unit + r, last) * bytes;
    Columns<T> columns = {x.codes, x.scales, x.sums, {}};
#pragma unroll
    for (int t = 0; t < T; t++) columns.row[t] = (u32)(from + (t < n ? t : n - 1)) * (u32)K;
    if (M > 1) bring_early(block[0], (u32)(block[R - 1] - block[0]) + (u32)bytes, lane, 32);  // registers are short
    auto inputs = [&]() {
        if constexpr (M > 1) return columns;
        else {
            Columns<1> near = bring_column<F>(columns, K, area, lane, 32);
            __syncwarp();
            return near;
        }
    };
    float out = multiply_by<F, R, T, Depth<F, T, M>::VALUE>(block, K, inputs, nullptr);
    Own<R, T> own(q);
    int row = 4 * (R * p.unit + own.r) + (lane >> 3);
    if (own.first && own.t < n && row < p.rows) p.y[(size_t)(from + own.t) * p.rows + row] = out;
}

template <class F, int M, int R = 2>
DEVICE void quantised_columns(const Part &p, const Quantised &x, int from, int n, int K, u8 *area) {
    if (M == 1) quantised_unit<F, 1, M, R>(p, x, from, n, K, area);
    else if (n <= 2) quantised_unit<F, M == 1 ? 1 : 2, M, R>(p, x, from, n, K, area);
    else quantised_unit<F, M, M, R>(p, x, from, n, K, area);
}

template <int T>
DEVICE void float_unit(const Part &p, const float *x, int from, int n, int K) {
    int t = threadIdx.x & 31, lanes = lanes_of(K, 256);
    bring_rows(p.kind, p.w, 2 * p.unit, 2 * p.unit + 1 < p.rows ? 2 : 1, K, t, 32);
    wait_for_inputs();
#pragma unroll 1
    for (int row = 2 * p.unit; row < p.rows && row < 2 * p.unit + 2; row++) {
        float acc[T][8];
#pragma unroll
        for (int c = 0; c < T; c++)
#pragma unroll
            for (int j = 0; j < 8; j++) acc[c][j] = 0.f;
        if (8 * t < lanes) chains_of<8, T>(p.kind, p.w, row, x + (size_t)from * K, n, K, 8 * t, lanes, acc);
#pragma unroll
        for (int c = 0; c < T; c++) {
            float s = add32(tree_of_eights(acc[c]), 0.f);
            if (t == 0 && c < n) p.y[(size_t)(from + c) * p.rows + row] = s;
        }
    }
}

#define HELD_K 2560  // values of rows that are held; gemv/mixed.py has it too

// Rows first .. of a block of 256 threads beside tensor cores: each half of it holds four, and then four more, which it asks for
// while the first meet their last columns. p.rows is a multiple of four. space: 2 * 16 * 256 sums.
DEVICE void held_block(const Part &p, int first, const float *x, int from, int n, float *space) {
    int half = threadIdx.x >> 7, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    first += HELD_ROWS * half;
    HeldRows<HELD_K> held(threadIdx.x & 127);
    auto rows_at = [&](int row) { return p.w + (size_t)(row < p.rows ? row : 0) * (2 * HELD_K); };
    const u8 *mine = rows_at(first), *next = rows_at(first + 2 * HELD_ROWS);
#pragma unroll
    for (int r = 0; r < HELD_ROWS; r++) held.bring(r, mine + 2 * HELD_K * r);
    bring_early(next, HELD_ROWS * 2 * HELD_K, threadIdx.x & 127, 128);
    wait_for_inputs();
#pragma unroll 1
    for (int again = 0; again < 2; again++, first += 2 * HELD_ROWS) {
#pragma unroll 1
        for (int c = 0; c < n; c += 2) {
            u32 columns[2] = {(u32)(from + c) * HELD_K, (u32)(from + min(c + 1, n - 1)) * HELD_K};
            held.times(x, columns, space + 256 * HELD_ROWS * (4 * half + c), !again && c + 2 >= n, next);
        }
        __syncthreads();
        // A warp has the rows of a column.
        int c = warp & 3, row = first + (lane >> 3);
        if (c < n) {
            float sum = trees_of_256<HELD_ROWS>(space + 256 * HELD_ROWS * warp);
            if (lane == lane_of_pair<HELD_ROWS>(lane >> 3) && row < p.rows) p.y[(size_t)(from + c) * p.rows + row] = sum;
        }
        __syncthreads();
    }
}

// x (columns, K) as float32 and in groups of 256 and 32, where a matrix wants them. Grid: (columns / M, units / warps).
// HALF: with matrices on tensor cores.
template <int M, bool HALF = false>
STARTS_EARLY __global__ void __launch_bounds__(256, 2)
mixed(const float *x, int columns, int K, int column_bytes, const i8 *codes256, const float *scales256, const int *sums256,
      const i8 *codes32, const float *scales32, const int *sums32, PARTS) {
    DYNAMIC_SHARED(area);  // with M = 1: a column for every warp, of column_bytes
    let_next_start();
    Part p = part_of<HALF>(blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5), w0, y0, n0, k0, w1, y1, n1, k1, w2, y2, n2,
                           k2, w3, y3, n3, k3, w4, y4, n4, k4);
    Quantised wide = {codes256, scales256, sums256}, narrow = {codes32, scales32, sums32};
    if constexpr (HALF) {
        if (p.w && p.kind == BF16_VALUES && K == HELD_K && !(p.rows & 3)) {
            int from = blockIdx.x * M;
            held_block(p, 2 * (p.unit - (threadIdx.x >> 5)), x, from, min(columns - from, M), (float *)area);
            return;
        }
        if (p.w && p.kind >= FIRST_FORMAT && p.kind != IS_Q6_K) {  // all warps of the block
            int from = blockIdx.x * M, n = min(columns - from, M), front = 8 * (p.unit - (threadIdx.x >> 5));
            if (p.kind == IS_Q3_K) byte_block<Q3_K>(p.w, front, p.rows, wide, from, n, K, p.y, area);
            else if (p.kind == IS_IQ4_XS) byte_block<IQ4_XS>(p.w, front, p.rows, wide, from, n, K, p.y, area);
            else if (p.kind == IS_Q4_K) half_block<Q4_K, false>(p.w, front, 0, p.rows, wide, from, n, K, p.y, p.rows, area);
            else half_block<Q5_K, false>(p.w, front, 0, p.rows, wide, from, n, K, p.y, p.rows, area);
            return;
        }
    }
    if (!p.w || (HALF && p.unit * (p.kind < FIRST_FORMAT ? 2 : 4) >= p.rows)) {
        wait_for_inputs();
        return;
    }
    int from = blockIdx.x * M, n = columns - from < M ? columns - from : M;
    u8 *mine = area + (threadIdx.x >> 5) * column_bytes;
    if (p.kind < FIRST_FORMAT) {
        if (n <= 2) float_unit<M < 2 ? 1 : 2>(p, x, from, n, K);
        else float_unit<M>(p, x, from, n, K);
    } else if (HALF) {
        quantised_columns<Q6_K, M, 1>(p, wide, from, n, K, mine);
    } else if (p.kind == IS_Q3_K) {
        quantised_columns<Q3_K, M>(p, wide, from, n, K, mine);
    } else if (p.kind == IS_Q4_K) {
        quantised_columns<Q4_K, M>(p, wide, from, n, K, mine);
    } else if (p.kind == IS_Q5_K) {
        quantised_columns<Q5_K, M>(p, wide, from, n, K, mine);
    } else if (p.kind == IS_Q6_K) {
        quantised_columns<Q6_K, M>(p, wide, from, n, K, mine);
    } else if (p.kind == IS_IQ4_XS) {
        quantised_columns<IQ4_XS, M>(p, wide, from, n, K, mine);
    } else {
        quantised_columns<Q8_0, M>(p, narrow, from, n, K, mine);
    }
}
