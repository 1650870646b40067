// Token embedding: one dequantised row of the table into all C streams.
#include "dequant.cuh"
#include "early.cuh"

// tokens (T,), w (V, row_bytes), y (T, C, D). Grid: (D / 256, T). A token outside the table reads row 0 and is reported.
template <int FORMAT>
STARTS_EARLY KERNEL(256) embed(const int *tokens, const u8 *w, i64 row_bytes, const i8 *grid, const u8 *signs, float *y, int C, int D,
                  int V, u64 *error, u64 where) {
    let_next_start();
    wait_for_inputs();
    int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y, token = tokens[row];
    if (i >= D) return;
    bool known = (u32)token < (u32)V;
    float v = value_of<FORMAT>(w + (known ? token : 0) * row_bytes, i, grid, signs);
    for (int c = 0; c < C; c++) y[((size_t)row * C + c) * D + i] = v;
    if (!known || !finite32(v)) report(error, where, NOT_FINITE, row);
}
