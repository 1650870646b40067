// Clusters of CLUSTER blocks that write into each other's shared memory (sm_90 and later). On the CPU the threads of a cluster
// are one block and its shared memory is one piece (Launch.cluster, tests/gpu/run_on_cpu.py).
//
// A kernel is marked CLUSTERED and its grid's x counts blocks, CLUSTER of them a cluster; all its shared memory is one record, its
// room. A block says how many bytes it will be sent at each of its places of arrival (`expect`), all meet once
// (`cluster_meets`), then they send, and each waits for what it gets. A barrier of the cluster in place of that would wait for
// everything a block has written, global memory too. Whoever has got everything may end. Below sm_90 such a kernel is compiled
// but fails: nobody may launch it.
#pragma once
#include "exact.cuh"

#define CLUSTER 4

typedef u64 Arrival;  // in shared memory

#ifdef STRATA_ON_CPU
#define HAS_CLUSTERS 1
#define CLUSTERED
DEVICE u32 cluster_number() { return blockIdx.x; }
DEVICE u32 cluster_rank() { return threadIdx.x / (blockDim.x / CLUSTER); }
DEVICE u32 thread_of_block() { return threadIdx.x % (blockDim.x / CLUSTER); }
DEVICE void expect(Arrival &, u32) {}
DEVICE void cluster_arrives() {}
DEVICE void cluster_meets() { __syncthreads(); }
template <class R>
DEVICE R &room_of(unsigned char *all) { return ((R *)all)[cluster_rank()]; }
template <class R>
DEVICE void send(R &, float4 &place, u32 rank, float4 v, Arrival &) {
    *(float4 *)((u8 *)&place + sizeof(R) * ((i64)rank - cluster_rank())) = v;
}
DEVICE void wait_for(Arrival &) { __syncthreads(); }
#else
DEVICE u32 cluster_number() { return blockIdx.x / CLUSTER; }
DEVICE u32 thread_of_block() { return threadIdx.x; }
template <class R>
DEVICE R &room_of(unsigned char *mine) { return *(R *)mine; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_CLUSTERS 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE u32 cluster_rank() { u32 r; asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(r)); return r; }
// By one thread, before it arrives.
DEVICE void expect(Arrival &arrival, u32 n_bytes) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0],1;\n"
                 "fence.mbarrier_init.release.cluster;\n"
                 "{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state,[%0],%1;}"
                 :: "r"(shared_address(&arrival)), "r"(n_bytes) : "memory");
}
DEVICE void cluster_arrives() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_meets() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// v to what `place` of this block's room is in that of block `rank`.
template <class R>
DEVICE void send(R &, float4 &place, u32 rank, float4 v, Arrival &arrival) {
    u32 at, word;
    asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(at) : "r"(shared_address(&place)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(word) : "r"(shared_address(&arrival)), "r"(rank));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0],{%1,%2,%3,%4},[%5];"
                 :: "r"(at), "r"(bits_of(v.x)), "r"(bits_of(v.y)), "r"(bits_of(v.z)), "r"(bits_of(v.w)), "r"(word) : "memory");
}
DEVICE void wait_for(Arrival &arrival) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done,[%0],0;\n"
                 "@!done bra again;\n}" :: "r"(shared_address(&arrival)) : "memory");
}
#else
#define HAS_CLUSTERS 0
#define CLUSTERED
#endif
#endif
