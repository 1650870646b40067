// Products of float32 rows with F32, F16 or BF16 matrices: 256 lanes (index mod 256), ascending fma, halving tree.
//
// Up to four matrices that share their input count as one list of rows. T is the number of activation rows a thread
// holds sums of; more rows are further pieces of the grid, fewer repeat the last one and are not stored.
#include "float_rows.cuh"

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

// A branch's output that waits to be added to hyper-connection streams, one value for each row of the first matrix:
// streams (T, C, D) += strength (T, C) y (T, D). streams null: nothing waits.
struct Branch {
    float *streams;
    const float *y, *strength;
    int D;
};

DEVICE void add_branch(const Branch &b, int c, int row, int rows) {
    float *p = b.streams + (size_t)c * rows + row;
    *p = fma32(b.strength[c * (rows / b.D) + row / b.D], b.y[(size_t)c * b.D + row % b.D], *p);
}

#define MATRICES                                                                                                      \
    const u8 *w0, float *y0, int n0, int k0, const u8 *w1, float *y1, int n1, int k1, const u8 *w2, float *y2, int n2, \
        int k2, const u8 *w3, float *y3, int n3, int k3, int squeeze0, u64 *error, u64 where, float *streams,          \
        const float *branch, const float *strength, int D
#define FIND(row) find(row, w0, y0, n0, k0, w1, y1, n1, k1, w2, y2, n2, k2, w3, y3, n3, k3, squeeze0)

// One warp a row: short rows and many of them. K is a multiple of 8. Grid: (rows / 8, pieces of T rows).
template <int T>
__global__ void __launch_bounds__(256, T == 1 ? 4 : T == 2 ? 3 : T == 4 ? 2 : 1) float_gemv(const float *x, int K, int n_x, MATRICES) {
    Matrix m = FIND(blockIdx.x * 8 + (threadIdx.x >> 5));
    if (!m.w) return;
    int t = threadIdx.x & 31, lanes = lanes_of(K, 256), first = blockIdx.y * T, left = n_x - first;
    float acc[T][8];
#pragma unroll
    for (int c = 0; c < T; c++)
#pragma unroll
        for (int j = 0; j < 8; j++) acc[c][j] = 0.f;
    if (8 * t < lanes) chains_of<8, T>(m.kind, m.w, m.row, x + (size_t)first * K, left, K, 8 * t, lanes, acc);
#pragma unroll
    for (int c = 0; c < T; c++) {
        float s = add32(tree_of_eights(acc[c]), 0.f);
        if (t == 0 && c < left) {
            store(m, first + c, s, error, where);
            if (streams) add_branch({streams, branch, strength, D}, first + c, m.row, m.rows);
        }
    }
}

// 128 threads a row, two lanes each: long rows and few of them. K >= 256, a multiple of 2. Grid: (rows, pieces).
template <int T>
KERNEL(128) float_gemv_long(const float *x, int K, int n_x, MATRICES) {
    __shared__ float halves[T][128];
    Matrix m = FIND(blockIdx.x);
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
#pragma unroll
    for (int c = 0; c < T; c++) {
        float a = add32(acc[c][0], halves[c][2 * t]), b = add32(acc[c][1], halves[c][2 * t + 1]);
#pragma unroll
        for (int half = 16; half; half >>= 1) {
            a = add32(a, __shfl_xor_sync(ALL_LANES, a, half));
            b = add32(b, __shfl_xor_sync(ALL_LANES, b, half));
        }
        float s = add32(add32(a, b), 0.f);
        if (t == 0 && c < left) store(m, first + c, s, error, where);
    }
}

