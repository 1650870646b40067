// Products of float32 rows with F32, F16 or BF16 matrices: 256 lanes (index mod 256), ascending fma, halving tree.
//
// Up to four matrices that share their input count as one list of rows. T is the number of activation rows a thread
// holds sums of; more rows are further pieces of the grid, fewer repeat the last one and are not stored.
#include "held_rows.cuh"
#include "short_row.cuh"
#include "short_tile.cuh"

struct Matrix {
    const u8 *w;
    float *y;
    int rows, kind, row;
    int squeeze;  // C: the output is silu(y / C), as hyper-connections want it; 0: y
};

// Which matrix row number `row` of the list belongs to; w null behind the last one.
DEVICE Matrix find(int row, const u8 *w0, float *y0, int n0, int k0, const u8 *w1, float *y1, int n1, int k1,
                   const u8 *w2, float *y2, int n2, int k2, const u8 *w3, float *y3, int n3, int k3,
                   int squeeze0) {
    if (row < n0) return Matrix{w0, y0, n0, k0, row, squeeze0};
    row -= n0;
    if (row < n1) return Matrix{w1, y1, n1, k1, row, 0};
    row -= n1;
    if (row < n2) return Matrix{w2, y2, n2, k2, row, 0};
    row -= n2;
    if (row < n3) return Matrix{w3, y3, n3, k3, row, 0};
    return Matrix{nullptr, nullptr, 0, 0, 0, 0};
}

// The output of row m.row for activation row c.
DEVICE void store(const Matrix &m, int c, float y, u64 *error, u64 where) {
    if (m.squeeze) {
        y = silu32(div32(y, i32_f32(m.squeeze)));
        if (!finite32(y)) report(error, where, NOT_FINITE, c);
    }
    m.y[(size_t)c * m.rows + m.row] = y;
}

#define MATRICES                                                                                                      \
    const u8 *w0, float *y0, int n0, int k0, const u8 *w1, float *y1, int n1, int k1, const u8 *w2, float *y2, int n2, \
        int k2, const u8 *w3, float *y3, int n3, int k3, int squeeze0, u64 *error, u64 where, float *streams,          \
        const float *branch, const float *strength, int D
#define FIND(row) find(row, w0, y0, n0, k0, w1, y1, n1, k1, w2, y2, n2, k2, w3, y3, n3, k3, squeeze0)

// One warp a row: short rows and many of them. K is a multiple of 8. Grid: (rows / 8, pieces of T rows).
template <int T>
STARTS_EARLY __global__ void __launch_bounds__(256, T == 1 ? 4 : T == 2 ? 3 : T == 4 ? 2 : 1)
float_gemv(const float *x, int K, int n_x, MATRICES) {
    let_next_start();
    Matrix m = FIND(blockIdx.x * 8 + (threadIdx.x >> 5));
    if (m.w) bring_rows(m.kind, m.w, m.row, 1, K, threadIdx.x & 31, 32);
    wait_for_inputs();
    if (!m.w) return;
    int t = threadIdx.x & 31, lanes = lanes_of(K, 256), first = blockIdx.y * T, left = n_x - first;
    float acc[T][8];
#pragma unroll
    for (int c = 0; c < T; c++)
#pragma unroll
        for (int j = 0; j < 8; j++) acc[c][j] = 0.f;
    if (8 * t < lanes) chains_of<8, T>(m.kind, m.w, m.row, x + (size_t)first * K, left, K, 8 * t, lanes, acc);
    // All lanes have all sums: lane c stores column c.
#pragma unroll
    for (int c = 0; c < T; c++) acc[c][0] = add32(tree_of_eights(acc[c]), 0.f);
    float mine = acc[0][0];
#pragma unroll
    for (int c = 1; c < T; c++) mine = t == c ? acc[c][0] : mine;
    if (t < T && t < left) {
        store(m, first + t, mine, error, where);
        if (streams) add_branch({streams, branch, strength, D}, first + t, m.row, m.rows);
    }
}

