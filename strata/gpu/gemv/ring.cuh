// Bytes of rows on their way through shared memory: every warp has a ring of its own, so no warp waits for another.
//
// A stage holds neighbouring chunks of R row blocks. All stages are asked for at once, far more bytes than registers
// could hold, and a stage is asked for again as soon as it has been read. From sm_90 on one lane asks for a whole run of
// bytes, from sm_80 on every lane for pieces of 16; Turing has neither and keeps chunks in registers (core.cuh).
#pragma once
#include "gemm/tensor.cuh"
#include "gemv/core.cuh"

enum { BY_REGISTERS = 0, BY_COPIES = 1, BY_BULK = 2 };

#ifdef STRATA_ON_CPU
#define MOST_HOW BY_BULK
#elif __CUDA_ARCH__ >= 900
#define MOST_HOW BY_BULK
#elif __CUDA_ARCH__ >= 800
#define MOST_HOW BY_COPIES
#else
#define MOST_HOW BY_REGISTERS
#endif

#ifndef STRATA_ON_CPU
#if MOST_HOW == BY_BULK
// A barrier for one arrival, which names the bytes of the copies that belong to it.
DEVICE void bulk_ready(u64 *barrier) {
    u32 at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void bulk_expect(u64 *barrier, u32 n) {
    u32 at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(at), "r"(n) : "memory");
}
// n a multiple of 16, both sides aligned for it.
DEVICE void bulk_copy(u8 *to, const u8 *from, u32 n, u64 *barrier) {
    u32 there = (u32)__cvta_generic_to_shared(to), at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(there),
                 "l"(from), "r"(n), "r"(at)
                 : "memory");
}
// Until the copies of the phase with this parity are there.
DEVICE void bulk_wait(u64 *barrier, u32 parity) {
    u32 at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\n@p bra.uni done;\nbra.uni again;\n"
        "done:\n}" ::"r"(at),
        "r"(parity)
        : "memory");
}
#else
DEVICE void bulk_ready(u64 *) {}
DEVICE void bulk_expect(u64 *, u32) {}
DEVICE void bulk_copy(u8 *, const u8 *, u32, u64 *) {}
DEVICE void bulk_wait(u64 *, u32) {}
#endif
#endif  // STRATA_ON_CPU

// The stages of a ring for R row blocks of a format. With one column few and long ones are fastest.
template <class F, int R, int M>
struct Stages {
    enum {
        DEPTH = M == 1 ? 3 : 4,
        FIT = (M == 1 ? 4800 : 2400) / (R * (int)F::Raw::CHUNK),
        CHUNKS = FIT < 1 ? 1 : FIT,
        SPAN = CHUNKS * F::Raw::CHUNK
    };
    static_assert(SPAN % 16 == 0, "copies are of 16 bytes");

    // Bytes of a ring for rows that take `all` bytes of a row block: barriers, then no more stages than are needed.
    DEVICE static int bytes(int all) { return 16 * DEPTH + min((int)DEPTH, (all + SPAN - 1) / SPAN) * R * SPAN; }
};

template <class F, int R, int M, int HOW>
struct Ring {
    typedef Stages<F, R, M> S;
    u8 *bytes;
    int lane;

    DEVICE u64 *arrived(int slot) const { return (u64 *)(bytes + 16 * slot); }
    DEVICE const u8 *stage(int s) const { return bytes + 16 * S::DEPTH + s % S::DEPTH * (R * S::SPAN); }
    // n bytes from `at` on of every row block into stage s, by one lane.
    DEVICE void runs(int s, const u8 *const (&block)[R], int at, int n) const {
        u8 *to = bytes + 16 * S::DEPTH + s % S::DEPTH * (R * S::SPAN);
        bulk_expect(arrived(s % S::DEPTH), R * n);
#pragma unroll
        for (int r = 0; r < R; r++) bulk_copy(to + r * S::SPAN, block[r] + at, n, arrived(s % S::DEPTH));
    }
    // The same by all lanes.
    DEVICE void bring(int s, const u8 *const (&block)[R], int at, int n) const {
        u8 *to = bytes + 16 * S::DEPTH + s % S::DEPTH * (R * S::SPAN);
        if constexpr (HOW == BY_BULK) {
            if (lane == 0) runs(s, block, at, n);
        } else {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int i = 0; i < S::SPAN; i += 512)
                    if (i + 16 * lane < n) copy<16>(to + r * S::SPAN + i + 16 * lane, block[r] + at + i + 16 * lane);
        }
    }
    DEVICE void close() const {
        if constexpr (HOW == BY_COPIES) copy_commit();
    }
    DEVICE void wait(int s) const {
        if constexpr (HOW == BY_BULK) bulk_wait(arrived(s % S::DEPTH), s / S::DEPTH & 1);
        else copy_wait<S::DEPTH - 1>();
        __syncwarp();
    }
};

