// Dense products of Q4_K or Q5_K on tensor cores in float16, as a block of them goes: eight rows for each of its warps.
#pragma once
#include "gemv/half_ring.cuh"

// y of rows first .. (8 * warps) of `rows`, and of n <= 4 columns of x from number `from` on. STAYS: then of those `step` rows
// further, and so on. All threads of a block come here, which has not waited for its inputs. space: HalfColumns of K values,
// then a ring for every warp (half.py has the bytes).
template <class F, bool STAYS>
DEVICE void half_block(const u8 *weights, int first, int step, int rows, const Quantised &x, int from, int n, int K, float *y,
                       i64 y_stride, u8 *space) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = warp >> 1, h = warp & 1, g = lane >> 2, t = lane & 3;
    int chunks = K >> 8, last = (rows - 1) >> 2;
    u32 bytes = (u32)row_block_bytes<F>(K);
    HalfRing<F> ring(space + chunks * HalfColumns::CHUNK + warp * HalfRing<F>::BYTES, chunks);
    int asked = first;
    auto aim = [&]() {
        int front = (asked >> 2) + 4 * pair;
        ring.aim([&](int i) { return weights + (u64)(u32)min(front + i, last) * bytes; }, h);
    };
    auto next = [&]() {
        if (!STAYS || asked + step >= rows) return false;
        asked += step;
        aim();
        return true;
    };
    aim();
    ring.start(next);
    wait_for_inputs();
    Columns<4> columns = {x.codes, x.scales, x.sums, {}};
#pragma unroll
    for (int i = 0; i < 4; i++) columns.row[i] = (u32)(from + min(i, n - 1)) * (u32)K;
    HalfColumns{space}.bring(columns, n, K, threadIdx.x, blockDim.x);
    __syncthreads();
    HalfPlace at(space, h, min(g & 3, n - 1));
    HalfOperands b(h);
    // Of the two threads that have the same outputs, each takes a column.
    int column = 2 * (t & 1) + (t >> 1), row = first + 16 * pair + 8 * h + g;
    float *to = y + ((from + column) * y_stride + row);
    do {
        half_tile(ring, at, h, b, next, [&](const float (&out)[2]) {
            if (column < n && row < rows) *to = t >> 1 ? out[1] : out[0];
        });
        first += step, row += step, to += step;
    } while (STAYS && first < rows);
}
