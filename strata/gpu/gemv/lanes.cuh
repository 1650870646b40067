// Sums of a format's sixteen lanes in the eight threads of a row, and how they come to an end.
#pragma once
#include "sums.cuh"

// Which output of R row blocks and T columns thread q of a row has in the end: row `r` of its R, column `t`. Neighbours have
// the same one where there are fewer than eight; `first` in one of them.
template <int R, int T>
struct Own {
    static_assert(8 % (R * T) == 0, "outputs are shared out to eight threads");
    enum { SAME = 8 / (R * T) };
    int r, t;
    bool first;
    DEVICE Own(int q) : r(q / (SAME * T)), t(q / SAME % T), first(q % SAME == 0) {}
};

template <int R, int T>
struct Lanes {
    float v[R][T][2], m[T];

    DEVICE void clear() {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int t = 0; t < T; t++) v[r][t][0] = v[r][t][1] = m[t] = 0.f;
    }
    // Halves the distances between threads from `half` down to `last`. Of n sums threads keep half and trade the others; a
    // single one all threads of a pair keep.
    template <int N>
    DEVICE static void join(int q, int half, int last, float (&sum)[N]) {
#pragma unroll
        for (int n = N; half >= last; half >>= 1, n >>= 1) {
            bool upper = q & half;
            if (n > 1) {
#pragma unroll
                for (int i = 0; i < N / 2; i++)
                    if (i < n / 2) {
                        float traded = upper ? sum[i] : sum[i + n / 2];
                        sum[i] = add32(upper ? sum[i + n / 2] : sum[i], __shfl_xor_sync(ALL_LANES, traded, half));
                    }
            } else {
                sum[0] = add32(sum[0], __shfl_xor_sync(ALL_LANES, sum[0], half));
            }
        }
    }
    // The fixed tree over 16 lanes: distances 8, 4 and 2 join threads, 1 the two lanes of a thread. Thread q of a row ends with
    // the output that Own names.
    template <class F>
    DEVICE float output(int q) {
        float lanes[2][R * T];
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int i = 0; i < R * T; i++) lanes[j][i] = v[i / T][i % T][j];
            join<R * T>(q, 4, 1, lanes[j]);
        }
        float sum = add32(lanes[0][0], lanes[1][0]);
        if constexpr (F::MINIMUM != 0) {
            static_assert(R == 2, "minima are shared out to two rows");
            join<T>(q, 4, 2, m);  // thread 8 / T * t + r has those of row r and column t
            Own<R, T> own(q);
            float least = __shfl_sync(ALL_LANES, m[0], (threadIdx.x & 24) + 8 / T * own.t + own.r);
            sum = F::MINIMUM > 0 ? add32(sum, least) : sub32(sum, least);
        }
        return add32(sum, 0.f);
    }
};
