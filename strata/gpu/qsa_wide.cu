// Sparse attention over the rows of a prefill chunk: block scores as tiles of 64 rows by 64 blocks of cells.
//
// Every score is one ascending chain over the head's values and one over the heads, so it does not depend on the tile.
#include "sums.cuh"

#define TILE 64
#define SLICE 32

// scores (rows, most) of rows row0 .. of the chunk against pooled keys (.., dim); rows that see no more than `budget`
// blocks get none. Grid: (blocks / 64, rows / 64). Thread (y, x) of 16 x 16 holds rows 4 y .. and keys 4 x .. .
KERNEL(256) qsa_wide_scores(const float *iq, float *const *keys_slot, const i64 *pos, float *scores, int row0, int rows,
                            int heads, int dim, int block, int budget, int most, u64 *error, u64 where) {
    __shared__ float4 q4[SLICE][TILE / 4 + 1], k4[SLICE][TILE / 4 + 1];
    int t = threadIdx.x, y = t >> 4, x = t & 15, first_key = blockIdx.x * TILE, first_row = blockIdx.y * TILE;
    int end_row = first_row + TILE < rows ? first_row + TILE : rows;
    i64 base = *pos + row0 + 1;
    int seen = (int)((base + end_row - 1) / block);  // by the last row of the tile
    if (seen <= budget || first_key >= seen) return;
    const float *keys = *keys_slot;
    float total[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) total[i][j] = 0.f;
    for (int h = 0; h < heads; h++) {
        float sum[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sum[i][j] = 0.f;
        for (int start = 0; start < dim; start += SLICE) {
            __syncthreads();
#pragma unroll
            for (int n = 0; n < TILE * SLICE / 256; n++) {
                int at = n * 256 + t, line = at / SLICE, i = at % SLICE, row = first_row + line, key = first_key + line;
                ((float *)q4[i])[line] = row < rows ? iq[((size_t)(row0 + row) * heads + h) * dim + start + i] : 0.f;
                ((float *)k4[i])[line] = key < seen ? keys[(size_t)key * dim + start + i] : 0.f;
            }
            __syncthreads();
#pragma unroll 8
            for (int i = 0; i < SLICE; i++) {
                float4 a = q4[i][y], b = k4[i][x];
                float as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                for (int m = 0; m < 4; m++)
#pragma unroll
                    for (int n = 0; n < 4; n++) sum[m][n] = fma32(as[m], bs[n], sum[m][n]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float s = sum[i][j];
                total[i][j] = s != s ? s : add32(total[i][j], s > 0.f ? s : 0.f);
            }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = first_row + 4 * y + i, n = (int)((base + row) / block);
        if (row >= rows || n <= budget) continue;
        bool fine = true;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int key = first_key + 4 * x + j;
            if (key >= n) continue;
            scores[(size_t)row * most + key] = total[i][j];
            fine = fine && finite32(total[i][j]);
        }
        if (!fine) report(error, where, NOT_FINITE, row0 + row);
    }
}
