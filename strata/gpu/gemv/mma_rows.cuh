// Products on tensor cores for a few columns: 16 rows of a matrix times up to four columns, with the bits of `multiply`.
//
// A lane of a format's rule sums a few values only, less than a product of the tensor cores does. So a column of it is one
// lane of one row of activations, zero where other lanes have their values: an exact integer a lane comes out, as from
// dp4a, and floats follow in the same order. Most of the products are with zeros, but those cost nothing.
//
// Rows g and g + 8 of the 16 (tensor.cuh) are rows g of row blocks 0, 1 and 2, 3. Thread 4g + t holds lanes 8p + 2t + c of
// both rows: v[column][row][p][c] and of minima lane t, m[column][row].
#pragma once
#include "gemv/k.cuh"
#include "gemv/ring.cuh"
#include "gemv/small4.cuh"

// Blocks on a processor: as many as registers hold.
#if !defined(STRATA_ON_CPU) && __CUDA_ARCH__ / 10 == 90
#define MMA_BLOCKS 3
#else
#define MMA_BLOCKS 2
#endif

template <int T>
struct MmaSums {
    float v[T][2][2][2], m[T][2];
    // A term of lanes c of rows g and g + 8, sum[2 row + c], and one of minima. Integers as `whole` takes them; d: float16
    // scales of both rows, and of the minimum.
    DEVICE void lanes(int k, int p, const int (&sum)[4], const u32 (&d)[2], float scale) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[k][i >> 1][p][i & 1] = fma32(whole(sum[i]), mul32(half_f32((u16)d[i >> 1]), scale), v[k][i >> 1][p][i & 1]);
    }
    DEVICE void minimum(int k, int r, int sum, u32 d, float scale) {
        m[k][r] = fma32(whole(sum), mul32(half_f32((u16)d), scale), m[k][r]);
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < T * 8; i++) (&v[0][0][0][0])[i] = 0.f;
#pragma unroll
        for (int i = 0; i < T * 2; i++) (&m[0][0])[i] = 0.f;
    }
    // The fixed tree: y of rows g and g + 8, the same in the four threads of a row.
    template <int MINIMUM>
    DEVICE void rows(float (&y)[2][T]) const {
#pragma unroll
        for (int t = 0; t < T; t++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float s[2];
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    s[c] = add32(v[t][r][0][c], v[t][r][1][c]);
                    s[c] = add32(s[c], __shfl_xor_sync(ALL_LANES, s[c], 2));
                    s[c] = add32(s[c], __shfl_xor_sync(ALL_LANES, s[c], 1));
                }
                float sum = add32(s[0], s[1]);
                if (MINIMUM != 0) {
                    float least = add32(m[t][r], __shfl_xor_sync(ALL_LANES, m[t][r], 2));
                    least = add32(least, __shfl_xor_sync(ALL_LANES, least, 1));
                    sum = MINIMUM > 0 ? add32(sum, least) : sub32(sum, least);
                }
                y[r][t] = add32(sum, 0.f);
            }
    }
};

// Columns in shared memory, in the order in which threads want them: 72 words for every 256 values, 64 of codes, then what
// the format puts there (Mma::bring). Columns are a number of words apart that puts two of them into different banks.
struct NearColumns {
    u32 *words;
    int pitch;
    DEVICE NearColumns(void *to, int K) : words((u32 *)to), pitch(((K + 255 >> 8) * 72 + 15) / 32 * 32 + 16) {}
    DEVICE u32 *at(int k, int chunk) const { return words + (k * pitch + 72 * chunk); }
};

// What threads want of a chunk of Q4_K's columns: the words of group g of sub-blocks 2p, 2p + 1, 2p + 4, 2p + 5; sums of
// sub-blocks 2t and 2t + 1 side by side; the scale. From global memory, or from shared memory.
template <int T>
struct FarQ4 {
    const Columns<T> &x;
    DEVICE uint4 words(int k, int chunk, int p, int g) const {
        const i8 *codes = x.codes + (opaque(x.row[k]) + 256 * chunk + 64 * p + 4 * g);
        return make_uint4(*(const u32 *)codes, *(const u32 *)(codes + 32), *(const u32 *)(codes + 128),
                          *(const u32 *)(codes + 160));
    }
    DEVICE u32 sums(int k, int chunk, int t) const {
        int4 s = ((const int4 *)(x.sums + (opaque(x.row[k]) + 256 * chunk >> 4)))[t];
        return permute(s.x + s.y, s.z + s.w, 0x5410);
    }
    DEVICE float scale(int k, int chunk) const { return x.scales[opaque(x.row[k]) + 256 * chunk >> 8]; }
};
struct NearQ4 {
    const NearColumns &x;
    DEVICE uint4 words(int k, int chunk, int p, int g) const { return *(const uint4 *)(x.at(k, chunk) + 8 * g + 4 * p); }
    DEVICE u32 sums(int k, int chunk, int t) const { return x.at(k, chunk)[64 + t]; }
    DEVICE float scale(int k, int chunk) const { return float_of(x.at(k, chunk)[68]); }
};

