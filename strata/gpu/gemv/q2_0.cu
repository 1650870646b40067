// Products with the formats of q2_0.cuh.
#include "gemv/q2_0.cuh"
#include "gemv/kernels.cuh"
#include "gemv/spread.cuh"
