// Chunks of Q4_K or Q5_K on their way to a warp of half_q4.cuh by background copies (from sm_80 on).
//
// In registers only one chunk can be on its way: loads of several share what the warp waits by, so waiting for one would be
// waiting for all. A stage has a warp's half of 16 rows, 64 bytes each, their heads and, of Q5_K, fifth bits of that half.
// Halves of the 64 bytes change places in every second pair of rows, so that the threads of a product meet all banks.
#pragma once
#include "gemv/half_q5.cuh"

#ifndef HALF_STAGES  // tests have both
#if defined(STRATA_ON_CPU) || AMPERE
#define HALF_STAGES 4
#else
#define HALF_STAGES 2  // Turing has no background copies, and no room
#endif
#endif

template <class F>
struct HalfRing {
    typedef typename HalfRawOf<F>::Type Raw;
    static const bool FIFTH = F::Raw::CHUNK != Q4_K::Raw::CHUNK;
    enum {
        STAGES = HALF_STAGES, HEADS = 16 * 64, FIFTHS = HEADS + 256, STAGE = FIFTHS + (FIFTH ? 256 : 0),
        BYTES = STAGES * STAGE, FAR_HEADS = F::Raw::CHUNK - 64  // of a chunk in memory
    };
    u8 *space;  // of the warp
    const u8 *from[3];
    u32 to[3], codes, head;  // places in a stage: what this thread copies, and what it reads
    int asked, slot, chunks;

    // row_block(i): row block i of the four of the 16 rows; rows g and g + 8 are those of blocks 0, 1 and 2, 3.
    template <class B>
    DEVICE HalfRing(u8 *space, const B &row_block, int h, int chunks) : space(space), asked(0), slot(0), chunks(chunks) {
        int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = 8 * r + g;
            from[r] = row_block(row >> 2) + (128 * (row & 3) + 64 * h + 16 * t);
            to[r] = 64 * row + 16 * (t ^ (row & 2));
        }
        // Half of the lanes: heads. The others: fifth bits, which lie behind the codes, 32 bytes a row.
        if constexpr (FIFTH) {
            from[2] = row_block(lane >> 2 & 3) + (lane < 16 ? FAR_HEADS + 16 * (lane & 3) : 512 + 32 * (lane & 3) + 16 * h);
            to[2] = HEADS + 16 * lane;
        } else {
            from[2] = row_block(lane >> 2 & 3) + (FAR_HEADS + 16 * (lane & 3));
            to[2] = HEADS + 16 * (lane & 15);
        }
        codes = 64 * g + 32 * (g >> 1 & 1) + 8 * t;
        head = HEADS + 16 * g;
    }
    DEVICE void ask() {
        if (asked < chunks) {
            u8 *stage = space + asked % STAGES * STAGE;
            u32 far = asked * F::Raw::CHUNK;
            copy<16>(stage + to[0], from[0] + far);
            copy<16>(stage + to[1], from[1] + far);
            if (FIFTH || (threadIdx.x & 31) < 16) copy<16>(stage + to[2], from[2] + far);
        }
        asked++;
        copy_commit();
    }
    DEVICE void start() {
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) ask();
    }
    // The next chunk; asks for the one that takes the place of the last.
    DEVICE void take(Raw &raw) {
        copy_wait<STAGES - 2>();
        __syncwarp();
        const u8 *stage = space + slot * STAGE;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            fetch<16, true>(stage + head + 128 * r, raw.head[r]);
            fetch<8, true>(stage + codes + 512 * r, raw.codes[r][0]);
            fetch<8, true>(stage + (codes ^ 32) + 512 * r, raw.codes[r][1]);
            if constexpr (FIFTH) {
                int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
#pragma unroll
                for (int k = 0; k < 2; k++)
                    raw.fifth[r][k] =
                        *(const u32 *)(stage + FIFTHS + 16 * (8 * r + g) + 4 * (t >> 1) + 8 * k) >> 2 * (t & 1);
            }
        }
        ask();
    }
};

// Sums of a warp's eight lanes, of 16 rows and `columns` <= 4 columns, which HalfColumns{space} has. All threads of a block come
// here, and what space had is gone then: the sums of warps h = 1 are there, for HalfSums::rows of the others.
template <class F>
DEVICE const float *half_sums(HalfRing<F> &ring, u8 *space, int columns, int chunks, HalfSums &all) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = warp >> 1, h = warp & 1, g = lane >> 2;
    HalfPlace at(space, h, min(g & 3, columns - 1));
    all.clear();
    HalfOperands b(h);
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
        typename HalfRing<F>::Raw raw;
        ring.take(raw);
        half_terms(raw, at, h, b, all);
        at.next();
    }
    float *traded = (float *)space + HalfSums::FLOATS * 32 * pair;
    __syncthreads();
    if (h) all.give(traded);
    __syncthreads();
    return traded;
}
