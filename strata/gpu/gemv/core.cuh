// Products of relaid matrices with quantised rows: what all formats share.
//
// A matrix is cut into row blocks of four rows (relayout.py). A warp works on R of them; eight threads share a row,
// thread q of them holds lanes 2q and 2q + 1 of the format's lane rule. Along the row, a step is what gives every
// thread one piece of work; a chunk is one or two steps, so that a thread loads 16 bytes of codes at once.
//
// A format F has
//   Raw                     its Layout: what a thread loads of a chunk
//   VALUES                  values of a block
//   Step, unpack(raw, e, q, table)      signed bytes and scales of step e
//   X, read(columns, t, first, q)       the activations that meet them, first the step's first value
//   dot(step, x, v)         one fma per lane, v[j] = fma32(integer, scale, v[j]); with Terms in v the two factors
//   MINIMUM                 0, or 1 and -1 for four more lanes that are added or subtracted. Two threads could take
//                           each of them: thread q takes lane q / 2 of the row q mod 2 of its two.
//   Step::least, add_minimum(least, q, x, m)    what a minimum needs of a step, and its fma
//   ENTRIES, TABLE, widen(i, table)     entries and words of its grid table, and what writes entry i; 0 without
#pragma once
#include "early.cuh"
#include "gemv/lanes.cuh"

// load_once if `on`; otherwise the words are not defined. A predicate, so that nothing is merged with what was there before.
#ifdef STRATA_ON_CPU
template <int BYTES>
DEVICE void load_if(bool on, const u8 *p, u32 *to) {
    for (int i = 0; i < (BYTES + 3) / 4; i++) to[i] = 0xdeadbeefu;
    if (on) memcpy(to, p, BYTES);
    if (on && BYTES < 4) to[0] &= (1u << 8 * (BYTES & 3)) - 1;
}
#else
template <int BYTES>
DEVICE void load_if(bool on, const u8 *p, u32 *to) {
    if constexpr (BYTES == 16)
        asm volatile("{.reg .pred p;\nsetp.ne.u32 p,%5,0;\n"
                     "@p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];}"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(p), "r"((u32)on));
    else if constexpr (BYTES == 8)
        asm volatile("{.reg .pred p;\nsetp.ne.u32 p,%3,0;\n@p ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];}"
                     : "=r"(to[0]), "=r"(to[1]) : "l"(p), "r"((u32)on));
    else if constexpr (BYTES == 4)
        asm volatile("{.reg .pred p;\nsetp.ne.u32 p,%2,0;\n@p ld.global.nc.L1::no_allocate.u32 %0,[%1];}"
                     : "=r"(to[0]) : "l"(p), "r"((u32)on));
    else if constexpr (BYTES == 2)
        asm volatile("{.reg .pred p;\nsetp.ne.u32 p,%2,0;\n@p ld.global.nc.u16 %0,[%1];}"
                     : "=r"(to[0]) : "l"(p), "r"((u32)on));
    else if constexpr (BYTES == 1)
        asm volatile("{.reg .pred p;\nsetp.ne.u32 p,%2,0;\n@p ld.global.nc.u8 %0,[%1];}"
                     : "=r"(to[0]) : "l"(p), "r"((u32)on));
}
#endif

