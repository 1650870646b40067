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

// The delta rule: state (Hv, dk, dv) in the slot advances by T rows (a multiple of 8), o (T, Hv, dv) before norm and gate.
// GROUPS = dk / 32. Thread 8 j + r holds keys 32 m + 4 r + 0..3 of columns 2 j and 2 j + 1: reading k and q is what takes
// the time, and two columns share it. Grid: (dv / 32, Hv).
template <int GROUPS>
KERNEL(128) gdn_wide_rule(const float *conv, const float *decay, const float *beta, float *const *state_slot, float *o, int T,
                          int Hk, int Hv, int dv, int channels) {
    const int dk = 32 * GROUPS, LOADS = 2 * dk * STAGE_ROWS / 128, V_LOADS = COLUMNS * STAGE_ROWS / 128;
    __shared__ float4 keys[2][STAGE_ROWS][2 * dk / 4];  // q, then k
    __shared__ float2 values[2][STAGE_ROWS][COLUMNS / 2];
    __shared__ float gates[2][2 * STAGE_ROWS];
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
    float ahead[LOADS], v_ahead[V_LOADS], gate_ahead = 0.f;
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
        if (t < 2 * STAGE_ROWS) gate_ahead = (t & 1 ? beta : decay)[(size_t)(first + t / 2) * Hv + h];
    };
    fetch(0);
    for (int first = 0, stage = 0; first < T; first += STAGE_ROWS, stage ^= 1) {
#pragma unroll
        for (int n = 0; n < LOADS; n++) ((float *)keys[stage])[n * 128 + t] = ahead[n];
#pragma unroll
        for (int n = 0; n < V_LOADS; n++) ((float *)values[stage])[n * 128 + t] = v_ahead[n];
        if (t < 2 * STAGE_ROWS) gates[stage][t] = gate_ahead;
        __syncthreads();  // the other stage is free: everybody who read it has passed the barrier before this one
        if (first + STAGE_ROWS < T) fetch(first + STAGE_ROWS);
        for (int row = 0; row < STAGE_ROWS; row++) {
            const float4 *row_q = keys[stage][row] + r, *row_k = row_q + dk / 4;
            float fade = gates[stage][2 * row], ks[GROUPS][4], sums[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) sums[0][i] = sums[1][i] = 0.f;
#pragma unroll
            for (int m = 0; m < GROUPS; m++) {
                float4 x = row_k[8 * m];
                ks[m][0] = x.x, ks[m][1] = x.y, ks[m][2] = x.z, ks[m][3] = x.w;
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        S[m][i][c] = mul32(S[m][i][c], fade);
                        sums[c][i] = fma32(S[m][i][c], ks[m][i], sums[c][i]);
                    }
            }
            float2 value = values[stage][row][j];
            float rate = gates[stage][2 * row + 1], delta[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float part = add32(add32(sums[c][0], sums[c][2]), add32(sums[c][1], sums[c][3]));
#pragma unroll
                for (int half = 4; half; half >>= 1) part = add32(part, __shfl_xor_sync(ALL_LANES, part, half));
                delta[c] = mul32(rate, sub32(c ? value.y : value.x, part));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) sums[0][i] = sums[1][i] = 0.f;
#pragma unroll
            for (int m = 0; m < GROUPS; m++) {
                float4 x = row_q[8 * m];
                float qs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        S[m][i][c] = fma32(ks[m][i], delta[c], S[m][i][c]);
                        sums[c][i] = fma32(S[m][i][c], qs[i], sums[c][i]);
                    }
            }
            float out[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                out[c] = add32(add32(sums[c][0], sums[c][2]), add32(sums[c][1], sums[c][3]));
#pragma unroll
                for (int half = 4; half; half >>= 1) out[c] = add32(out[c], __shfl_xor_sync(ALL_LANES, out[c], half));
            }
            if (r == 0) *(float2 *)(o + ((size_t)(first + row) * Hv + h) * dv + column) = make_float2(out[0], out[1]);
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
