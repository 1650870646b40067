// Gate and up of experts in Q4_K with what follows them until the down product, in windows of several rows.
//
// Most experts of such a window are wanted by one row: their blocks do what those of a window of one row do. Experts that
// several rows want are computed on tensor cores (half_q4.cuh), whatever the number of rows up to four.
#include "gemv/half_ring.cuh"
#include "gemv/wanted.cuh"

// Blocks for 32 rows of gate and of up. Grid: (row tiles, entries * groups of four, or jobs): what has nothing to do comes
// last. Dynamic shared memory: columns, a ring for every warp from ring_at on.
STARTS_EARLY __global__ void __launch_bounds__(256, 2)
gate_up(const u8 *weights, const u8 *up, const u64 *addresses, int part, i64 stride, const int *ids, const u8 *decisions,
        int take, const int *jobs, int n, int share, const i8 *codes, const float *scales, const int *sums, int rows, int K,
        i8 *h_codes, float *h_scales, int *h_sums, const float *factors, int experts, u64 *error, u64 where, int ring_at) {
    DYNAMIC_SHARED(space);
    __shared__ float hidden[4][32];
    int warp = threadIdx.x >> 5, tile = blockIdx.x;
    u32 bytes = (u32)row_block_bytes<Q4_K>(K);
    wait_for_inputs();
    let_next_start();
    Group wanted = group_of_expert(blockIdx.y, gridDim.y, ids, decisions, take, jobs, n);
    if (!wanted.have) return;
    if (addresses) {
        weights = (const u8 *)addresses[3 * wanted.expert + part];
        up = (const u8 *)addresses[3 * wanted.expert + part + 1];
    } else {
        weights += wanted.expert * stride;
        up += wanted.expert * stride;
    }
    Quantised x = {codes, scales, sums};
    Hidden h = {up, h_codes, h_scales, h_sums, factors, experts, error, where};
    if (__popc(wanted.have) == 1) {
        rows_of_block<Q4_K, 1, 1>(weights, wanted, x, share, nullptr, rows, K, h, hidden, space, tile, [](int, int, float) {});
        return;
    }
    int lane = threadIdx.x & 31, half = warp & 1, t = lane & 3, g = lane >> 2, chunks = K >> 8;
    HalfRing<Q4_K> ring(space + ring_at + warp * HalfRing<Q4_K>::BYTES, chunks);
    // Rows 0 .. 3 of a product are gate, 4 .. 7 up, and so on.
    u32 front = (u32)(8 * tile + (warp & 6)) * bytes;
    ring.aim([&](int i) { return (i & 1 ? up : weights) + (u64)front + (i >> 1) * bytes; }, half);
    auto next = [] { return false; };
    ring.start(next);
    int entry[4], columns = wanted.next<4>(entry);
    HalfColumns{space}.bring(columns_of(x, entry, share, K), columns, K, threadIdx.x, blockDim.x);
    __syncthreads();
    HalfOperands b(half);
    half_tile(ring, HalfPlace(space, half, min(g & 3, columns - 1)), half, b, next, [&](const float (&out)[2]) {
        // Of the two threads that have the same outputs, each takes a column.
        float value = t >> 1 ? out[1] : out[0];
        if (factors) value = mul32(value, factors[(g < 4 ? 0 : experts) + wanted.expert]);
        float above = __shfl_xor_sync(ALL_LANES, value, 16);
        if (g < 4) hidden[2 * (t & 1) + (t >> 1)][4 * warp + g] = swiglu32(value, above);
    });
    quantise_hidden([&](int c) { return entry_of(c, entry); }, columns, wanted.expert, rows, tile, h, hidden);
}
