// norm_down.cu for windows of several rows: the four blocks of a cluster share the lanes of the sums, 64 each, for twelve rows
// of the matrices and up to four rows of streams.
//
// So a block reads a quarter of the streams, as much as one row of them has, and adds, norms and multiplies that part alone.
// Lanes meet twice: sums of squares go to all blocks of the cluster, and each gets the lanes of three matrix rows to end
// them. Weights are in registers before the streams are there. Streams with the branch added are stored by the next product.
#include "cluster.cuh"
#include "early.cuh"
#include "sums.cuh"

#define ROWS 12      // matrix rows of a cluster
#define MINE 3       // of a thread
#define STREAMS 4    // exactly
#define COLUMNS 4    // rows of streams
#define LANES 64     // of a block

// Shared memory of a block. N: values of a stream over 256.
template <int N>
struct Room {
    float x[STREAMS * N][COLUMNS][LANES];    // normed
    float norm[STREAMS * N][LANES];          // weights of the norm
    float4 squares[COLUMNS][256];            // of all streams, from all blocks
    float4 sums[MINE][256];                  // of all columns, the same, for matrix rows MINE rank ..
    float inverse[COLUMNS * STREAMS];
    Arrival got_squares, got_sums;
};

// The four trees over 256 lanes, by one warp; each in the lanes that `lane_of_pair` names.
DEVICE float trees_of(const float4 *lanes) {
    float v[4][8], sums[4];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float4 four = lanes[32 * j + (threadIdx.x & 31)];
        v[0][j] = four.x, v[1][j] = four.y, v[2][j] = four.z, v[3][j] = four.w;
    }
#pragma unroll
    for (int m = 0; m < 4; m++) {
#pragma unroll
        for (int half = 4; half; half >>= 1)
#pragma unroll
            for (int j = 0; j < half; j++) v[m][j] = add32(v[m][j], v[m][j + half]);
        sums[m] = v[m][0];
    }
    return packed_tree<4>(sums);
}

