// Dense products of Q4_K or Q5_K with several columns on tensor cores: what `product` (kernels.cuh) and `huge` (huge.cuh) do.
#include "gemv/half_block.cuh"

// y (columns, rows) = matrix times x. Grid: (columns / 4, row tiles, or with STAYS blocks that share them out), so that L2
// serves the second reading of a tile.
template <class F, bool STAYS>
STARTS_EARLY __global__ void __launch_bounds__(256, 2)
half_rows(const u8 *weights, int columns, const i8 *codes, const float *scales, const int *sums, float *y, i64 y_stride,
          int rows, int K) {
    DYNAMIC_SHARED(space);
    let_next_start();
    int from = 4 * blockIdx.x, tile = blockDim.x >> 2;
    half_block<F, STAYS>(weights, blockIdx.y * tile, gridDim.y * tile, rows, {codes, scales, sums}, from,
                         min(columns - from, 4), K, y, y_stride, space);
}