// Asks for the first stages of a ring at `bytes` in shared memory, 16-byte aligned.
template <class F, int R, int M, int HOW>
DEVICE void start_ring(const u8 *const (&block)[R], int K, u8 *bytes) {
    typedef Stages<F, R, M> S;
    int all = (int)row_block_bytes<F>(K);
    Ring<F, R, M, HOW> ring = {bytes, (int)threadIdx.x & 31};
    if constexpr (HOW == BY_BULK) {
        int at = ring.lane * S::SPAN;  // every lane a stage: they work out addresses at the same time
        if (ring.lane < S::DEPTH) bulk_ready(ring.arrived(ring.lane));
        __syncwarp();  // all lanes wait at these barriers later: made before anything arrives
        if (ring.lane < S::DEPTH && at < all) ring.runs(ring.lane, block, at, min((int)S::SPAN, all - at));
        __syncwarp();
    } else {
#pragma unroll
        for (int s = 0; s < S::DEPTH; s++) {
            if (s * S::SPAN < all) ring.bring(s, block, s * S::SPAN, min((int)S::SPAN, all - s * S::SPAN));
            ring.close();
        }
    }
}

// As `multiply`, by way of a ring that was started with the same row blocks.
template <class F, int R, int T, int M, int HOW>
DEVICE float multiply_ring(const u8 *const (&block)[R], int K, const Columns<T> &x, const u32 *table, u8 *bytes) {
    typedef typename F::Raw Raw;
    typedef Stages<F, R, M> S;
    const int E = Raw::STEPS, P = Raw::BLOCKS, STEP_VALUES = P * F::VALUES;
    int lane = (int)opaque(threadIdx.x & 31), row = lane >> 3, q = lane & 7;
    int blocks = K / F::VALUES, chunks = blocks / (E * P), all = (int)row_block_bytes<F>(K);
    Ring<F, R, M, HOW> ring = {bytes, lane};
    Lanes<R, T> lanes;
    lanes.clear();
#pragma unroll 1
    for (int s = 0, at = 0; at < all; s++, at += S::SPAN) {
        ring.wait(s);
        const u8 *stage = ring.stage(s);
        int c = s * S::CHUNKS, n = min((int)S::CHUNKS, chunks - c);
        auto chunk = [&](int i) {
            Raw now[R];
#pragma unroll
            for (int r = 0; r < R; r++) now[r].template load<true>(stage + r * S::SPAN + i * Raw::CHUNK, row, q);
#pragma unroll
            for (int e = 0; e < E; e++) add_step<F, R, T>(now, e, q, ((c + i) * E + e) * STEP_VALUES, x, table, lanes);
        };
        if (T == 1 && n == S::CHUNKS) {
#pragma unroll
            for (int i = 0; i < S::CHUNKS; i++) chunk(i);
        } else {
#pragma unroll 1
            for (int i = 0; i < n; i++) chunk(i);
        }
        if constexpr (E * P > 1) {
            if (at + S::SPAN >= all) {
                stage += n * Raw::CHUNK;
#pragma unroll 1
                for (int b = chunks * E * P; b < blocks; b += P, stage += Raw::STEP) {
                    int left = min(blocks - b, P);
                    if (q * P / 8 < left) {
                        Raw now[R];
#pragma unroll
                        for (int r = 0; r < R; r++) now[r].template load_last<true>(stage + r * S::SPAN, row, q, left);
                        add_step<F, R, T>(now, 0, q, b * F::VALUES, x, table, lanes);
                    }
                }
            }
        }
        __syncwarp();
        int next = at + S::DEPTH * S::SPAN;
        if (next < all) ring.bring(s + S::DEPTH, block, next, min((int)S::SPAN, all - next));
        ring.close();
    }
    return lanes.template output<F>(q);
}