// As norm_down; matrices are BF16, x (n_x, STREAMS, D). Grid: (CLUSTER times tiles of ROWS rows, each of one matrix; pieces
// of COLUMNS rows of x).
template <int N>
STARTS_EARLY __global__ void CLUSTERED __launch_bounds__(256, 2)
norm_down_cluster(const float *x, const float *y, const float *a, const float *norm, float *normed, int n_x, float eps,
                  const u8 *w0, float *out0, int n0, const u8 *w1, float *out1, int n1, int squeeze, u64 *error, u64 where,
                  u64 where_squeeze) {
    const int D = 256 * N, STEPS = STREAMS * N, K = STREAMS * D;
    DYNAMIC_SHARED(bytes);
    let_next_start();
#if HAS_CLUSTERS
    Room<N> &room = room_of<Room<N>>(bytes);
    // Thread `here` of a group has lane `here` of the block's: of one row of streams first, then of MINE rows of the matrix.
    int t = thread_of_block(), rank = cluster_rank(), warp = t >> 5, here = t & 63, group = t >> 6;
    int lane = LANES * rank + here;
    int tiles0 = (n0 + ROWS - 1) / ROWS, tile = cluster_number();
    bool second = tile >= tiles0;
    if (t == 0) expect(room.got_squares, sizeof room.squares), expect(room.got_sums, sizeof room.sums);
    cluster_arrives();
    int first = (second ? tile - tiles0 : tile) * ROWS, rows = second ? n1 : n0, n = min(rows - first, ROWS);
    const u8 *w = (second ? w1 : w0) + (size_t)first * K * 2 + 2 * lane;
#if CAN_START_EARLY
    for (int at = t; at < n * STEPS; at += 256)  // lines of this block
        asm volatile("prefetch.global.L2 [%0];" :: "l"(w - 2 * here + (size_t)(at / STEPS) * K * 2 + at % STEPS * 512));
#endif
#pragma unroll
    for (int k = 0; k < STEPS / 4; k++) {
        int s = group + 4 * k;
        room.norm[s][here] = __ldg(norm + 256 * s + lane);
    }
    u32 weights[MINE][STEPS / 2];  // of two steps each
    // Neighbours ask for both their weights of a step, one for the first step of a word and one for the second, and trade.
    const u8 *words = w - (lane & 1 ? 2 - 512 : 0);
#pragma unroll
    for (int r = 0; r < MINE; r++)
#pragma unroll
        for (int s = 0; s < STEPS / 2; s++)
            weights[r][s] = load_ahead(words + min(MINE * group + r, n - 1) * (K * 2) + 1024 * s);
#pragma unroll
    for (int r = 0; r < MINE; r++)
#pragma unroll
        for (int s = 0; s < STEPS / 2; s++) {
            u32 other = __shfl_xor_sync(ALL_LANES, weights[r][s], 1);
            weights[r][s] = __byte_perm(weights[r][s], other, lane & 1 ? 0x3276 : 0x5410);
        }
    u32 all = 0;
#pragma unroll
    for (int r = 0; r < MINE; r++)
#pragma unroll
        for (int s = 0; s < STEPS / 2; s++) all ^= weights[r][s];
    room.x[0][group][here] = float_of(all);  // for nobody: the compiler would trade behind the wait
    int from = COLUMNS * blockIdx.y, columns = min(n_x - from, COLUMNS), column = from + min(group, columns - 1);
    cluster_meets();
    wait_for_inputs();
    float v[STREAMS][N];
    const float *stream = x + (size_t)column * K + lane;
#pragma unroll
    for (int c = 0; c < STREAMS; c++)
#pragma unroll
        for (int i = 0; i < N; i++) v[c][i] = stream[c * D + 256 * i];
    if (y) {
        float branch[N];
#pragma unroll
        for (int i = 0; i < N; i++) branch[i] = y[(size_t)column * D + 256 * i + lane];
#pragma unroll
        for (int c = 0; c < STREAMS; c++) {
            float strength = a[column * STREAMS + c];
#pragma unroll
            for (int i = 0; i < N; i++) v[c][i] = fma32(strength, branch[i], v[c][i]);
        }
    }
    float sum[STREAMS];
#pragma unroll
    for (int c = 0; c < STREAMS; c++) {
        sum[c] = 0.f;
#pragma unroll
        for (int i = 0; i < N; i++) sum[c] = fma32(v[c][i], v[c][i], sum[c]);
    }
#pragma unroll
    for (int k = 0; k < CLUSTER; k++)
        send(room, room.squares[group][lane], k, make_float4(sum[0], sum[1], sum[2], sum[3]), room.got_squares);
    wait_for(room.got_squares);
    int stream_of_lane = (t >> 3 & 1) | (t >> 4 & 1) << 1;  // as lane_of_pair has it
    if (warp < COLUMNS) {
        float squares = trees_of(room.squares[warp]), r = inverse_rms(squares, D, eps);
        if ((t & 7) == 0) {
            room.inverse[STREAMS * warp + stream_of_lane] = r;
            bool reports = tile == 0 && rank == 0 && warp < columns;
            if (reports && !(finite32(squares) && finite32(r))) report(error, where, NOT_FINITE, from + warp);
        }
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < STREAMS; c++) {
        float r = room.inverse[STREAMS * group + c];
#pragma unroll
        for (int i = 0; i < N; i++) {
            int s = c * N + i;
            room.x[s][group][here] = mul32(mul32(v[c][i], r), room.norm[s][here]);
        }
    }
    __syncthreads();
    int tiles = tiles0 + (n1 + ROWS - 1) / ROWS;  // clusters share out what they all have
    if (group < columns)
        for (int s = tile; s < STEPS; s += tiles) normed[(size_t)column * K + 256 * s + lane] = room.x[s][group][here];
    float acc[MINE][COLUMNS];
#pragma unroll
    for (int r = 0; r < MINE; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) acc[r][c] = 0.f;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        float value[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) value[c] = room.x[s][c][here];
#pragma unroll
        for (int r = 0; r < MINE; r++) {
            u32 pair = weights[r][s >> 1];
            float weight = float_of(s & 1 ? pair & 0xffff0000u : pair << 16);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) acc[r][c] = fma32(weight, value[c], acc[r][c]);
        }
    }
#pragma unroll
    for (int r = 0; r < MINE; r++)
        send(room, room.sums[r][lane], group, make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]), room.got_sums);
    wait_for(room.got_sums);
    int row = MINE * rank + warp, c = stream_of_lane;
    if (warp >= MINE) return;
    float total = add32(trees_of(room.sums[warp]), 0.f);
    if (t & 7 || row >= n || c >= columns) return;
    if (!second && squeeze) {
        total = silu32(div32(total, i32_f32(squeeze)));
        if (!finite32(total)) report(error, where_squeeze, NOT_FINITE, from + c);
    }
    (second ? out1 : out0)[(size_t)(from + c) * rows + first + row] = total;
#else
    wait_for_inputs();
    asm volatile("trap;");
#endif
}