// Copies BYTES bytes into words; less than a word fills its low part. SHARED: from shared memory.
template <int BYTES, bool SHARED>
DEVICE void fetch(const u8 *p, u32 *to) {
    if constexpr (SHARED) {
        if constexpr (BYTES == 16) {
            uint4 v = *(const uint4 *)p;
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        } else if constexpr (BYTES == 8) {
            uint2 v = *(const uint2 *)p;
            to[0] = v.x, to[1] = v.y;
        } else if constexpr (BYTES == 4) {
            to[0] = *(const u32 *)p;
        } else if constexpr (BYTES == 2) {
            to[0] = *(const u16 *)p;
        } else if constexpr (BYTES == 1) {
            to[0] = *p;
        }
    } else if constexpr (BYTES == 16) {
        uint4 v = load_once((const uint4 *)p);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (BYTES == 8) {
        uint2 v = load_once((const uint2 *)p);
        to[0] = v.x, to[1] = v.y;
    } else if constexpr (BYTES == 4) {
        to[0] = load_once((const u32 *)p);
    } else if constexpr (BYTES == 2) {
        to[0] = __ldg((const u16 *)p);
    } else if constexpr (BYTES == 1) {
        to[0] = __ldg(p);
    }
}

// The same in front of the wait for the inputs (early.cuh).
template <int BYTES>
DEVICE void fetch_ahead(const u8 *p, u32 *to) {
    static_assert(BYTES == 16 || BYTES == 4 || BYTES == 0, "whole words");
    if constexpr (BYTES == 16) {
        uint4 v = load_ahead16(p);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (BYTES == 4) {
        to[0] = load_ahead(p);
    }
}

// Where the bytes of a chunk lie: up to five sections, section i with I items of B bytes a step; an item serves 8 / I
// threads. In a chunk of E steps a section is [row of 4][item][step][B]. A step that is left at the end of a row lies
// alone, with the items of its n <= P blocks: [row of 4][item][B].
template <int E, int P, int I0, int B0, int I1, int B1, int I2 = 0, int B2 = 0, int I3 = 0, int B3 = 0, int I4 = 0,
          int B4 = 0>
struct Layout {
    enum {
        STEPS = E,
        BLOCKS = P,
        O1 = 4 * E * I0 * B0,
        O2 = O1 + 4 * E * I1 * B1,
        O3 = O2 + 4 * E * I2 * B2,
        O4 = O3 + 4 * E * I3 * B3,
        CHUNK = O4 + 4 * E * I4 * B4,
        STEP = CHUNK / E,
        LOADED = E * (B0 + B1 + B2 + B3 + B4)  // bytes that a thread loads of a chunk
    };
    u32 a[(E * B0 + 3) / 4], b[(E * B1 + 3) / 4], c[(E * B2 + 3) / 4 + !B2], d[(E * B3 + 3) / 4 + !B3],
        e[(E * B4 + 3) / 4 + !B4];

    template <int O, int I, int B, bool SHARED>
    DEVICE static void section(const u8 *chunk, int row, int q, u32 *to) {
        fetch<E * B, SHARED>(chunk + O + E * B * (I * row + (I * q >> 3)), to);
    }
    template <int O, int I, int B>
    DEVICE static void section_if(bool on, const u8 *chunk, int row, int q, u32 *to) {
        ::load_if<E * B>(on, chunk + O + E * B * (I * row + (I * q >> 3)), to);
    }
    template <int O, int I, int B, bool SHARED>
    DEVICE static void last(const u8 *step, int row, int q, int n, u32 *to) {
        fetch<B, SHARED>(step + O / E / P * n + B * (I * n / P * row + (I * q >> 3)), to);
    }
    template <bool SHARED = false>
    DEVICE void load(const u8 *chunk, int row, int q) {
        section<0, I0, B0, SHARED>(chunk, row, q, a);
        section<O1, I1, B1, SHARED>(chunk, row, q, b);
        section<O2, I2, B2, SHARED>(chunk, row, q, c);
        section<O3, I3, B3, SHARED>(chunk, row, q, d);
        section<O4, I4, B4, SHARED>(chunk, row, q, e);
    }
    // As load, in front of the wait. Up to two sections.
    DEVICE void load_ahead(const u8 *chunk, int row, int q) {
        static_assert(B2 == 0 && B3 == 0 && B4 == 0, "two sections");
        fetch_ahead<E * B0>(chunk + E * B0 * (I0 * row + (I0 * q >> 3)), a);
        fetch_ahead<E * B1>(chunk + O1 + E * B1 * (I1 * row + (I1 * q >> 3)), b);
    }
    // As load, if `on`; otherwise undefined.
    DEVICE void load_if(bool on, const u8 *chunk, int row, int q) {
        section_if<0, I0, B0>(on, chunk, row, q, a);
        section_if<O1, I1, B1>(on, chunk, row, q, b);
        section_if<O2, I2, B2>(on, chunk, row, q, c);
        section_if<O3, I3, B3>(on, chunk, row, q, d);
        section_if<O4, I4, B4>(on, chunk, row, q, e);
    }
    template <bool SHARED = false>
    DEVICE void load_last(const u8 *step, int row, int q, int n) {
        last<0, I0, B0, SHARED>(step, row, q, n, a);
        last<O1, I1, B1, SHARED>(step, row, q, n, b);
        last<O2, I2, B2, SHARED>(step, row, q, n, c);
        last<O3, I3, B3, SHARED>(step, row, q, n, d);
        last<O4, I4, B4, SHARED>(step, row, q, n, e);
    }
};

// T rows of activations: row[t] is the index of the row's first value.
template <int T>
struct Columns {
    const i8 *codes;
    const float *scales;
    const int *sums;
    u32 row[T];
};

// Activations are written by the kernel in front of this one: no loads through the read-only path (early.cuh).
DEVICE uint2 codes8(const i8 *p) { return *(const uint2 *)p; }
DEVICE uint4 codes16(const i8 *p) { return *(const uint4 *)p; }

// Float of an integer that was added to a multiple of these bits, exact below 2^22: cheaper than a conversion.
#define WHOLE 0x4b400000  // 1.5 * 2^23
DEVICE float whole(int bits) { return sub32(float_of(bits), 12582912.f); }

// Bytes 16 (code - 8) and 8 (code - 16) give sums in sixteenths and eighths: the same with smaller numbers.
#define SIXTEENTHS 0x49400000  // 1.5 * 2^19
#define EIGHTHS 0x49c00000     // 1.5 * 2^20
DEVICE float sixteenths(int bits) { return sub32(float_of(bits), 786432.f); }
DEVICE float eighths(int bits) { return sub32(float_of(bits), 1572864.f); }

DEVICE float half_of(const u32 *words, int i) { return half_f32((u16)(words[i >> 1] >> 16 * (i & 1))); }

// Bytes below 128, each less `bias`, as signed bytes.
DEVICE u32 less(u32 bytes, u32 bias) { return (bytes + (0x80u - bias) * 0x01010101u) ^ 0x80808080u; }

// Hides where a number comes from. Otherwise the compiler keeps an address for every array, row and column in registers
// and loads the activations of all columns at once.
DEVICE u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

DEVICE const u8 *opaque(const u8 *p) {
#ifndef STRATA_ON_CPU
    asm volatile("" : "+l"(p));
#endif
    return p;
}

// What minima need of a step: words as they are in memory, unpacked only for the row that a thread serves.
template <int WORDS>
struct Least {
    u32 words[WORDS];
};
template <>
struct Least<0> {};
typedef Least<0> NoLeast;
template <int WORDS>
DEVICE Least<WORDS> either(const Least<WORDS> &a, const Least<WORDS> &b, bool second) {
    Least<WORDS> s;
#pragma unroll
    for (int i = 0; i < WORDS; i++) s.words[i] = second ? b.words[i] : a.words[i];
    return s;
}
DEVICE NoLeast either(const NoLeast &a, const NoLeast &, bool) { return a; }

// The form of a format that suits T columns, with the same Raw and bits.
template <class F, int T>
struct ForColumns {
    typedef F Type;
};

// PLAIN: places are constants, nothing to hide.
template <class FORMAT, int R, int T, bool PLAIN = false>
DEVICE void add_step(const typename FORMAT::Raw (&raw)[R], int e, int q, u32 first, const Columns<T> &x, const u32 *table,
                     Lanes<R, T> &lanes) {
    typedef typename ForColumns<FORMAT, T>::Type F;
    typename F::Step step[R];
#pragma unroll
    for (int r = 0; r < R; r++) step[r] = F::unpack(raw[r], e, q, table);
    auto least = either(step[0].least, step[R - 1].least, q & 1);
#pragma unroll
    for (int t = 0; t < T; t++) {
        typename F::X values = F::read(x, t, T == 1 || PLAIN ? first : opaque(first), q);
#pragma unroll
        for (int r = 0; r < R; r++) F::dot(step[r], values, lanes.v[r][t]);
        if constexpr (F::MINIMUM != 0) F::add_minimum(least, q, values, lanes.m[t]);
    }
}

// How many chunks of a format are under way for one column if they stay where they have arrived while they are used, which
// takes one place more. Without (0) the compiler loads into other registers and moves them when a chunk has been used: so
// every chunk waits for the load that it has just begun.
template <class F>
struct Rotates {
    static const int DEPTH = 0;
};

// Whether the code of several columns brings a lone one near. With a grid most of the work is unpacking, and registers are
// short.
template <class F>
struct LoneNear {
    static const bool VALUE = F::ENTRIES == 0;
};

// Row blocks at block[r] times T columns; returns the output that Own names. DEPTH chunks are on their way while one is
// computed; with 0, other warps hide the latency. inputs(): the columns, after the wait. The rest of the row blocks is not
// brought into L2 before the wait: windows with Q8_0 were 3 % slower with it, others of two rows 1 %.
template <class F, int R, int T, int DEPTH, class X>
DEVICE float multiply_by(const u8 *const (&block)[R], int K, X inputs, const u32 *table) {
    typedef typename F::Raw Raw;
    const int E = Raw::STEPS, P = Raw::BLOCKS, STEP_VALUES = P * F::VALUES;
    int lane = (int)opaque(threadIdx.x & 31), row = lane >> 3, q = lane & 7;
    int blocks = K / F::VALUES, chunks = blocks / (E * P);
    Lanes<R, T> lanes;
    lanes.clear();

    // One slot more than chunks under way, so that a chunk is used where it has arrived; formats that load much of a chunk
    // have no registers for it and copy.
    const bool ROTATE = DEPTH > 0 && T == 1 && Rotates<F>::DEPTH > 0;
    const int SLOTS = ROTATE ? DEPTH + 1 : DEPTH > 0 ? DEPTH : 1;
    Raw ring[SLOTS][R];
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        if (i < chunks)
#pragma unroll
            for (int r = 0; r < R; r++) ring[i][r].load(block[r] + i * Raw::CHUNK, row, q);
    // Short rows of small blocks: with one column, what is left behind the chunks is on its way from the start too. Not where
    // chunks are short: rows of models are a multiple of 128 values.
    const bool REST = P > 1 && T == 1 && DEPTH > 0 && E * P * F::VALUES > 128;
    int left = blocks - chunks * E * P, n_rest = REST ? min(left, (int)P) : 0;
    Raw rest[REST ? R : 1];
    if (REST && q * P / 8 < n_rest)
#pragma unroll
        for (int r = 0; r < R; r++) rest[REST ? r : 0].load_last(block[r] + chunks * Raw::CHUNK, row, q, n_rest);
    wait_for_inputs();  // whoever has waited already goes on at once
    const Columns<T> x = inputs();
    // Places of a turn of the loop are constants behind addresses that move on once a turn. With several columns there
    // are too many of these, and formats with a table have no registers left.
    const bool MOVES = T == 1 && F::ENTRIES == 0;
    const u8 *at[R];
#pragma unroll
    for (int r = 0; r < R; r++) at[r] = block[r];
    Columns<T> near = x;
    const int GROUP = F::VALUES == 256 ? 256 : 32;
    if constexpr (MOVES) near = {x.codes + x.row[0], x.scales + x.row[0] / GROUP, x.sums + x.row[0] / 16, {0}};
#pragma unroll 1
    for (int start = 0; start < chunks; start += SLOTS) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            int c = start + i;
            if (c >= chunks) break;
            u32 first = (MOVES ? i : c) * E * STEP_VALUES;
            auto place = [&](int r) {
                return MOVES ? at[r] + (i + DEPTH) * Raw::CHUNK : block[r] + opaque((c + DEPTH) * Raw::CHUNK);
            };
            if constexpr (ROTATE) {
#pragma unroll
                for (int r = 0; r < R; r++) ring[(i + DEPTH) % SLOTS][r].load_if(c + DEPTH < chunks, place(r), row, q);
#pragma unroll
                for (int e = 0; e < E; e++) add_step<F, R, T>(ring[i], e, q, first + e * STEP_VALUES, near, table, lanes);
            } else {
                Raw now[R];
#pragma unroll
                for (int r = 0; r < R; r++)
                    if (DEPTH > 0) now[r] = ring[i][r];
                if (DEPTH == 0 || c + DEPTH < chunks)
#pragma unroll
                    for (int r = 0; r < R; r++) (DEPTH > 0 ? ring[i] : now)[r].load(place(r), row, q);
#pragma unroll
                for (int e = 0; e < E; e++) add_step<F, R, T>(now, e, q, first + e * STEP_VALUES, near, table, lanes);
            }
        }
        if constexpr (MOVES) {
#pragma unroll
            for (int r = 0; r < R; r++) at[r] += SLOTS * Raw::CHUNK;
            near.codes += SLOTS * E * STEP_VALUES;
            near.scales += SLOTS * E * STEP_VALUES / GROUP;
            near.sums += SLOTS * E * STEP_VALUES / 16;
        }
    }
    if constexpr (E * P > 1) {
        u32 at = opaque(chunks * Raw::CHUNK + (n_rest > 0 ? Raw::STEP : 0));
        if constexpr (REST)
            if (q * P / 8 < n_rest) add_step<F, R, T>(rest, 0, q, chunks * E * STEP_VALUES, x, table, lanes);
#pragma unroll 1
        for (int b = chunks * E * P + n_rest; b < blocks; b += P) {
            int n = blocks - b < P ? blocks - b : P;
            if (q * P / 8 < n) {
                Raw now[R];
#pragma unroll
                for (int r = 0; r < R; r++) now[r].load_last(block[r] + at, row, q, n);
                add_step<F, R, T>(now, 0, q, b * F::VALUES, x, table, lanes);
            }
            at += Raw::STEP;
        }
        __syncwarp();
    }
    return lanes.template output<F>(q);
}