// 128 threads a row, two lanes each: long rows and few of them. K >= 256, a multiple of 2. Grid: (rows, pieces).
template <int T>
STARTS_EARLY KERNEL(128) float_gemv_long(const float *x, int K, int n_x, MATRICES) {
    __shared__ float halves[T][128];
    let_next_start();
    Matrix m = FIND(blockIdx.x);
    bring_rows(m.kind, m.w, m.row, 1, K, threadIdx.x, 128);
    wait_for_inputs();
    int t = threadIdx.x, first = blockIdx.y * T, left = n_x - first;
    float acc[T][2];
#pragma unroll
    for (int c = 0; c < T; c++) acc[c][0] = acc[c][1] = 0.f;
    chains_of<2, T>(m.kind, m.w, m.row, x + (size_t)first * K, left, K, 2 * t, 256, acc);
    // Distances 128 and 64 join warps: warp w holds lanes 64 w .. 64 w + 63.
    if (t >= 64)
#pragma unroll
        for (int c = 0; c < T; c++) *(float2 *)&halves[c][2 * (t - 64)] = make_float2(acc[c][0], acc[c][1]);
    __syncthreads();
    if (t < 64)
#pragma unroll
        for (int c = 0; c < T; c++) {
            acc[c][0] = add32(acc[c][0], halves[c][2 * t]);
            acc[c][1] = add32(acc[c][1], halves[c][2 * t + 1]);
        }
    __syncthreads();
    if (t >= 32 && t < 64)
#pragma unroll
        for (int c = 0; c < T; c++) *(float2 *)&halves[c][2 * (t - 32)] = make_float2(acc[c][0], acc[c][1]);
    __syncthreads();
    if (t >= 32) return;
    float mine = 0.f;  // of column t, as above
#pragma unroll
    for (int c = 0; c < T; c++) {
        float a = add32(acc[c][0], halves[c][2 * t]), b = add32(acc[c][1], halves[c][2 * t + 1]);
#pragma unroll
        for (int half = 16; half; half >>= 1) {
            a = add32(a, __shfl_xor_sync(ALL_LANES, a, half));
            b = add32(b, __shfl_xor_sync(ALL_LANES, b, half));
        }
        float s = add32(add32(a, b), 0.f);
        mine = t == c ? s : mine;
    }
    if (t < T && t < left) store(m, first + t, mine, error, where);
}

// Experts: entry blockIdx.y is matrix number ids[entry] times row entry / per_row of x. y (entries, rows). Grid: (rows / 8,
// entries).
STARTS_EARLY KERNEL(256) float_grouped(const float *x, int K, const u8 *w, i64 stride, int kind, int rows, const int *ids, int per_row,
                          float *y) {
    let_next_start();
    wait_for_inputs();
    int row = blockIdx.x * 8 + (threadIdx.x >> 5), entry = blockIdx.y, t = threadIdx.x & 31, lanes = lanes_of(K, 256);
    if (row >= rows) return;
    Matrix m{w + ids[entry] * stride, y, rows, kind, row, 0};
    float acc[1][8];
#pragma unroll
    for (int j = 0; j < 8; j++) acc[0][j] = 0.f;
    if (8 * t < lanes) chains_of<8, 1>(m.kind, m.w, m.row, x + (size_t)(entry / per_row) * K, 1, K, 8 * t, lanes, acc);
    float s = add32(tree_of_eights(acc[0]), 0.f);
    if (t == 0) y[(size_t)entry * rows + row] = s;
}

// Short rows of one matrix in 16 bits. EXTRA: see ShortRow. Grid: rows / 32.
template <int KIND, int EXTRA>
STARTS_EARLY KERNEL(128) float_gemv_short(const float *x, int K, int n_x, const u8 *w, float *y, int rows, float *streams,
                             const float *branch, const float *strength, int D) {
    DYNAMIC_SHARED(bytes);
    let_next_start();
    int tile = blockIdx.x * 32, in_tile = rows - tile < 32 ? rows - tile : 32;
    bring_early(w + (size_t)tile * K * 2, in_tile * K * 2, threadIdx.x, 128);  // loads may sink below the wait
    float *xs = (float *)bytes;
    int lane = threadIdx.x & 31, p = lane & 3, row = (blockIdx.x * 4 + (threadIdx.x >> 5)) * 8 + (lane >> 2);
    const u8 *mine = w + (size_t)(row < rows ? row : rows - 1) * K * 2;
    ShortRow<KIND, EXTRA> weights;
    weights.load(mine, p, K);
    wait_for_inputs();
    for (int i = threadIdx.x; i < n_x * K; i += 128) xs[i] = x[i];
    // The four threads of a row add the branch for a column each, and while the weights are on their way.
    if (streams && row < rows)
        for (int c = p; c < n_x; c += 4) add_branch({streams, branch, strength, D}, c, row, rows);
    __syncthreads();
    for (int c = 0; c < n_x; c++) {
        float s = weights.times(xs + c * K, p, K);
        if (p == 0 && row < rows) y[(size_t)c * rows + row] = s;
    }
}

