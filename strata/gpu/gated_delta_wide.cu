// Gated DeltaNet over the rows of a prefill chunk: convolution, inputs of all heads, the delta rule, norm and gate.
//
// Columns of a state do not see each other, so a block holds 32 columns of one head in registers for all rows; what needs
// whole heads (norms of q, k and the output) is done by kernels that see all rows at once.
#include "sums.cuh"

#define ROWS_A_THREAD 8

// conv (T, channels) from qkv and the history (taps - 1, channels). Grid: (channels / 256, T / 8).
KERNEL(256) gdn_wide_conv(const float *qkv, float *conv, const float *w, const float *const *history_slot, int T,
                          int channels, int taps, u64 *error, u64 where) {
    int c = blockIdx.x * 256 + threadIdx.x, first = blockIdx.y * ROWS_A_THREAD;
    if (c >= channels) return;
    const float *history = *history_slot;
    for (int t = first; t < first + ROWS_A_THREAD && t < T; t++) {
        float sum = 0.f;
        for (int i = 0; i < taps; i++) {
            int source = t - (taps - 1) + i;
            float x = source >= 0 ? qkv[(size_t)source * channels + c] : history[(size_t)(source + taps - 1) * channels + c];
            sum = fma32(w[(size_t)i * channels + c], x, sum);
        }
        sum = silu32(sum);
        conv[(size_t)t * channels + c] = sum;
        if (!finite32(sum)) report(error, where, NOT_FINITE, t);
    }
}

// Unit q (times q_scale) and k of all key heads, in place in conv; decay and beta of all value heads, in place. One warp
// a head of q or k; the last block of a row makes the gates. Grid: (2 Hk / 4 + 1, T).
KERNEL(128) gdn_wide_inputs(float *conv, float *decay, float *beta, const float *a, const float *dt, int Hk, int Hv, int dk,
                            int channels, float q_scale, u64 *error, u64 where) {
    int row = blockIdx.y, t = threadIdx.x;
    if (blockIdx.x == gridDim.x - 1) {
        for (int h = t; h < Hv; h += 128) {
            size_t at = (size_t)row * Hv + h;
            float alpha = decay[at], raw = beta[at];
            // What a softplus, exp or sigmoid would make a finite number of.
            if (!(finite32(alpha) && finite32(raw))) report(error, where, NOT_FINITE, row);
            decay[at] = exp32(mul32(a[h], softplus32(add32(alpha, dt[h]))));
            beta[at] = sigmoid32(raw);
        }
        return;
    }
    int head = blockIdx.x * 4 + (t >> 5);
    if (head >= 2 * Hk) return;
    float *x = conv + (size_t)row * channels + (size_t)head * dk;
    auto value = [&](int i) { return x[i]; };
    float squares = warp_dot(dk, lanes_of(dk, 256), value, value);
    float r = div32(1.f, sqrt32(add32(squares, 1e-6f))), scale = head < Hk ? q_scale : 1.f;
    for (int i = t & 31; i < dk; i += 32) x[i] = mul32(mul32(x[i], r), scale);
}

#define STAGE_ROWS 8
#define COLUMNS 32
#define BLOCK 4   // rows that the delta rule takes at once; bits do not depend on the chunk, whose first row is a block's
#define MIX 12    // floats of a row's record

// What rows of a block do to each other, once for all columns. With g_t the decay, G(s, t) = g_s+1 .. g_t, and b_t beta:
//   read[s]  = G(s, t) q_t k_s, s <= t       weight of delta_s in the output of row t
//   clear[s] = b_t G(s, t) k_t k_s, s < t    what delta_t loses by delta_s
//   fade     = g_0 .. g_t;  b_t;  rest = G(t, last)
// Row t's record (read, clear, fade, b_t, rest) is left in y (T, Hv, dv), in front of every 32 columns. Grid: (T / 4, Hk).
// Eight lanes make the two products of a pair (t, s).
KERNEL(128) gdn_wide_pairs(const float *conv, const float *decay, const float *beta, float *y, int Hk, int Hv, int dk, int dv,
                           int channels) {
    int first = blockIdx.x * BLOCK, key_head = blockIdx.y, lane = threadIdx.x & 7, s = threadIdx.x >> 3 & 3, t = threadIdx.x >> 5;
    const float *q_t = conv + (size_t)(first + t) * channels + (size_t)key_head * dk, *k_t = q_t + (size_t)Hk * dk;
    const float *k_s = conv + (size_t)(first + s) * channels + (size_t)(Hk + key_head) * dk;
    float read = 0.f, clear = 0.f;
    for (int i = lane; i < dk; i += 8) {
        read = fma32(q_t[i], k_s[i], read);
        clear = fma32(k_t[i], k_s[i], clear);
    }
#pragma unroll
    for (int half = 4; half; half >>= 1) {
        read = add32(read, __shfl_xor_sync(ALL_LANES, read, half));
        clear = add32(clear, __shfl_xor_sync(ALL_LANES, clear, half));
    }
    if (s > t) return;
    for (int h = key_head; h < Hv; h += Hk) {
        const float *g = decay + (size_t)first * Hv + h;
        float between = 1.f, fade = 1.f, rest = 1.f, rate = beta[(size_t)(first + t) * Hv + h];
        for (int u = 0; u < BLOCK; u++) {
            float one = g[(size_t)u * Hv];
            if (u > s && u <= t) between = mul32(between, one);
            if (u <= t) fade = mul32(fade, one);
            else rest = mul32(rest, one);
        }
        for (int part = lane; part < dv / COLUMNS; part += 8) {
            float *record = y + ((size_t)(first + t) * Hv + h) * dv + part * COLUMNS;
            record[s] = mul32(between, read);
            if (s < t) record[BLOCK + s] = mul32(rate, mul32(between, clear));
            else record[2 * BLOCK] = fade, record[2 * BLOCK + 1] = rate, record[2 * BLOCK + 2] = rest;
        }
    }
}

