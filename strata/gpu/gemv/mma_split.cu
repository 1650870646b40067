// Dense products of matrices with few rows and several columns on tensor cores: as `split` (split.cuh), the warps of a block
// share out the chunks of 16 rows, and one thread a lane adds up the terms in their order.
#include "gemv/kernels.cuh"
#include "gemv/mma_rows.cuh"

// Where the terms of a round of eight chunks lie in shared memory: integers of lanes, those of minima, scales of the rows.
template <int T>
struct MmaTerms {
    enum { WARPS = 8, LANES = 2 * T * 32, BYTES = WARPS * (LANES * 16 + T * 32 * 8 + 64) };
    u8 *space;
    DEVICE uint4 *lanes_of(int warp, int k, int p) const { return (uint4 *)space + warp * LANES + (2 * k + p) * 32; }
    DEVICE int *minima_of(int warp, int k, int r) const {
        return (int *)(space + WARPS * LANES * 16) + ((warp * T + k) * 2 + r) * 32;
    }
    DEVICE u32 *heads_of(int warp) const { return (u32 *)(space + WARPS * (LANES * 16 + T * 32 * 8)) + warp * 16; }

    // As MmaSums of this thread's warp; terms are kept as they are.
    DEVICE void lanes(int k, int p, const int (&sum)[4], const u32 (&d)[2], float) const {
        int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        lanes_of(warp, k, p)[lane] = make_uint4(sum[0], sum[1], sum[2], sum[3]);
        if (k == 0 && p == 0 && (lane & 3) == 0) {
            heads_of(warp)[lane >> 2] = d[0];
            heads_of(warp)[8 + (lane >> 2)] = d[1];
        }
    }
    DEVICE void minimum(int k, int r, int sum, u32, float) const {
        minima_of(threadIdx.x >> 5, k, r)[threadIdx.x & 31] = sum;
    }
};

template <class F, int HOW>
using SplitRing = MmaRing<F, HOW, 3>;