// The same for three columns and more, four of them at a time, 256 <= K <= 320. Grid: rows / 32.
template <int KIND>
STARTS_EARLY __global__ void __launch_bounds__(128, 3)
float_gemv_tile(const float *x, int K, int n_x, const u8 *w, float *y, int rows, float *streams, const float *branch,
                const float *strength, int D) {
    __shared__ float4 staged[TILE_FLOATS / 4];
    float *xs = (float *)staged;
    let_next_start();
    int tile = blockIdx.x * 32, lane = threadIdx.x & 31, p = lane & 15, first = tile + (threadIdx.x >> 4) * TILE_ROWS;
    ShortTile<KIND> weights;
    weights.load(w, first, rows, p, K);
    int row = first + (p & 3), beside = tile + lane, C = 1, stream = 0, place = 0;  // a warp adds the branch to one column
    if (streams) C = rows / D, stream = beside / D, place = beside % D;
    wait_for_inputs();
    for (int from = 0; from < n_x; from += TILE_COLUMNS) {
        int column = from + (threadIdx.x >> 5);
        bool adds = streams && beside < rows && column < n_x;
        StagedColumns columns;
        columns.load(x + (size_t)from * K, n_x - from, K);
        float *sum = streams + (size_t)column * rows + beside, strength_here = 0.f, term = 0.f, before = 0.f;
        if (adds) strength_here = strength[column * C + stream], term = branch[(size_t)column * D + place], before = *sum;
        if (from) __syncthreads();  // all have used the columns before
        columns.store(xs);
        __syncthreads();
        if (adds) *sum = fma32(strength_here, term, before);
        weights.stay();
        float s = weights.times(xs, p);
        column = from + (p >> 2);
        if (row < rows && column < n_x) y[(size_t)column * rows + row] = s;
    }
}

// Rows of K values in BF16 of one or two matrices. A thread holds two lanes of four rows, which it asks for before it waits
// for the activations; each of these that it loads serves all four. T columns at a time. GROUPS pieces of a block take T
// columns each, and bring the weights together: few rows, where trips for the activations are most of the time.
// Grid: rows / HELD_ROWS.
template <int K, int T, int GROUPS>
STARTS_EARLY __global__ void __launch_bounds__(128 * GROUPS, GROUPS > 1 ? 1 : 5)
float_gemv_held(const float *x, int n_x, const u8 *w0, float *y0, int n0, const u8 *w1, float *y1, int n1) {
    const int STEPS = K / 256, COLUMNS = T * GROUPS, PASS = T < 2 ? T : 2;  // with more columns at once registers are short
    static_assert(GROUPS == 1 || GROUPS == HELD_ROWS, "a row for each piece to bring");
    __shared__ float4 area[HELD_ROWS * COLUMNS * 64];
    __shared__ u32 brought[GROUPS > 1 ? HELD_ROWS * STEPS * 128 : 1];
    float *lanes = (float *)area;  // 256 of every column and row
    let_next_start();
    int thread = threadIdx.x & 127, group = threadIdx.x >> 7, first = HELD_ROWS * blockIdx.x, rows = n0 + n1;
    auto row_at = [&](int r) {
        int row = first + r < rows ? first + r : rows - 1;
        return row < n0 ? w0 + (size_t)row * K * 2 : w1 + (size_t)(row - n0) * K * 2;
    };
    HeldRows<K> held(thread);
    if (GROUPS == 1) {
#pragma unroll
        for (int r = 0; r < HELD_ROWS; r++) held.bring(r, row_at(r));
    } else {
        held.bring(0, row_at(group));
#pragma unroll
        for (int s = 0; s < STEPS; s++) brought[(group * STEPS + s) * 128 + thread] = held.w[0][s];
        __syncthreads();
#pragma unroll
        for (int r = 0; r < HELD_ROWS; r++)
#pragma unroll
            for (int s = 0; s < STEPS; s++) held.w[r][s] = brought[(r * STEPS + s) * 128 + thread];
    }
    wait_for_inputs();
#pragma unroll 1
    for (int from = 0; from < n_x; from += COLUMNS) {
        if (from) __syncthreads();  // the sums before have been read
#pragma unroll 1
        for (int at = group * T; at < group * T + T; at += PASS) {
            u32 column[PASS];
#pragma unroll
            for (int c = 0; c < PASS; c++) column[c] = (u32)(from + at + c < n_x ? from + at + c : n_x - 1) * K;
            held.template times<PASS>(x, column, lanes + 256 * HELD_ROWS * at);
        }
        __syncthreads();
        int own = (threadIdx.x >> 5) * T;  // T sums a warp
        float sum = trees_of_256<T>(lanes + 256 * own);
#pragma unroll
        for (int i = 0; i < T; i++) {
            int c = from + (own + i) / HELD_ROWS, row = first + (own + i) % HELD_ROWS;
            if ((int)(threadIdx.x & 31) == lane_of_pair<T>(i) && c < n_x && row < rows)
                *(row < n0 ? y0 + (size_t)c * n0 + row : y1 + (size_t)c * n1 + row - n0) = sum;
        }
    }
}