// Sums of 8 values over 8 lanes: lane r gets value r.
DEVICE float sum_of_own(float (&v)[8], int r) {
#pragma unroll
    for (int half = 4; half; half >>= 1)
#pragma unroll
        for (int i = 0; i < half; i++) {
            float keep = r & half ? v[i + half] : v[i], give = r & half ? v[i] : v[i + half];
            v[i] = add32(keep, __shfl_xor_sync(ALL_LANES, give, half));
        }
    return v[0];
}

// The delta rule: state (Hv, dk, dv) in the slot advances by T rows (a multiple of 8), o (T, Hv, dv) before norm and gate,
// where gdn_wide_pairs left its records. GROUPS = dk / 32. Thread 8 j + r holds keys 32 m + 4 r + 0..3 of columns 2 j and
// 2 j + 1. A block of rows meets the state as it was before: products of all its k and q with it, then deltas one by one
// from the records, then all of them go into the state at once. Lane r makes delta and output of row r / 2, column
// 2 j + r % 2.
template <int GROUPS>
KERNEL(128) gdn_wide_rule(const float *conv, float *const *state_slot, float *o, int T, int Hk, int Hv, int dv, int channels) {
    const int dk = 32 * GROUPS, LOADS = 2 * dk * STAGE_ROWS / 128, V_LOADS = COLUMNS * STAGE_ROWS / 128;
    __shared__ float4 keys[2][STAGE_ROWS][2 * dk / 4];  // q, then k
    __shared__ float values[2][STAGE_ROWS][COLUMNS];
    __shared__ float4 mixes[2][STAGE_ROWS][MIX / 4];
    int t = threadIdx.x, r = t & 7, j = t >> 3, h = blockIdx.y, column = blockIdx.x * COLUMNS + 2 * j, key_head = h % Hk;
    float *state = *state_slot + (size_t)h * dk * dv + column;
    float S[GROUPS][4][2];
#pragma unroll
    for (int m = 0; m < GROUPS; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 pair = *(const float2 *)(state + (size_t)(32 * m + 4 * r + i) * dv);
            S[m][i][0] = pair.x, S[m][i][1] = pair.y;
        }
    const float *q = conv + (size_t)key_head * dk, *k = q + (size_t)Hk * dk;
    const float *v = conv + 2 * (size_t)Hk * dk + (size_t)h * dv + blockIdx.x * COLUMNS;
    float ahead[LOADS], v_ahead[V_LOADS], mix_ahead = 0.f;
    auto fetch = [&](int first) {
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            int at = n * 128 + t, row = at / (2 * dk), i = at % (2 * dk);
            size_t place = (size_t)(first + row) * channels;
            ahead[n] = i < dk ? q[place + i] : k[place + i - dk];
        }
#pragma unroll
        for (int n = 0; n < V_LOADS; n++) {
            int at = n * 128 + t;
            v_ahead[n] = v[(size_t)(first + at / COLUMNS) * channels + at % COLUMNS];
        }
        if (t < MIX * STAGE_ROWS) mix_ahead = o[((size_t)(first + t / MIX) * Hv + h) * dv + blockIdx.x * COLUMNS + t % MIX];
    };
    fetch(0);
    for (int first = 0, stage = 0; first < T; first += STAGE_ROWS, stage ^= 1) {
#pragma unroll
        for (int n = 0; n < LOADS; n++) ((float *)keys[stage])[n * 128 + t] = ahead[n];
#pragma unroll
        for (int n = 0; n < V_LOADS; n++) ((float *)values[stage])[n * 128 + t] = v_ahead[n];
        if (t < MIX * STAGE_ROWS) ((float *)mixes[stage])[t] = mix_ahead;
        __syncthreads();  // the other stage is free: everybody who read it has passed the barrier before this one
        if (first + STAGE_ROWS < T) fetch(first + STAGE_ROWS);
#pragma unroll 1
        for (int block = 0; block < STAGE_ROWS; block += BLOCK) {
            const int ROW = 2 * dk / 4;
            const float4 *row_q = keys[stage][block] + r, *row_k = row_q + dk / 4;
            float ks[BLOCK][GROUPS][4], of_k[2 * BLOCK], of_q[2 * BLOCK];
#pragma unroll
            for (int n = 0; n < 2 * BLOCK; n++) of_k[n] = of_q[n] = 0.f;
#pragma unroll
            for (int m = 0; m < GROUPS; m++)
#pragma unroll
                for (int row = 0; row < BLOCK; row++) {
                    float4 x = row_k[row * ROW + 8 * m], y = row_q[row * ROW + 8 * m];
                    float qs[4] = {y.x, y.y, y.z, y.w};
                    ks[row][m][0] = x.x, ks[row][m][1] = x.y, ks[row][m][2] = x.z, ks[row][m][3] = x.w;
#pragma unroll
                    for (int i = 0; i < 4; i++)
#pragma unroll
                        for (int c = 0; c < 2; c++) {
                            of_k[2 * row + c] = fma32(S[m][i][c], ks[row][m][i], of_k[2 * row + c]);
                            of_q[2 * row + c] = fma32(S[m][i][c], qs[i], of_q[2 * row + c]);
                        }
                }
            float own_k = sum_of_own(of_k, r), own_q = sum_of_own(of_q, r);
            int own = block + (r >> 1);  // this lane's row
            float4 read = mixes[stage][own][0], gates = mixes[stage][own][2];
            float begin = mul32(gates.y, sub32(values[stage][own][2 * j + (r & 1)], mul32(gates.x, own_k)));
            float delta[BLOCK][2];
#pragma unroll
            for (int n = 0; n < 2 * BLOCK; n++) delta[n >> 1][n & 1] = __shfl_sync(ALL_LANES, begin, (t & 24) | n);
#pragma unroll
            for (int row = 1; row < BLOCK; row++) {
                float4 x = mixes[stage][block + row][1];
                float clear[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int s = 0; s < row; s++)
#pragma unroll
                    for (int c = 0; c < 2; c++) delta[row][c] = fma32(-clear[s], delta[s][c], delta[row][c]);
            }
            float out = mul32(gates.x, own_q), reads[BLOCK] = {read.x, read.y, read.z, read.w};
#pragma unroll
            for (int s = 0; s < BLOCK; s++)
                if (s <= r >> 1) out = fma32(reads[s], r & 1 ? delta[s][1] : delta[s][0], out);
            o[((size_t)(first + own) * Hv + h) * dv + column + (r & 1)] = out;
            float fade = mixes[stage][block + BLOCK - 1][2].x;
#pragma unroll
            for (int row = 0; row < BLOCK; row++) {
                float rest = mixes[stage][block + row][2].z;
                delta[row][0] = mul32(delta[row][0], rest), delta[row][1] = mul32(delta[row][1], rest);
            }
#pragma unroll
            for (int m = 0; m < GROUPS; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        S[m][i][c] = mul32(S[m][i][c], fade);
#pragma unroll
                        for (int row = 0; row < BLOCK; row++) S[m][i][c] = fma32(ks[row][m][i], delta[row][c], S[m][i][c]);
                    }
        }
    }
#pragma unroll
    for (int m = 0; m < GROUPS; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(float2 *)(state + (size_t)(32 * m + 4 * r + i) * dv) = make_float2(S[m][i][0], S[m][i][1]);
}

// y = rms(y) norm sigmoid(z) per head, in place on (T, Hv, dv). One warp a head. Grid: (Hv / 4, T).
KERNEL(128) gdn_wide_gate(float *y, const float *z, const float *norm, int Hv, int dv, float eps, u64 *error, u64 where) {
    int h = blockIdx.x * 4 + (threadIdx.x >> 5), row = blockIdx.y;
    if (h >= Hv) return;
    size_t place = ((size_t)row * Hv + h) * dv;
    auto value = [&](int i) { return y[place + i]; };
    float r = inverse_rms(warp_dot(dv, lanes_of(dv, 256), value, value), dv, eps);
    bool fine = true;
    for (int i = threadIdx.x & 31; i < dv; i += 32) {
        float gate = z[place + i], out = mul32(mul32(mul32(y[place + i], r), norm[i]), sigmoid32(gate));
        y[place + i] = out;
        fine = fine && finite32(out) && finite32(gate);
    }
    if (!fine) report(error, where, NOT_FINITE, row);
}
