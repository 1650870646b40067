// The doorbell: where every routed entry of a layer is computed, the request to the CPU, and the wait for its sums.
#include "early.cuh"

// Decisions, words of the mailbox, of control and work areas and of stamps: base/doorbell.py and doorbell.py say the same.
#define CPU 0
#define HIT 1
#define LINK 2

struct Mail {  // byte offsets in the mailbox
    static const int REQUEST = 0, REPLY = 128, STATUS = 136, HEADER = 384;
};
enum { LAYER, ROWS, CPU_ENTRIES, LINK_EXPERTS, HIT_ENTRIES, MISSES, HEADER_WORDS };
enum { COUNTER, LIMIT_NS, SHARE, STAGING };       // control: i64
enum { RANG, STAGED, CPU_ROWS, EXPERTS };         // work: int; from EXPERTS on those that come over the link
enum { BEGAN, POSTED, HITS_END, LINK_END, WAIT_END, JOINED, N_ROWS, N_CPU, N_HIT, N_LINK, N_CPU_EXPERTS, N_LINK_EXPERTS };

// Where entries of one layer are computed, and the request to the CPU if it has a share. One block; T K <= 1024.
//
// slots (E, 3): address of the matrices in device memory, 0 if not there. raws (E, 3) or null: where the device reads
// them over the link, 0 if it cannot. Distinct experts in the order of entries; of `n` that no slot has, the last
// (n + 1) SHARE / 256 (at most n and STAGING) go over the link: with a share by which both sides would end together, each
// expert then goes where it ends earlier. staged (E, 3) gets their places: number s of them at staging + s blob_bytes, up
// and down up_at and down_at behind. jobs: lists of products (gemv/kernels.cuh) for hits, and `n_jobs` words behind for
// the link, with up to `columns` entries a job. With an error in the window nothing is asked for: all misses count as the
// CPU's, and nobody rings. log (T, K) or null: gets the ids, for whoever counts them.
STARTS_EARLY KERNEL(1024) post(const int *ids, const float *weights, const uint4 *x, const u64 *slots, const u64 *raws,
                  i64 *control, int *work, u8 *decisions, u64 *staged, int *jobs, int n_jobs, int columns,
                  u64 staging, i64 blob_bytes, i64 up_at, i64 down_at, u8 *mailbox, int ids_at, int weights_at, int decisions_at, int x_at, int T, int K, int D,
                  int layer, const u64 *error, i64 *stamps, int *log) {
    let_next_start();
    wait_for_inputs();
    __shared__ uint4 all_ids[256], all_weights[256], all_decisions[64];
    __shared__ int found[32], sums[4], listed[2];
    int *own_ids = (int *)all_ids;
    u8 *own = (u8 *)all_decisions;
    int tid = threadIdx.x, n = T * K, values = T * D / 4, lane = tid & 31;
    bool here = tid < n, failed = *error != ~0ull;
    uint4 row = {0, 0, 0, 0};
    if (tid < values) row = x[tid];  // under way while the decisions are made
    int e = here ? ids[tid] : -1;
    u64 slot = here ? slots[3 * (i64)e] : 0, raw = here && raws ? raws[3 * (i64)e] : 0;
    i64 share = control[SHARE], room = control[STAGING];
    if (tid == 0) stamps[BEGAN] = clock_ns();
    if (here && log) log[tid] = e;
    own_ids[tid] = e;
    ((float *)all_weights)[tid] = here ? weights[tid] : 0.f;
    if (tid < 4) sums[tid] = 0;
    if (tid < 2) listed[tid] = 0;
    __syncthreads();
    int first = tid, earlier = 0;  // entries of the same expert
    if (here && T > 1)
#pragma unroll 4
        for (int j = tid - 1; j >= 0; j--)
            if (own_ids[j] == e) {
                first = j;
                earlier++;
            }
    bool miss = here && first == tid && !slot;
    u32 misses = __ballot_sync(0xffffffffu, miss);
    if (lane == 0) found[tid >> 5] = __popc(misses);
    __syncthreads();
    int rank = __popc(misses & ((1u << lane) - 1)), total = 0;
#pragma unroll 1
    for (int w = 0; w < (n + 31) / 32; w++) {
        if (w < tid >> 5) rank += found[w];
        total += found[w];
    }
    i64 linked = (total + 1) * share >> 8;
    linked = linked < room ? linked : room;
    linked = linked < total ? linked : total;
    if (!raws || failed) linked = 0;
    int place = rank - (total - (int)linked);
    bool link = miss && place >= 0 && raw;
    own[tid] = !here ? HIT : slot ? HIT : link ? LINK : CPU;
    if (miss && place >= 0) work[EXPERTS + place] = link ? e : -1;
    if (link) {
        u64 at = staging + place * blob_bytes;
        u64 *to = staged + 3 * (i64)e;
        to[0] = at;
        to[1] = at + up_at;
        to[2] = at + down_at;
    }
    __syncthreads();
    int decision = own[first];
    __syncthreads();
    own[tid] = decision;
    u32 cpu = __ballot_sync(0xffffffffu, here && decision == CPU), hit = __ballot_sync(0xffffffffu, here && slot);
    u32 links = __ballot_sync(0xffffffffu, link);
    if (lane == 0) {
        atomicAdd(&sums[0], __popc(cpu));
        atomicAdd(&sums[1], __popc(hit));
        atomicAdd(&sums[2], __popc(links));
    }
    if (here) decisions[tid] = decision;
    if (here && decision != CPU && earlier % columns == 0) {
        int list = decision == LINK;
        jobs[list * n_jobs + 1 + atomicAdd(&listed[list], 1)] = first | earlier << 16;
    }
    if (here && decision == CPU) atomicOr(&sums[3], 1 << (tid / K));
    __syncthreads();
    bool rings = sums[0] && !failed;
    if (rings) {
        uint4 *to_x = (uint4 *)(mailbox + x_at);
        if (tid < values) to_x[tid] = row;
        for (int i = tid + 1024; i < values; i += 1024) to_x[i] = x[i];
        if (tid < (n + 3) / 4) {
            ((uint4 *)(mailbox + ids_at))[tid] = all_ids[tid];
            ((uint4 *)(mailbox + weights_at))[tid] = all_weights[tid];
        }
        if (tid < (n + 15) / 16) ((uint4 *)(mailbox + decisions_at))[tid] = all_decisions[tid];
        if (tid < HEADER_WORDS) {
            i64 word = tid == LAYER ? layer : tid == ROWS ? T : tid == CPU_ENTRIES ? sums[0]
                     : tid == LINK_EXPERTS ? sums[2] : tid == HIT_ENTRIES ? sums[1] : total;
            ((i64 *)(mailbox + Mail::HEADER))[tid] = word;
        }
    }
    __syncthreads();
    if (tid) return;
    if (rings) {
        __threadfence_system();
        store_release((i64 *)(mailbox + Mail::REQUEST), ++control[COUNTER]);
    }
    jobs[0] = listed[0];
    jobs[n_jobs] = listed[1];
    work[RANG] = rings;
    work[STAGED] = (int)linked;
    work[CPU_ROWS] = sums[3];
    stamps[POSTED] = clock_ns();
    stamps[N_ROWS] = T;
    stamps[N_CPU] = sums[0];
    stamps[N_HIT] = sums[1];
    stamps[N_LINK] = n - sums[0] - sums[1];
    stamps[N_CPU_EXPERTS] = total - sums[2];
    stamps[N_LINK_EXPERTS] = sums[2];
}

