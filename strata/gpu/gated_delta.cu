// Gated DeltaNet: causal convolution, the delta rule over T rows, commit of the first rows, shift of a history.
//
// Sums over the key axis have 4 lanes (key index mod 4). A block is one value head with 4 dv threads: thread (r, j) holds
// column j of the keys r, r + 4, .. in registers for all rows, so the state is read once and, in a window, never written.
#include "sums.cuh"

// One thread a channel, all rows. w (taps, channels), history (taps - 1, channels).
KERNEL(256) gdn_conv(const float *qkv, float *conv, const float *w, float *const *history_slot, int T, int channels,
                     int taps, int advance, u64 *error, u64 where) {
    int c = blockIdx.x * 256 + threadIdx.x;
    if (c >= channels) return;
    float *history = *history_slot + c;
    for (int t = 0; t < T; t++) {
        float sum = 0.f;
        for (int i = 0; i < taps; i++) {
            int source = t - (taps - 1) + i;
            float x = source >= 0 ? qkv[(size_t)source * channels + c] : history[(size_t)(source + taps - 1) * channels];
            sum = fma32(w[(size_t)i * channels + c], x, sum);
        }
        sum = silu32(sum);
        conv[(size_t)t * channels + c] = sum;
        if (!finite32(sum)) report(error, where, NOT_FINITE, t);
    }
    if (advance)
        for (int j = 0; j < taps - 1; j++) {
            int source = T - (taps - 1) + j;
            history[(size_t)j * channels] = source >= 0 ? qkv[(size_t)source * channels + c] : history[(size_t)(j + T) * channels];
        }
}

// History (n, width) becomes the last n rows of (history, rows[: *n_keep]). One thread a column.
KERNEL(256) history_commit(float *const *history_slot, const float *rows, const i64 *n_keep, int n, int width) {
    int c = blockIdx.x * 256 + threadIdx.x;
    if (c >= width) return;
    float *history = *history_slot + c;
    int keep = (int)*n_keep;
    if (keep <= 0) return;
    for (int j = 0; j < n; j++) {
        int source = keep - n + j;  // ascending: what is read was not written yet
        history[(size_t)j * width] = source >= 0 ? rows[(size_t)source * width + c] : history[(size_t)(j + keep) * width];
    }
}

// out = x / sqrt(sum x^2 + 1e-6) * scale, by one warp.
DEVICE void unit(const float *x, int n, float scale, float *out) {
    auto value = [&](int i) { return x[i]; };
    float squares = warp_dot(n, lanes_of(n, 256), value, value);
    float r = div32(1.f, sqrt32(add32(squares, 1e-6f)));
    for (int i = threadIdx.x & 31; i < n; i += 32) out[i] = mul32(mul32(x[i], r), scale);
}

// Sum of the four lanes of a column: every thread (r, j) gets it. lanes: 4 dv floats of shared memory.
DEVICE float over_keys(float v, float *lanes, int j, int dv) {
    __syncthreads();
    lanes[threadIdx.x] = v;
    __syncthreads();
    return add32(add32(lanes[j], lanes[2 * dv + j]), add32(lanes[dv + j], lanes[3 * dv + j]));
}

