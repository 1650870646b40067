// Products of several columns on tensor cores: what `product` (kernels.cuh) does for one matrix or for those of experts.
#include "gemv/kernels.cuh"
#include "gemv/mma_rows.cuh"

// As Group::of_expert<4>, with all ids of up to 96 entries asked for at once.
DEVICE Group group_of_expert(const int *ids, const u8 *decisions, u32 take, const int *jobs, int entries) {
    int batches = jobs ? 1 : gridDim.x / entries, entry = blockIdx.x / batches, lane = threadIdx.x & 31;
    int from = blockIdx.x % batches * 4;
    if (jobs) {
        if (entry >= jobs[0]) return {0, 0, 0};
        entry = jobs[1 + blockIdx.x];
        from = entry >> 16;
        entry &= 0xffff;
    }
    Group g = {0, entry, 0};
    int found = 0, expert = ids[entry];
    bool counts = Group::taken(decisions, take, entry), leads = counts;
    for (int start = 0; start < entries; start += 96) {
        u32 same[3];
        int id[3];
        bool wanted[3];
#pragma unroll
        for (int i = 0; i < 3; i++) {
            int k = start + 32 * i + lane;
            id[i] = k < entries ? ids[k] : -1;
            wanted[i] = k < entries && Group::taken(decisions, take, k);
        }
#pragma unroll
        for (int i = 0; i < 3; i++) {
            same[i] = __ballot_sync(ALL_LANES, id[i] == expert && wanted[i]);
            int first = start + 32 * i;
            if (!found && same[i] && first + __ffs((int)same[i]) - 1 != entry) leads = false;
            for (; same[i]; same[i] &= same[i] - 1, found++)
                if (lane == found) g.mine = first + __ffs((int)same[i]) - 1;
        }
    }
    g.expert = expert;
    if (!leads) {
        if (!counts) g.mine = entry;
        return g;
    }
    int n = min(found - from, 4);
    if (n > 0) g.have = ((1u << n) - 1) << from;
    return g;
}

template <class F, int T, int HOW>
DEVICE void rows_by_mma(MmaRing<F, HOW> &ring, const MmaBlocks &block_of, int units, int first, Group &g,
                        const Quantised &x, const NearColumns &near, int share, float *y, i64 y_stride, int rows, int K, const Hidden &h,
                        float (*columns)[32]) {
    int lane = threadIdx.x & 31, entry[T], n = g.next<T>(entry);
    Mma<F>::template bring<T>(columns_of(x, entry, share, K), K, near);
    __syncthreads();
    float out[2][T];
#pragma unroll 1
    for (int u = 0; u < units; u++) {
        ring.template multiply<T>(u, units * ring.steps, block_of, near, out);
        // Thread t of four finishes column t.
        int mine = lane & 3;
        float front = out[0][0], back = out[1][0];
#pragma unroll
        for (int t = 1; t < T; t++) front = mine == t ? out[0][t] : front, back = mine == t ? out[1][t] : back;
        if (h.codes) {  // one unit in every warp
            finish_hidden<T>(front, back, mine < T, 8 * (threadIdx.x >> 5) + (lane >> 2), mine, entry, n, g.expert, rows, h, columns);
            return;
        }
        int row = first + 16 * u + (lane >> 2), at = entry_of(mine, entry);
        float *to = y + (at * y_stride + row);
        if (mine < n && row < rows) to[0] = front;
        if (mine < n && row + 8 < rows) to[8] = back;
    }
}

// As `product` for two columns and more. Gate and up: a block takes 32 rows of both, a warp eight of each. Otherwise a warp
// takes `units` times 16 rows. Grid: (columns * column groups, jobs, or column groups of a dense matrix; row tiles).
template <class F, int ASKED = MOST_HOW>
STARTS_EARLY __global__ void __launch_bounds__(128, MMA_BLOCKS)
mma_rows(const u8 *weights, const u8 *up, const u64 *addresses, int part, i64 stride, const int *ids,
         const u8 *decisions, int take, const int *jobs, int columns, int share, const i8 *codes, const float *scales,
         const int *sums, float *y, i64 y_stride, int rows, int K, i8 *h_codes, float *h_scales, int *h_sums,
         const float *factors, int experts, u64 *error, u64 where, int units) {
    const int HOW = MOST_HOW == BY_BULK && ASKED == BY_BULK ? BY_BULK : BY_COPIES;
    typedef MmaRing<F, HOW> Ring;
    DYNAMIC_SHARED(space);
    __shared__ float hidden[4][32];
    int warp = threadIdx.x >> 5, last = (rows - 1) >> 2;
    size_t bytes = row_block_bytes<F>(K);
    Ring ring(space + warp * Ring::BYTES, K);
    int first = h_codes ? 32 * blockIdx.y + 8 * warp : 16 * units * (4 * blockIdx.y + warp);
    int mine = h_codes ? 1 : min(units, max((rows - first + 15) >> 4, 0)), end = mine * ring.steps;
    let_next_start();
    Group g;
    MmaBlocks block_of = {weights, h_codes ? up : nullptr, first >> 2, last, (u32)bytes};
    if (ids) {
        wait_for_inputs();
        g = group_of_expert(ids, decisions, take, jobs, columns);
        if (!g.have) {
            // Entries computed elsewhere get zeros, so that what follows meets no garbage.
            if (!jobs && !h_codes && !Group::taken(decisions, take, g.mine))
                for (int row = 64 * units * blockIdx.y + threadIdx.x; row < min(64 * units * ((int)blockIdx.y + 1), rows);
                     row += blockDim.x)
                    y[g.mine * y_stride + row] = 0.f;
            return;
        }
        if (addresses) {
            block_of.weights = (const u8 *)addresses[3 * g.expert + part];
            if (h_codes) block_of.up = (const u8 *)addresses[3 * g.expert + part + 1];
        } else {
            block_of.weights += g.expert * stride;
            if (h_codes) block_of.up += g.expert * stride;
        }
        ring.start(end, block_of);
    } else {
        ring.start(end, block_of);
        wait_for_inputs();
        g = Group::dense<4>(columns);
    }
    Quantised x = {codes, scales, sums};
    NearColumns near(space + 4 * Ring::BYTES, K);
    Hidden h = {block_of.up, h_codes, h_scales, h_sums, factors, experts, error, where};
    int n = __popc(g.have);
    if (n == 1) rows_by_mma<F, 1, HOW>(ring, block_of, mine, first, g, x, near, share, y, y_stride, rows, K, h, hidden);
    else if (n == 2) rows_by_mma<F, 2, HOW>(ring, block_of, mine, first, g, x, near, share, y, y_stride, rows, K, h, hidden);
    else rows_by_mma<F, 4, HOW>(ring, block_of, mine, first, g, x, near, share, y, y_stride, rows, K, h, hidden);
}