// Steps of a format: `step` adds a chunk of four row blocks, PITCH bytes apart, or its first half where `half` says that it
// is the step left at the end of a row. `bring`: all threads of a block bring T columns near.
template <class F>
struct Mma;

// 16 bytes of T columns for every thread, of K values: put(column, number of the 16 bytes, them).
template <int T, class Put>
DEVICE void bring_codes(const Columns<T> &x, int K, const Put &put) {
    for (int i = threadIdx.x; i < K / 16; i += 2 * blockDim.x) {
        int also = i + blockDim.x;
        uint4 first[T], second[T];
#pragma unroll
        for (int k = 0; k < T; k++) first[k] = codes16(x.codes + x.row[k] + 16 * i);
        if (also < K / 16)
#pragma unroll
            for (int k = 0; k < T; k++) second[k] = codes16(x.codes + x.row[k] + 16 * also);
#pragma unroll
        for (int k = 0; k < T; k++) put(k, i, first[k]);
        if (also < K / 16)
#pragma unroll
            for (int k = 0; k < T; k++) put(k, also, second[k]);
    }
}

template <>
struct Mma<Q4_K> {
    enum { PITCH = Q4_K::Raw::CHUNK, VALUES = 256 };
    template <int T>
    DEVICE static void bring(const Columns<T> &x, int K, const NearColumns &to) {
        FarQ4<T> far = {x};
        int i = threadIdx.x, chunk = i >> 2, t = i & 3, some = chunk < K >> 8;
        u32 sums[T];
        float scales[T];
        if (some)
#pragma unroll
            for (int k = 0; k < T; k++) sums[k] = far.sums(k, chunk, t), scales[k] = far.scale(k, chunk);
        bring_codes<T>(x, K, [&](int k, int i, const uint4 &v) {
            int s = i >> 1 & 7;  // sub-block 2p + (j & 1) + 4 (j >> 1), and half of its groups
            u32 *at = to.at(k, i >> 4) + 32 * (i & 1) + 4 * (s >> 1 & 1) + (s & 1) + 2 * (s >> 2);
            at[0] = v.x, at[8] = v.y, at[16] = v.z, at[24] = v.w;
        });
        for (; chunk < K >> 8; chunk += blockDim.x >> 2) {
#pragma unroll
            for (int k = 0; k < T; k++) {
                u32 *at = to.at(k, chunk) + 64;
                at[t] = chunk == i >> 2 ? sums[k] : far.sums(k, chunk, t);
                if (t == 0) at[4] = bits_of(chunk == i >> 2 ? scales[k] : far.scale(k, chunk));
            }
        }
    }
    template <int T>
    DEVICE static void step(const u8 *stage, int chunk, bool, const NearColumns &x, MmaSums<T> &sums) {
        terms<T>(stage, PITCH, chunk, NearQ4{x}, sums);
    }
    // The terms of a chunk, row blocks `pitch` bytes apart.
    template <int T, class X, class To>
    DEVICE static void terms(const u8 *stage, u32 pitch, int chunk, const X &x, To &sums) {
        int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const u8 *at = stage + (g >> 2) * pitch + 128 * (g & 3) + 16 * t;
        const u8 *heads = stage + (g >> 2) * pitch + 512 + 16 * (g & 3);
        u32 mine = g >> 1 == t ? ~0u : 0u, even = g & 1 ? 0u : mine, odd = g & 1 ? mine : 0u;
        u32 upper[2], lower[2], d[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint4 h = *(const uint4 *)(heads + 2 * r * pitch);
            d[r] = h.x;
            lower[r] = h.y & 0x3f3f3f3fu;
            upper[r] = (h.w & 0x0f0f0f0fu) | (h.y >> 2 & 0x30303030u);
            u32 minima = t < 2 ? h.z & 0x3f3f3f3fu : (h.w >> 4 & 0x0f0f0f0fu) | (h.z >> 2 & 0x30303030u);
            minima >>= 16 * (t & 1);
#pragma unroll
            for (int k = 0; k < T; k++)
                sums.minimum(k, r, dot2_low(x.sums(k, chunk, t), minima, WHOLE), h.x >> 16, x.scale(k, chunk));
        }
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint4 words[T];
#pragma unroll
            for (int k = 0; k < T; k++) words[k] = x.words(k, chunk, p, g);
            u32 w[2][4], scales[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint4 v = *(const uint4 *)(at + 2 * r * pitch + 64 * p);
                w[r][0] = v.x, w[r][1] = v.y, w[r][2] = v.z, w[r][3] = v.w;
                scales[r] = permute(lower[r], upper[r], p ? 0x7632 : 0x5410);
            }
            int sum[T][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int shift = 4 * (i & 1), j = 2 * (i >> 1);
                u32 a[4] = {w[0][j] >> shift & 0x0f0f0f0fu, w[1][j] >> shift & 0x0f0f0f0fu,
                            w[0][j + 1] >> shift & 0x0f0f0f0fu, w[1][j + 1] >> shift & 0x0f0f0f0fu};
#pragma unroll
                for (int k = 0; k < T; k++) {
                    u32 word = i == 0 ? words[k].x : i == 1 ? words[k].y : i == 2 ? words[k].z : words[k].w;
                    u32 b[2] = {word & even, word & odd};
                    int dots[4];
                    mma_s8(dots, a, b, 0);
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        sum[k][c] = (i ? sum[k][c] : WHOLE) + dots[c] * byte_of(scales[c >> 1], i);
                }
            }
#pragma unroll
            for (int k = 0; k < T; k++) sums.lanes(k, p, sum[k], d, x.scale(k, chunk));
        }
    }
};

