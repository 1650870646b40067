// Router: the K largest logits of a row and the softmax over them (choose.cuh). One warp a row.
#include "choose.cuh"
#include "early.cuh"

// EACH: as choose.cuh has it.
template <int EACH>
STARTS_EARLY KERNEL(32) router(const float *logits, int *ids, float *weights, int E, int K, float scale, u64 *error, u64 where) {
    __shared__ ChoiceRoom room;
    let_next_start();
    wait_for_inputs();
    choose<EACH>(logits, ids, weights, E, K, scale, blockIdx.x, room, error, where);
}
