// Dense matrices in formats of few bits: all that a warp reads of its eight rows is on its way before the inputs are there.
#include "gemv/q2_0.cuh"

// N columns at a time; the last ones of several groups overlap, so that places are constants. K: a multiple of a chunk.
// Grid: (columns / N, rows / 32).
template <class F, int K, int N>
STARTS_EARLY __global__ void __launch_bounds__(128, 4)
ahead(const u8 *weights, int columns, const i8 *codes, const float *scales, const int *sums, float *y, i64 y_stride, int rows) {
    typedef typename F::Raw Raw;
    const int T = N == 3 ? 4 : N, E = Raw::STEPS, STEP_VALUES = Raw::BLOCKS * F::VALUES, CHUNKS = K / (E * STEP_VALUES);
    const int GROUP = F::VALUES == 256 ? 256 : 32;
    static_assert(K % (E * STEP_VALUES) == 0, "whole chunks");
    let_next_start();
    int lane = threadIdx.x & 31, q = lane & 7, first = 2 * (4 * blockIdx.y + (threadIdx.x >> 5)), last = (rows - 1) >> 2;
    int from = min((int)blockIdx.x * N, columns - N);
    Raw raw[CHUNKS][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const u8 *block = weights + min(first + r, last) * row_block_bytes<F>(K);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) raw[c][r].load_ahead(block + c * Raw::CHUNK, lane >> 3, q);
    }
    wait_for_inputs();
    Columns<T> x = {codes + from * K, scales + from * (K / GROUP), sums + from * (K / 16), {}};
#pragma unroll
    for (int t = 0; t < T; t++) x.row[t] = (t < N ? t : N - 1) * K;
    Lanes<2, T> lanes;
    lanes.clear();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int e = 0; e < E; e++) {
            add_step<F, 2, T, true>(raw[c], e, q, (c * E + e) * STEP_VALUES, x, nullptr, lanes);
            __syncwarp();  // the columns of all chunks are too much for the registers
        }
    float out = lanes.template output<F>(q);
    Own<2, T> own(q);
    int row = 4 * (first + own.r) + (lane >> 3);
    if (own.first && own.t < N && row < rows) y[(from + own.t) * y_stride + row] = out;
}
