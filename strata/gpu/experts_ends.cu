// Around the products of experts: SwiGLU with the quantiser of the down product, and the exact combine.
#include "combine.cuh"
#include "early.cuh"
#include "quantise.cuh"

// h = silu(g s_g) (u s_u) on rows of F values, GROUP 32 or 256: as activations, 0: as float32 into h. g_scales, u_scales
// (E,) by expert id of the row (ids), or null. decisions null, or: rows count whose decision is a bit of `take`. Grid:
// (F / 256, rows).
template <int GROUP>
STARTS_EARLY KERNEL(256) swiglu(const float *g, const float *u, const int *ids, const float *g_scales, const float *u_scales,
                   const u8 *decisions, int take, float *h, i8 *codes, float *scales, int *sums, int F, u64 *error,
                   u64 where) {
    let_next_start();
    wait_for_inputs();
    int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (decisions && !(take >> decisions[row] & 1)) return;
    size_t at = (size_t)row * F + i;
    float value = 0.f;
    if (i < F) {
        float a = g[at], b = u[at];
        if (g_scales) {
            a = mul32(a, g_scales[ids[row]]);
            b = mul32(b, u_scales[ids[row]]);
        }
        value = swiglu32(a, b);
    }
    bool fine = true;
    if (GROUP == 0) {
        if (i < F) h[at] = value;
    } else if ((i & ~31) < F) {
        fine = quantise_value<GROUP ? GROUP : 32>(value, at, codes, scales, sums);
    }
    if (!fine && (threadIdx.x & 31) == 0) report(error, where, NOT_FINITE, ids ? ids[row] : 0);
}

// y (T, D) = exact sum over K routed experts (outputs (T, K, D), weights (T, K)), the shared one (T, D) weighted by
// sigmoid(gate (T,)), and `extra` (T, D) int64, sums of terms from elsewhere, or null. mine (T, K), or null for all 1: an
// entry with 1 has its output in `outputs`, with 2 in `linked`, with 0 in the sums of its row, which count only if there
// is one. down_scales (E,) by expert, or null. stamp: where the time goes, or null. Grid: (D / 256, T).
STARTS_EARLY KERNEL(256) combine(const float *outputs, const float *linked, const int *ids, const float *weights,
                    const float *down_scales, const u8 *mine, const float *shared, const float *gate, const i64 *extra,
                    float *y, int K, int D, i64 *stamp, u64 *error, u64 where) {
    let_next_start();
    wait_for_inputs();
    int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (stamp && i == 0 && row == 0) *stamp = clock_ns();
    if (i >= D) return;
    float s = gate[row];
    bool fine = finite32(s), elsewhere = !mine;  // an infinite one would end as a finite sigmoid
    i64 total = 0;
    for (int j = 0; j < K; j++) {
        int entry = row * K + j, from = mine ? mine[entry] : 1;
        elsewhere = elsewhere || from == 0;
        if (from == 0) continue;
        float out = (from == 2 ? linked : outputs)[(size_t)entry * D + i];
        total += routed_term(down_scales, down_scales ? ids[entry] : 0, weights[entry], out, fine);
    }
    if (extra && elsewhere) total += load_volatile(extra + (size_t)row * D + i);  // perhaps in memory of the host
    total += combine_term(sigmoid32(s), shared[(size_t)row * D + i], fine);
    y[(size_t)row * D + i] = combine_back(total);
    if (!fine) report(error, where, COMBINE_OVERFLOW, row);
}