template <>
struct Mma<IQ4_NL> {
    enum { PITCH = IQ4_NL::Raw::CHUNK, VALUES = 256 };
    // Eight words a block of 32: values 0..7 and 16..23, then 8..15 and 24..31. Scales behind them.
    template <int T>
    DEVICE static void bring(const Columns<T> &x, int K, const NearColumns &to) {
        float scales[T];
        int i = threadIdx.x;
        if (i < K >> 5)
#pragma unroll
            for (int k = 0; k < T; k++) scales[k] = x.scales[(x.row[k] >> 5) + i];
        bring_codes<T>(x, K, [&](int k, int i, const uint4 &v) {
            u32 *at = to.at(k, i >> 4) + 8 * (i >> 1 & 7) + 2 * (i & 1);
            *(uint2 *)at = make_uint2(v.x, v.y);
            *(uint2 *)(at + 4) = make_uint2(v.z, v.w);
        });
        for (int b = i; b < K >> 5; b += blockDim.x)
#pragma unroll
            for (int k = 0; k < T; k++)
                to.at(k, b >> 3)[64 + (b & 7)] = bits_of(b == i ? scales[k] : x.scales[(x.row[k] >> 5) + b]);
    }
    // Two rows of activations a product: column 2t + u is lane t of a group of four and row u of the two.
    template <int T>
    DEVICE static void step(const u8 *stage, int chunk, bool half, const NearColumns &x, MmaSums<T> &sums) {
        int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, pitch = half ? 1 : 2;
        const u8 *at = stage + (g >> 2) * PITCH + (g & 3) * 64 * pitch + 8 * pitch * t;
        const u8 *scale_at = stage + (g >> 2) * PITCH + 256 * pitch + (g & 3) * 8 * pitch + 2 * pitch * (t >> 1);
        u32 mine = g >> 1 == t ? ~0u : 0u;
        const u32 *own = x.at(T > 1 ? g & 1 : 0, chunk) + 4 * t;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (e && half) break;
#pragma unroll
            for (int p = 0; p < 2; p++) {
                uint4 words[(T + 1) / 2];
#pragma unroll
                for (int k = 0; k < T; k += 2) words[k / 2] = *(const uint4 *)(own + k * x.pitch + 32 * e + 16 * p);
                u32 low[2][2], high[2][2];
                float d[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    uint2 w = *(const uint2 *)(at + 2 * r * PITCH + 32 * pitch * p + 8 * e);
                    look_up_nl(w.x, low[r][0], high[r][0]);
                    look_up_nl(w.y, low[r][1], high[r][1]);
                    d[r] = half_f32(*(const u16 *)(scale_at + 2 * r * PITCH + 4 * pitch * p + 2 * e));
                }
#pragma unroll
                for (int k = 0; k < T; k += 2) {
                    const uint4 &v = words[k / 2];
                    float c[2][2];
#pragma unroll
                    for (int u = 0; u < (T > 1 ? 2 : 1); u++) {
                        float scale = float_of(x.at(k + u, chunk)[64 + 4 * e + 2 * p + (t >> 1)]);
#pragma unroll
                        for (int r = 0; r < 2; r++) c[u][r] = mul32(d[r], scale);
                    }
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        u32 a[4] = {low[0][j], low[1][j], high[0][j], high[1][j]};
                        u32 b[2] = {(j ? v.y : v.x) & mine, (j ? v.w : v.z) & mine};
                        int dots[4];
                        mma_s8(dots, a, b, WHOLE);
#pragma unroll
                        for (int u = 0; u < (T > 1 ? 2 : 1); u++)
#pragma unroll
                            for (int r = 0; r < 2; r++) {
                                float &sum = sums.v[k + u][r][p][j];
                                sum = fma32(whole(dots[2 * r + u]), c[u][r], sum);
                            }
                    }
                }
            }
        }
    }
};

