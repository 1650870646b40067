// The read side of hyper-connections in one: the branch's output added, the norm of every stream, and the products of the
// normed streams with up to two float matrices, the first one squeezed.
//
// Every block norms all streams of its row for itself, which costs less than a kernel of its own in narrow windows: lane
// t of the norm's sums and of the products is thread t, so streams stay in registers from one to the other. The sums
// with the branch are not stored here, where other blocks still read the streams; the product that follows does that.
#include "early.cuh"
#include "sums.cuh"

#define ROWS 3     // matrix rows of a block
#define STREAMS 4  // most streams
#define AHEAD 2    // streams whose weights are loaded at once

enum Kind { F32_VALUES, F16_VALUES, BF16_VALUES };

// Chains of this thread's lane in n matrix rows of C N 256 values: v[c] holds values t, t + 256, .. of stream c.
template <int KIND, int N>
DEVICE void chains(const u8 *w, int n, int C, const float (&v)[STREAMS][N], float (&acc)[ROWS]) {
    const int BYTES = KIND == F32_VALUES ? 4 : 2;
    u32 row_bytes = C * N * 256 * BYTES;
    w += threadIdx.x * BYTES;
#pragma unroll
    for (int r = 0; r < ROWS; r++) acc[r] = 0.f;
#pragma unroll
    for (int from = 0; from < STREAMS; from += AHEAD) {
        u32 raw[ROWS][AHEAD * N];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u8 *row = w + (r < n ? r : n - 1) * row_bytes;
#pragma unroll
            for (int j = 0; j < AHEAD * N; j++) {
                const u8 *p = row + (from * N + j) * 256 * BYTES;
                raw[r][j] = 0;
                if (from + j / N < C) raw[r][j] = BYTES == 4 ? load_once((const u32 *)p) : load_once((const u16 *)p);
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD * N; j++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                u32 bits = raw[r][j];
                float value = KIND == F16_VALUES ? half_f32((u16)bits) : float_of(KIND == BF16_VALUES ? bits << 16 : bits);
                if (from + j / N < C) acc[r] = fma32(value, v[from + j / N][j % N], acc[r]);
            }
    }
}

// This thread's lane of n matrix rows in 16 bits, C N 256 values each, two values a word.
template <int N>
struct Near16 {
    enum { WORDS = STREAMS * N / 2 };
    u32 words[ROWS][WORDS];
    DEVICE void load(const u8 *w, int n, int C) {
        w += 2 * threadIdx.x;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u8 *row = w + (r < n ? r : n - 1) * (u32)(C * N * 512);
#pragma unroll
            for (int j = 0; j < WORDS; j++) {
                u32 low = 0, high = 0;
                if (2 * j / N < C) low = load_once((const u16 *)(row + 1024 * j));
                if ((2 * j + 1) / N < C) high = load_once((const u16 *)(row + 1024 * j + 512));
                words[r][j] = low | high << 16;
            }
        }
    }
    // Chains: v[c] holds values t, t + 256, .. of stream c.
    template <bool BF16>
    DEVICE void chains(int C, const float (&v)[STREAMS][N], float (&acc)[ROWS]) const {
#pragma unroll
        for (int r = 0; r < ROWS; r++) acc[r] = 0.f;
#pragma unroll
        for (int k = 0; k < 2 * WORDS; k++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                u32 word = words[r][k / 2];
                float value = BF16 ? float_of(k & 1 ? word & 0xffff0000u : word << 16)
                                   : half_f32((u16)(k & 1 ? word >> 16 : word));
                if (k / N < C) acc[r] = fma32(value, v[k / N][k % N], acc[r]);
            }
    }
};

// The same chains for matrices in 32 bits, with few registers.
template <int N>
DEVICE void chains32(const u8 *w, int n, int C, const float (&v)[STREAMS][N], float (&acc)[ROWS]) {
    w += 4 * threadIdx.x;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const u8 *row = w + (r < n ? r : n - 1) * (u32)(C * N * 1024);
        acc[r] = 0.f;
#pragma unroll
        for (int k = 0; k < STREAMS * N; k++)
            if (k / N < C) acc[r] = fma32(float_of(load_once((const u32 *)(row + 1024 * k))), v[k / N][k % N], acc[r]);
    }
}

// Tree over the 256 threads' values in lanes, by one warp.
DEVICE float tree_of(const float *lanes) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = lanes[32 * j + (threadIdx.x & 31)];
    return warp_tree256(v);
}