// y of 16 rows and n <= T columns. Warp 2k + p sums lanes 8p .. 8p + 7 of column k, and its minima of rows 8p .. 8p + 7.
template <int T, int HOW>
DEVICE void split_rows_by_mma(const MmaBlocks &block_of, const SplitRing<Q4_K, HOW> &ring, const Columns<T> &x, int n,
                              float *y, i64 y_stride, int rows, int K, u8 *space) {
    typedef SplitRing<Q4_K, HOW> Ring;
    MmaTerms<T> terms = {space};
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, chunks = K >> 8;
    int k = warp >> 1, p = warp & 1;
    u32 row = x.row[0];
#pragma unroll
    for (int t = 1; t < T; t++) row = k == t ? x.row[t] : row;
    float v[4] = {0.f, 0.f, 0.f, 0.f}, m = 0.f;
#pragma unroll 1
    for (int round = 0, s = 0; round < chunks; round += 8, s++) {
        int c = round + warp;
        if (c < chunks) {
            if constexpr (HOW == BY_REGISTERS) {
                Mma<Q4_K>::template terms<T>(block_of(0, 0) + c * Mma<Q4_K>::PITCH, block_of.bytes, c, FarQ4<T>{x}, terms);
            } else {
                if constexpr (HOW == BY_BULK) bulk_wait(ring.arrived(s % Ring::STAGES), s / Ring::STAGES & 1);
                else copy_wait<Ring::STAGES - 1>();
                __syncwarp();
                Mma<Q4_K>::template terms<T>(ring.bytes + s % Ring::STAGES * Ring::STAGE, Mma<Q4_K>::PITCH, c, FarQ4<T>{x}, terms);
            }
        }
        __syncthreads();
        if constexpr (HOW != BY_REGISTERS) ring.bring_one(s + Ring::STAGES, warp + 8 * (s + Ring::STAGES), block_of);
        if (k < T) {
            int left = min(chunks - round, 8);
            const float *scales = x.scales + ((row >> 8) + round);
#pragma unroll 4
            for (int i = 0; i < left; i++) {
                uint4 sum = terms.lanes_of(i, k, p)[lane];
                u32 d0 = terms.heads_of(i)[g], d1 = terms.heads_of(i)[8 + g];
                float scale = scales[i], front = mul32(half_f32((u16)d0), scale), back = mul32(half_f32((u16)d1), scale);
                v[0] = fma32(whole(sum.x), front, v[0]);
                v[1] = fma32(whole(sum.y), front, v[1]);
                v[2] = fma32(whole(sum.z), back, v[2]);
                v[3] = fma32(whole(sum.w), back, v[3]);
                m = fma32(whole(terms.minima_of(i, k, p)[lane]), mul32(half_f32((u16)((p ? d1 : d0) >> 16)), scale), m);
            }
        }
        __syncthreads();
    }
    // The fixed trees: lanes of both halves first.
    float2 *halves = (float2 *)space + k * 64;
    if (k < T && p) {
        halves[lane] = make_float2(v[0], v[1]);
        halves[32 + lane] = make_float2(v[2], v[3]);
    }
    m = add32(m, __shfl_xor_sync(ALL_LANES, m, 2));
    m = add32(m, __shfl_xor_sync(ALL_LANES, m, 1));
    float *minima = (float *)((float2 *)space + T * 64) + k * 8;
    if (k < T && p && (lane & 3) == 0) minima[g] = m;
    __syncthreads();
    if (k >= T || p) return;
    float2 front = halves[lane], back = halves[32 + lane];
    float s[4] = {add32(v[0], front.x), add32(v[1], front.y), add32(v[2], back.x), add32(v[3], back.y)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s[i] = add32(s[i], __shfl_xor_sync(ALL_LANES, s[i], 2));
        s[i] = add32(s[i], __shfl_xor_sync(ALL_LANES, s[i], 1));
    }
    bool second = lane & 1;
    float sum = second ? add32(s[2], s[3]) : add32(s[0], s[1]);
    int at = 4 * block_of.first + g + (second ? 8 : 0);
    if ((lane & 3) < 2 && k < n && at < rows) y[k * y_stride + at] = add32(sub32(sum, second ? minima[g] : m), 0.f);
}

// y (columns, rows) = a Q4_K matrix times x. Grid: (columns / 4, row tiles of 16). Dynamic shared memory: terms of four
// columns, then a ring for every warp.
template <class F, int ASKED = MOST_HOW>
STARTS_EARLY __global__ void __launch_bounds__(256, 2)
mma_split(const u8 *weights, int columns, const i8 *codes, const float *scales, const int *sums, float *y, i64 y_stride,
          int rows, int K) {
    const int HOW = ASKED < MOST_HOW ? ASKED : MOST_HOW;
    DYNAMIC_SHARED(space);
    let_next_start();
    int warp = threadIdx.x >> 5, first = 4 * blockIdx.y, last = (rows - 1) >> 2;
    MmaBlocks block_of = {weights, nullptr, first, last, (u32)row_block_bytes<F>(K)};
    SplitRing<F, HOW> ring(space + MmaTerms<4>::BYTES + warp * SplitRing<F, HOW>::BYTES, K);
    if constexpr (HOW != BY_REGISTERS) ring.start_shared(warp, block_of);
    wait_for_inputs();
    int from = blockIdx.x * 4, n = min(columns - from, 4);
    y += from * y_stride;
    auto columns_from = [&](int t) { return (u32)(from + min(t, n - 1)) * (u32)K; };
    if (n <= 2) {
        Columns<2> x = {codes, scales, sums, {columns_from(0), columns_from(1)}};
        split_rows_by_mma<2, HOW>(block_of, ring, x, n, y, y_stride, rows, K, space);
    } else {
        Columns<4> x = {codes, scales, sums, {columns_from(0), columns_from(1), columns_from(2), columns_from(3)}};
        split_rows_by_mma<4, HOW>(block_of, ring, x, n, y, y_stride, rows, K, space);
    }
}