template <class F, int R, int T, int DEPTH>
DEVICE float multiply(const u8 *const (&block)[R], int K, const Columns<T> &x, const u32 *table) {
    return multiply_by<F, R, T, DEPTH>(block, K, [&]() { return x; }, table);
}

// A column of K values, a multiple of 64, as threads `thread` of `threads` bring it into shared memory: codes, sums, scales,
// one behind the other. It is there after a barrier of these threads. PIECES loads are on their way before one is used.
template <class F, int PIECES = 4>
DEVICE Columns<1> bring_column(const Columns<1> &x, int K, u8 *area, int thread, int threads) {
    const int GROUP = F::VALUES == 256 ? 256 : 32;
    const u32 row = x.row[0];
    const uint4 *codes = (const uint4 *)(x.codes + row), *sums = (const uint4 *)(x.sums + row / 16);
    const float *from = x.scales + row / GROUP;
    int own = K / 16, all = own + K / 64, groups = K / GROUP;
    float *scales = (float *)(area + K + K / 4), scale = thread < groups ? from[thread] : 0.f;
#pragma unroll 1
    for (int i = thread; i < all; i += PIECES * threads) {
        uint4 v[PIECES];
#pragma unroll
        for (int j = 0, at = i; j < PIECES; j++, at += threads)
            if (at < all) v[j] = at < own ? codes[at] : sums[at - own];
#pragma unroll
        for (int j = 0, at = i; j < PIECES; j++, at += threads)
            if (at < all) ((uint4 *)area)[at] = v[j];
    }
    if (thread < groups) scales[thread] = scale;
#pragma unroll 1
    for (int i = thread + threads; i < groups; i += threads) scales[i] = from[i];
    return {(const i8 *)area, scales, (const int *)(area + K), {0}};
}

// Bytes of a row block: four rows, rounded up to 16.
template <class F>
DEVICE size_t row_block_bytes(int K) {
    return ((size_t)(K / F::VALUES) * (F::Raw::STEP / F::Raw::BLOCKS) + 15) & ~(size_t)15;
}

// All threads of a block bring the format's table into shared memory; ends with a barrier.
template <class F>
DEVICE void stage(u32 *table) {
    if constexpr (F::ENTRIES > 0) {
        for (int i = threadIdx.x; i < F::ENTRIES; i += blockDim.x) F::widen(i, table);
        __syncthreads();
    }
}