// x (T, C, D), y (T, D) and a (T, C) or null, norm (C, D), normed (T, C, D); the matrices (n0, C D) and (n1, C D) of kinds
// k0 and k1, out0 (T, n0) = silu(product / squeeze) unless squeeze is 0, out1 (T, n1). D = 256 N.
// Grid: (tiles of ROWS rows, each of one matrix; rows of x). NEAR, for one row of x: weights in 16 bits are in registers before
// the inputs are there. A processor has room for one such block, and the other form, of which it has two, is faster with two rows.
template <int N, bool NEAR = false>
STARTS_EARLY __global__ void __launch_bounds__(256, NEAR ? 1 : 2)
norm_down(const float *x, const float *y, const float *a, const float *norm, float *normed, int C, float eps, const u8 *w0,
          float *out0, int n0, int k0, const u8 *w1, float *out1, int n1, int k1, int squeeze,
          u64 *error, u64 where, u64 where_squeeze) {
    const int D = 256 * N;
    let_next_start();
    __shared__ float lanes[STREAMS][256];
    __shared__ float inverse[STREAMS];
    int t = threadIdx.x, warp = t >> 5, row = blockIdx.y, K = C * D;
    int tiles0 = (n0 + ROWS - 1) / ROWS, tile = blockIdx.x;
    bool second = tile >= tiles0;
    int first = (second ? tile - tiles0 : tile) * ROWS, rows = second ? n1 : n0, kind = second ? k1 : k0;
    int n = rows - first < ROWS ? rows - first : ROWS;
    u32 row_bytes = K * (kind == F32_VALUES ? 4 : 2);
    const u8 *w = (second ? w1 : w0) + (size_t)first * row_bytes;
    float v[STREAMS][N], weight[STREAMS][N];
    const float *stream = x + (size_t)row * K + t;
#pragma unroll
    for (int c = 0; c < STREAMS; c++)
#pragma unroll
        for (int i = 0; i < N; i++) weight[c][i] = c < C ? __ldg(norm + c * D + 256 * i + t) : 0.f;
    Near16<N> near;
    if (NEAR && kind != F32_VALUES) near.load(w, n, C);
    else bring_early(w, n * row_bytes, t, 256);
    wait_for_inputs();
#pragma unroll
    for (int c = 0; c < STREAMS; c++)
#pragma unroll
        for (int i = 0; i < N; i++) v[c][i] = c < C ? stream[c * D + 256 * i] : 0.f;
    if (!NEAR && !CAN_START_EARLY) bring_ahead(w, n * row_bytes, t, 256);  // behind what the norm waits for
    if (y) {
        float branch[N];
#pragma unroll
        for (int i = 0; i < N; i++) branch[i] = y[(size_t)row * D + 256 * i + t];
#pragma unroll
        for (int c = 0; c < STREAMS; c++) {
            float strength = c < C ? a[row * C + c] : 0.f;
#pragma unroll
            for (int i = 0; i < N; i++) v[c][i] = fma32(strength, branch[i], v[c][i]);
        }
    }
#pragma unroll
    for (int c = 0; c < STREAMS; c++) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < N; i++) sum = fma32(v[c][i], v[c][i], sum);
        lanes[c][t] = sum;
    }
    __syncthreads();
    if (warp < C) {
        float squares = tree_of(lanes[warp]), r = inverse_rms(squares, D, eps);
        if ((t & 31) == 0) {
            inverse[warp] = r;
            if (tile == 0 && !(finite32(squares) && finite32(r))) report(error, where, NOT_FINITE, row);
        }
    }
    __syncthreads();
    int mine = tile;  // blocks share out what they all have
    float *target = normed + (size_t)row * K + t;
#pragma unroll
    for (int c = 0; c < STREAMS; c++)
        if (c < C) {
            float r = inverse[c];
#pragma unroll
            for (int i = 0; i < N; i++) {
                v[c][i] = mul32(mul32(v[c][i], r), weight[c][i]);
                if (c * N + i == mine) {
                    target[(c * N + i) * 256] = v[c][i];
                    mine += gridDim.x;
                }
            }
        }
    float acc[ROWS];
    if (NEAR && kind == BF16_VALUES) near.template chains<true>(C, v, acc);
    else if (NEAR && kind == F16_VALUES) near.template chains<false>(C, v, acc);
    else if (NEAR) chains32<N>(w, n, C, v, acc);
    else if (kind == BF16_VALUES) chains<BF16_VALUES, N>(w, n, C, v, acc);
    else if (kind == F16_VALUES) chains<F16_VALUES, N>(w, n, C, v, acc);
    else chains<F32_VALUES, N>(w, n, C, v, acc);
#pragma unroll
    for (int r = 0; r < ROWS; r++) lanes[r][t] = acc[r];
    __syncthreads();
    if (warp >= n) return;
    float s = add32(tree_of(lanes[warp]), 0.f);
    if (t & 31) return;
    if (!second && squeeze) {
        s = silu32(div32(s, i32_f32(squeeze)));
        if (!finite32(s)) report(error, where_squeeze, NOT_FINITE, row);
    }
    (second ? out1 : out0)[(size_t)row * rows + first + warp] = s;
}
