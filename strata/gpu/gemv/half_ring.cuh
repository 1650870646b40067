// Chunks of Q4_K or Q5_K on their way to a warp of half_q4.cuh by background copies (from sm_80 on).
//
// In registers only one chunk can be on its way: loads of several share what the warp waits by, so waiting for one would be
// waiting for all. A stage has a warp's half of 16 rows, 64 bytes each, their heads and, of Q5_K, fifth bits of that half.
// Halves of the 64 bytes change places in every second pair of rows, so that the threads of a product meet all banks.
// A block goes from one tile of rows to the next: the first chunks of a tile are on their way while the last one is computed.
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
    Near near;
    const u8 *from[3];
    u32 to[3], codes, head;  // places in a stage: what this thread copies, and what it reads
    u32 coming, last;        // stages: the one that is taken next, the one that was taken last
    int asked, chunks;
    bool heads;              // whether this thread copies heads or fifth bits

    DEVICE HalfRing(u8 *space, int chunks)
        : space(space), near(near_of(space)), coming(0), last((STAGES - 1) * STAGE), asked(0), chunks(chunks) {
        int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        heads = FIFTH || lane < 16;
#pragma unroll
        for (int r = 0; r < 2; r++) to[r] = 64 * (8 * r + g) + 16 * (t ^ (g & 2));
        to[2] = HEADS + 16 * (FIFTH ? lane : lane & 15);
        codes = 64 * g + 32 * (g >> 1 & 1) + 8 * t;
        head = HEADS + 16 * g;
    }
    // The tile that comes next. row_block(i): row block i of the four of its 16 rows; rows g and g + 8 are those of blocks 0, 1
    // and 2, 3.
    template <class B>
    DEVICE void aim(const B &row_block, int h) {
        int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int r = 0; r < 2; r++) from[r] = row_block(2 * r + (g >> 2)) + (128 * (g & 3) + 64 * h + 16 * t);
        // Half of the lanes: heads. The others: fifth bits, which lie behind the codes, 32 bytes a row.
        u32 far = FIFTH && lane >= 16 ? 512 + 32 * (lane & 3) + 16 * h : FAR_HEADS + 16 * (lane & 3);
        from[2] = row_block(lane >> 2 & 3) + far;
        asked = 0;
    }
    // Asks for a chunk, to have it in a stage. next(): aims at the next tile, or false if there is none. Without branches where
    // there is one tile: a warp would wait for each.
    template <class N>
    DEVICE void ask(u32 stage, const N &next) {
        bool more = asked < chunks || next();
#pragma unroll
        for (int i = 0; i < 3; i++) {
            copy16_if(more && (i < 2 || heads), near + (stage + to[i]), from[i]);
            from[i] += F::Raw::CHUNK;
        }
        asked++;
        copy_commit();
    }
    template <class N>
    DEVICE void start(const N &next) {
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) ask(i * STAGE, next);
    }
    // The next chunk; asks for the one that takes the place of the last.
    template <class N>
    DEVICE void take(Raw &raw, const N &next) {
        copy_wait<STAGES - 2>();
        __syncwarp();
        Near stage = near + coming;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            near_get(stage + (head + 128 * r), raw.head[r]);
            near_get(stage + (codes + 512 * r), raw.codes[r][0]);
            near_get(stage + ((codes ^ 32) + 512 * r), raw.codes[r][1]);
            if constexpr (FIFTH) {
                int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
#pragma unroll
                for (int k = 0; k < 2; k++)
                    raw.fifth[r][k] = near_word(stage + (FIFTHS + 16 * (8 * r + g) + 4 * (t >> 1) + 8 * k)) >> 2 * (t & 1);
            }
        }
        ask(last, next);
        last = coming;
        coming = coming + STAGE == BYTES ? 0 : coming + STAGE;
    }
    // The stage that was taken last, of this warp or of one so far away.
    DEVICE u8 *taken(int warps = 0) const { return space + (warps * (int)BYTES + (int)last); }
};

// Sums of the pair's 16 rows of a tile and up to four columns, which are at `at`: y of row g + 8h, columns 2 (t mod 2) and the
// next one, for end(y) between two barriers. All threads of a block come here. next: of HalfRing::ask.
template <class F, class N, class E>
DEVICE void half_tile(HalfRing<F> &ring, HalfPlace at, int h, HalfOperands &b, const N &next, const E &end) {
    static_assert(HalfSums::TRADED <= HalfRing<F>::STAGE, "sums go by way of a stage");
    HalfSums all;
    all.clear();
#pragma unroll 1
    for (int c = 0; c < ring.chunks; c++) {
        typename HalfRing<F>::Raw raw;
        ring.take(raw, next);
        half_terms(raw, at, h, b, all);
        at.next();
    }
    __syncwarp();
    all.give(h, ring.taken());
    __syncthreads();
    float y[2];
    all.rows(h, ring.taken(h ? -1 : 1), y);
    end(y);
    __syncthreads();
}
