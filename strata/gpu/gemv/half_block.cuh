// Dense products of Q4_K or Q5_K on tensor cores in float16, as a block of them goes: eight rows for each of its warps.
#pragma once
#include "gemv/half_ring.cuh"

// y of rows first .. (8 * warps) of `rows`, and of n <= 4 columns of x from number `from` on. All threads of a block come here,
// which has not waited for its inputs. space: HalfColumns of K values, then sums of half the warps (half_bytes in gemv/half.py),
// and behind them a ring for every warp.
template <class F>
DEVICE void half_block(const u8 *weights, int first, int rows, const Quantised &x, int from, int n, int K, float *y,
                       i64 y_stride, u8 *space) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = warp >> 1, h = warp & 1, g = lane >> 2, t = lane & 3;
    int chunks = K >> 8, last = (rows - 1) >> 2, front = (first >> 2) + 4 * pair;
    u32 bytes = (u32)row_block_bytes<F>(K);
    int ring_at = max(chunks * HalfColumns::CHUNK, 4 * HalfSums::FLOATS * 32 * 4);  // half_bytes
    HalfRing<F> ring(space + ring_at + warp * HalfRing<F>::BYTES,
                     [&](int i) { return weights + (u64)min(front + i, last) * bytes; }, h, chunks);
    ring.start();
    wait_for_inputs();
    Columns<4> columns = {x.codes, x.scales, x.sums, {}};
#pragma unroll
    for (int i = 0; i < 4; i++) columns.row[i] = (u32)(from + min(i, n - 1)) * (u32)K;
    HalfColumns{space}.bring<4, true>(columns, n, K, threadIdx.x, blockDim.x);
    __syncthreads();
    HalfSums all;
    const float *others = half_sums(ring, space, n, chunks, all);
    if (h) return;
    float out[4];
    all.rows(others, out);
    // Of the two threads that have the same outputs, each takes a column.
    int column = 2 * (t & 1) + (t >> 1), row = first + 16 * pair + g;
    if (column >= n) return;
    float *to = y + ((from + column) * y_stride + row);
    if (row < rows) to[0] = t >> 1 ? out[1] : out[0];
    if (row + 8 < rows) to[8] = t >> 1 ? out[3] : out[2];
}