// Experts: entry blockIdx.y is matrix number ids[entry] times row entry / per_row of x. y (entries, rows). Grid: (rows / 8,
// entries).
KERNEL(256) float_grouped(const float *x, int K, const u8 *w, i64 stride, int kind, int rows, const int *ids, int per_row,
                          float *y) {
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

// Short rows, 256 <= K <= 512, of one matrix in 16 bits: four threads a row, which needs a sixth of the exchanges. Thread p
// holds lanes 8 t .. 8 t + 7 for t = p, p + 4, .., 28 + p, so that the distances 128, 64 and 32 of the tree stay inside;
// weights stay in registers for all rows of x. EXTRA: how many t have values behind the first 256. Grid: rows / 32.
template <int KIND, int EXTRA>
KERNEL(128) float_gemv_short(const float *x, int K, int n_x, const u8 *w, float *y, int rows, float *streams,
                             const float *branch, const float *strength, int D) {
    DYNAMIC_SHARED(bytes);
    float *xs = (float *)bytes;
    int lane = threadIdx.x & 31, p = lane & 3, row = (blockIdx.x * 4 + (threadIdx.x >> 5)) * 8 + (lane >> 2);
    const u8 *mine = w + (size_t)(row < rows ? row : rows - 1) * K * 2;
    uint4 first[8], second[EXTRA];
#pragma unroll
    for (int m = 0; m < 8; m++) first[m] = load_once((const uint4 *)(mine + 16 * (p + 4 * m)));
#pragma unroll
    for (int m = 0; m < EXTRA; m++) {
        bool there = 8 * (p + 4 * m) + 256 < K;
        second[m] = there ? load_once((const uint4 *)(mine + 16 * (p + 4 * m) + 512)) : make_uint4(0, 0, 0, 0);
    }
    for (int i = threadIdx.x; i < n_x * K; i += 128) xs[i] = x[i];
    // The four threads of a row add the branch for a column each, and while the weights are on their way.
    if (streams && row < rows)
        for (int c = p; c < n_x; c += 4) add_branch({streams, branch, strength, D}, c, row, rows);
    __syncthreads();
    for (int c = 0; c < n_x; c++) {
        const float *column = xs + c * K + 8 * p;
        auto add_terms = [&](const uint4 &packed, const float *at, float (&v)[8]) {
            float4 a = *(const float4 *)at, b = *(const float4 *)(at + 4);
            float values[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                u32 half = j & 1 ? words[j >> 1] >> 16 : words[j >> 1] & 0xffffu;
                v[j] = fma32(KIND == F16_VALUES ? half_f32((u16)half) : float_of(half << 16), values[j], v[j]);
            }
        };
        auto leaf = [&](int m, float (&v)[8]) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = 0.f;
            add_terms(first[m], column + 32 * m, v);
            if (m < EXTRA && 8 * (p + 4 * m) + 256 < K) add_terms(second[m < EXTRA ? m : 0], column + 32 * m + 256, v);
        };
        auto add_to = [&](float (&v)[8], const float (&other)[8]) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = add32(v[j], other[j]);
        };
        float sums[8], right[8], one[8];
        leaf(0, sums), leaf(4, one), add_to(sums, one);
        leaf(2, right), leaf(6, one), add_to(right, one), add_to(sums, right);
        float left[8];
        leaf(1, left), leaf(5, one), add_to(left, one);
        leaf(3, right), leaf(7, one), add_to(right, one), add_to(left, right);
        add_to(sums, left);
        float four[4], two[2];
        bool upper = p & 2, odd = p & 1;
#pragma unroll
        for (int j = 0; j < 4; j++)  // distance 16
            four[j] = add32(upper ? sums[j + 4] : sums[j], __shfl_xor_sync(ALL_LANES, upper ? sums[j] : sums[j + 4], 2));
#pragma unroll
        for (int j = 0; j < 2; j++)  // 8
            two[j] = add32(odd ? four[j + 2] : four[j], __shfl_xor_sync(ALL_LANES, odd ? four[j] : four[j + 2], 1));
        float s = add32(upper ? two[1] : two[0], __shfl_xor_sync(ALL_LANES, upper ? two[0] : two[1], 2));  // 4
        s = add32(s, __shfl_xor_sync(ALL_LANES, s, 1));                                                   // 2
        s = add32(s, __shfl_xor_sync(ALL_LANES, s, 2));                                                   // 1
        if (p == 0 && row < rows) y[(size_t)c * rows + row] = add32(s, 0.f);
    }
}