// Waits for the reply to the last request; false if there is none within the limit.
DEVICE bool reply_came(const i64 *control, const u8 *mailbox) {
    const i64 *reply = (const i64 *)(mailbox + Mail::REPLY);
    i64 number = control[COUNTER], limit = control[LIMIT_NS];
    u64 start = clock_ns();
    while (load_acquire(reply) < number) {
        if ((i64)(clock_ns() - start) > limit) return false;
        between_polls();
    }
    return true;
}

// Waits for the reply to this layer's request, if there is one, and copies the sums (T, D) of rows with a share of the
// CPU from the mailbox into `sums` (null: who wants them reads the mailbox). Without a reply they become zeros. One block;
// one thread polls.
STARTS_EARLY KERNEL(1024) wait_reply(const i64 *control, const int *work, const u8 *mailbox, int sums_at, uint4 *sums, int T, int D, u64 *error,
                  u64 where, i64 *stamps) {
    let_next_start();
    wait_for_inputs();
    __shared__ int answered;
    bool rang = work[RANG];
    if (threadIdx.x == 0) {
        answered = rang && reply_came(control, mailbox);
        if (rang && !answered) report(error, where, EXPERTS_TIMEOUT, (u32)(control[LIMIT_NS] / 1000000));
    }
    __syncthreads();
    i64 status = 0;
    if (threadIdx.x == 0 && answered) status = load_volatile((const i64 *)(mailbox + Mail::STATUS));
    u32 rows = work[CPU_ROWS];
    if (sums && rows) {
        const uint4 *from = (const uint4 *)(mailbox + sums_at);
        int n = D / 2, whole = __popc(rows) * n;
        uint4 zero = {0, 0, 0, 0};
        for (int i = threadIdx.x; i < whole; i += 4096) {
            uint4 v[4];
            int at[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int j = i + 1024 * k, skip = j / n;
                u32 left = rows;
                for (; skip > 0; skip--) left &= left - 1;
                at[k] = j < whole ? (__ffs((int)left) - 1) * n + j % n : -1;
                v[k] = at[k] >= 0 && answered ? load_volatile(from + at[k]) : zero;
            }
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (at[k] >= 0) sums[at[k]] = v[k];
        }
    }
    if (threadIdx.x) return;
    if (status) report(error, where, (u32)(status & 255), (u32)(status >> 8));
    stamps[WAIT_END] = clock_ns();
}

// The time, for the end of a branch.
KERNEL(32) stamp(i64 *at) {
    if (threadIdx.x == 0) *at = clock_ns();
}