// Row block r of unit u, 16 rows of a matrix from row block `first` on; with `up` eight rows of each of two.
struct MmaBlocks {
    const u8 *weights, *up;
    int first, last;
    u32 bytes;
    DEVICE const u8 *operator()(int u, int r) const {
        size_t pair = (size_t)(first + (r & 1)) * bytes;
        if (up) return r < 2 ? weights + pair : up + pair;  // values, not places: a choice of places needs an address
        return weights + (size_t)min(first + 4 * u + r, last) * bytes;
    }
};

// The ring of a warp: stages of one chunk of four row blocks; units follow each other without a pause.
template <class F, int HOW, int STAGES_ = 4>
struct MmaRing {
    enum { STAGES = STAGES_, STAGE = 4 * Mma<F>::PITCH, BYTES = STAGES * STAGE + 16 * STAGES };
    u8 *bytes;
    int lane, chunks, left, steps;  // whole chunks of a row, bytes of the step behind them, both together
    int unit, chunk;                // what is asked for next

    DEVICE MmaRing(u8 *to, int K) : bytes(to), lane(threadIdx.x & 31), unit(0), chunk(0) {
        typedef typename F::Raw Raw;
        chunks = K / Mma<F>::VALUES;
        left = K % Mma<F>::VALUES ? (int)Raw::STEP : 0;
        steps = chunks + (left != 0);
    }
    DEVICE u64 *arrived(int slot) const { return (u64 *)(bytes + STAGES * STAGE + 16 * slot); }
    // Chunk `chunk` of a unit's row blocks into stage s.
    DEVICE void ask(int s, int unit, int chunk, const MmaBlocks &block_of) const {
        int slot = s % STAGES, n = chunk < chunks ? (int)Mma<F>::PITCH : left;
        u8 *to = bytes + slot * STAGE;
        if constexpr (HOW == BY_BULK) {
            if (lane == 0) bulk_expect(arrived(slot), 4 * n);
            __syncwarp();
            if (lane < 4)
                bulk_copy(to + lane * Mma<F>::PITCH, block_of(unit, lane) + chunk * Mma<F>::PITCH, n, arrived(slot));
        } else {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const u8 *from = block_of(unit, r) + chunk * Mma<F>::PITCH;
                for (int i = 16 * lane; i < n; i += 512) copy<16>(to + r * Mma<F>::PITCH + i, from + i);
            }
        }
    }
    DEVICE void bring(int s, int end, const MmaBlocks &block_of) {
        if (s < end) {
            ask(s, unit, chunk, block_of);
            if (++chunk == steps) chunk = 0, unit++;
        }
        if constexpr (HOW != BY_BULK) copy_commit();
    }
    // The same where warps share out the chunks of one unit.
    DEVICE void bring_one(int s, int chunk, const MmaBlocks &block_of) const {
        if (chunk < chunks) ask(s, 0, chunk, block_of);
        if constexpr (HOW != BY_BULK) copy_commit();
    }
    DEVICE void ready() const {
        if constexpr (HOW == BY_BULK) {
            if (lane < STAGES) bulk_ready(arrived(lane));
            __syncwarp();
        }
    }
    DEVICE void start(int end, const MmaBlocks &block_of) {
        ready();
#pragma unroll
        for (int s = 0; s < STAGES; s++) bring(s, end, block_of);
    }
    DEVICE void start_shared(int warp, const MmaBlocks &block_of) const {
        ready();
#pragma unroll
        for (int s = 0; s < STAGES; s++) bring_one(s, warp + 8 * s, block_of);
    }
    // Adds the products of a unit and asks for what follows, up to step `end` of all.
    template <int T>
    DEVICE void multiply(int unit, int end, const MmaBlocks &block_of, const NearColumns &x, float (&y)[2][T]) {
        MmaSums<T> sums;
        sums.clear();
#pragma unroll 1
        for (int c = 0; c < steps; c++) {
            int s = unit * steps + c;
            if constexpr (HOW == BY_BULK) bulk_wait(arrived(s % STAGES), s / STAGES & 1);
            else copy_wait<STAGES - 1>();
            __syncwarp();
            Mma<F>::template step<T>(bytes + s % STAGES * STAGE, c, c >= chunks, x, sums);
            __syncwarp();
            bring(s + STAGES, end, block_of);
        }
        sums.template rows<F::MINIMUM>(y);
    }
};
