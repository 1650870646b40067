// Products with one huge dense matrix (a head): as `product` (kernels.cuh), its weights by way of rings in shared memory.
//
// Blocks take a large share of shared memory, which pays where a launch fills the device many times over and not among
// small neighbours.
#pragma once
#include "gemv/kernels.cuh"
#include "gemv/ring.cuh"

// T rows of activations from row `from` on, of which there are n, as all threads of a block bring them into shared memory:
// codes, scales and sums, one behind the other. Ends with a barrier.
template <class F, int T>
DEVICE Columns<T> bring_columns(const Quantised &x, int from, int n, int K, u8 *area) {
    const int GROUP = F::VALUES == 256 ? 256 : 32;
    Columns<T> to = {(i8 *)area, (float *)(area + T * K), nullptr, {}};
    to.sums = (int *)(to.scales + (T * K / GROUP + 3) / 4 * 4);
#pragma unroll
    for (int t = 0; t < T; t++) {
        to.row[t] = t * K;
        u32 row = (u32)(from + (t < n ? t : n - 1)) * (u32)K;
#pragma unroll 4
        for (int i = 16 * threadIdx.x; i < K; i += 16 * blockDim.x)
            *(uint4 *)(to.codes + to.row[t] + i) = *(const uint4 *)(x.codes + row + i);
#pragma unroll 2
        for (int i = threadIdx.x; i < K / GROUP; i += blockDim.x)
            ((float *)to.scales)[to.row[t] / GROUP + i] = x.scales[row / GROUP + i];
        if (F::MINIMUM != 0)
#pragma unroll 4
            for (int i = threadIdx.x; i < K / 32; i += blockDim.x)
                ((int2 *)to.sums)[to.row[t] / 32 + i] = ((const int2 *)x.sums)[row / 32 + i];
    }
    __syncthreads();
    return to;
}
template <class F, int T>
DEVICE int area_bytes(int K) {
    return T * K + (T * K / (F::VALUES == 256 ? 256 : 32) + 3) / 4 * 16 + (T * K / 4 + 15 & ~15);
}

template <class F, int T, int M, int HOW>
DEVICE void huge_rows(const u8 *const (&block)[2], const Quantised &x, int from, int n, float *y, i64 y_stride, int first,
                      int rows, int K, u8 *area, u8 *ring) {
    int lane = threadIdx.x & 31, q = lane & 7;
    float out;
    if constexpr (HOW == BY_REGISTERS) {
        Columns<T> far = {x.codes, x.scales, x.sums, {}};
#pragma unroll
        for (int t = 0; t < T; t++) far.row[t] = (u32)(from + (t < n ? t : n - 1)) * (u32)K;
        out = multiply<F, 2, T, Depth<F, T, M>::VALUE>(block, K, far, nullptr);
    } else {
        Columns<T> near = bring_columns<F, T>(x, from, n, K, area);
        out = multiply_ring<F, 2, T, M, HOW>(block, K, near, nullptr, ring);
    }
    Own<2, T> own(q);
    int row = 4 * (first + own.r) + (lane >> 3);
    if (own.first && own.t < n && row < rows) y[(from + own.t) * y_stride + row] = out;
}

// y (columns, rows) = matrix times x; a warp takes two row blocks. Grid: (columns / M, row tiles). Dynamic shared memory: up
// to M columns, then a ring for every warp.
template <class F, int M, int ASKED = MOST_HOW>
STARTS_EARLY __global__ void __launch_bounds__(128, 4)
huge(const u8 *weights, int columns, const i8 *codes, const float *scales, const int *sums, float *y, i64 y_stride,
     int rows, int K) {
    const int HOW = ASKED < MOST_HOW ? ASKED : MOST_HOW;
    DYNAMIC_SHARED(area);
    let_next_start();
    int warp = threadIdx.x >> 5, first = 2 * (blockIdx.y * (blockDim.x >> 5) + warp), last = (rows - 1) >> 2;
    size_t bytes = row_block_bytes<F>(K);
    // Warps behind the last row do its work again, so that all meet at the barrier.
    const u8 *block[2] = {weights + min(first, last) * bytes, weights + min(first + 1, last) * bytes};
    u8 *ring = area;
    if constexpr (HOW != BY_REGISTERS) {
        ring += area_bytes<F, M>(K) + warp * Stages<F, 2, M>::bytes((int)bytes);
        start_ring<F, 2, M, HOW>(block, K, ring);
    }
    wait_for_inputs();
    Quantised x = {codes, scales, sums};
    int from = blockIdx.x * M, n = min(columns - from, M);
    if (M == 1 || n <= 2) huge_rows<F, M == 1 ? 1 : 2, M, HOW>(block, x, from, n, y, y_stride, first, rows, K, area, ring);
    else huge_rows<F, M, M, HOW>(block, x, from, n, y, y_stride, first, rows, K, area, ring);
}