// N: keys a thread holds, at least dk / 4. OUTPUT false: only the state is advanced, by the first *n_keep rows.
template <int N, bool OUTPUT>
DEVICE void delta_rule(const float *conv, float *decay, float *beta, const float *z, const float *a, const float *dt,
                       const float *norm, float *const *state_slot, float *y, int T, int Hk, int Hv, int dk, int dv,
                       int channels, int advance, float eps, float q_scale, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    float *q = (float *)bytes, *k = q + dk, *lanes = k + dk, *gates = lanes + 4 * dv, *sum = gates + 4;
    int h = blockIdx.x, t = threadIdx.x, r = t / dv, j = t % dv, key_head = h % Hk, keys = dk / 4;
    float *state = *state_slot + (size_t)h * dk * dv;
    float S[N], *cell = state + r * dv + j;
#pragma unroll
    for (int m = 0; m < N; m++, cell += 4 * dv) S[m] = m < keys ? *cell : 0.f;
    for (int row = 0; row < T; row++) {
        const float *mixed = conv + (size_t)row * channels;
        int at = row * Hv + h, warp = t >> 5;
        __syncthreads();
        if (warp == 0) unit(mixed + (Hk + key_head) * dk, dk, 1.f, k);
        if (OUTPUT && warp == 1) unit(mixed + key_head * dk, dk, q_scale, q);
        bool fine = true;
        if (t == 64) {
            float alpha = decay[at], raw = beta[at];
            if (OUTPUT) {
                // What a softplus, exp or sigmoid would make a finite number of.
                fine = finite32(alpha) && finite32(raw);
                alpha = exp32(mul32(a[h], softplus32(add32(alpha, dt[h]))));
                raw = sigmoid32(raw);
                decay[at] = alpha;
                beta[at] = raw;
            }
            gates[0] = alpha;
            gates[1] = raw;
        }
        __syncthreads();
        float fade = gates[0], part = 0.f;
#pragma unroll
        for (int m = 0; m < N; m++)
            if (m < keys) {
                S[m] = mul32(S[m], fade);
                part = fma32(S[m], k[4 * m + r], part);
            }
        float v = mixed[2 * Hk * dk + h * dv + j];
        float delta = mul32(gates[1], sub32(v, over_keys(part, lanes, j, dv)));
        part = 0.f;
#pragma unroll
        for (int m = 0; m < N; m++)
            if (m < keys) {
                S[m] = fma32(k[4 * m + r], delta, S[m]);
                if (OUTPUT) part = fma32(S[m], q[4 * m + r], part);
            }
        if (!OUTPUT) continue;
        float o = over_keys(part, lanes, j, dv);
        __syncthreads();
        if (r == 0) lanes[j] = o;
        __syncthreads();
        if (t < 32) {
            auto value = [&](int i) { return lanes[i]; };
            float squares = warp_dot(dv, lanes_of(dv, 256), value, value);
            if (t == 0) *sum = squares;
        }
        __syncthreads();
        if (r == 0) {
            size_t place = ((size_t)row * Hv + h) * dv + j;
            float gate = z[place], out = mul32(mul32(mul32(o, inverse_rms(*sum, dv, eps)), norm[j]), sigmoid32(gate));
            y[place] = out;
            fine = fine && finite32(out) && finite32(gate);
        }
        if (!fine) report(error, where, NOT_FINITE, row);
    }
    if (!advance) return;
    cell = state + r * dv + j;
#pragma unroll
    for (int m = 0; m < N; m++, cell += 4 * dv)
        if (m < keys) *cell = S[m];
}

template <int N>
KERNEL(512) gdn_heads(const float *conv, float *decay, float *beta, const float *z, const float *a, const float *dt,
                       const float *norm, float *const *state_slot, float *y, int T, int Hk, int Hv, int dk, int dv,
                       int channels, int advance, float eps, float q_scale, u64 *error, u64 where) {
    delta_rule<N, true>(conv, decay, beta, z, a, dt, norm, state_slot, y, T, Hk, Hv, dk, dv, channels, advance, eps,
                        q_scale, error, where);
}

template <int N>
KERNEL(512) gdn_commit(const float *conv, float *decay, float *beta, float *const *state_slot, const i64 *n_keep, int Hk,
                        int Hv, int dk, int dv, int channels) {
    int keep = (int)*n_keep;
    if (keep > 0)
        delta_rule<N, false>(conv, decay, beta, nullptr, nullptr, nullptr, nullptr, state_slot, nullptr, keep, Hk, Hv, dk,
                             dv, channels, 1, 0.f, 1.f, nullptr, 0);
}
