// Expansion of the grid formats.
#include "gemm/expand.cuh"
#include "gemv/grids.cuh"

// Thread q has the 32 values of sub-block q, with one scale or one for each half.
template <class F, int G_>
struct OfRuns {
    enum { G = G_, MIN = 0 };
    DEVICE static void put(const typename F::Raw &, const typename F::Step &s, int, int q, const Spread &to) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) to.sixteen(32 * q + 4 * i, s.w[i], s.w[i + 1], s.w[i + 2], s.w[i + 3]);
#pragma unroll
        for (int i = 0; i < 32 / G; i++) to.scale(32 / G * q + i, s.d[i]);
    }
};
template <> struct Parts<IQ2_XXS> : OfRuns<IQ2_XXS, 32> {};
template <> struct Parts<IQ2_XS> : OfRuns<IQ2_XS, 16> {};
template <> struct Parts<IQ2_S> : OfRuns<IQ2_S, 16> {};
template <> struct Parts<IQ3_XXS> : OfRuns<IQ3_XXS, 32> {};
template <> struct Parts<IQ3_S> : OfRuns<IQ3_S, 32> {};
template <> struct Parts<IQ1_S> : OfRuns<IQ1_S, 32> {};
template <> struct Parts<IQ1_M> : OfRuns<IQ1_M, 16> {};
