// Products with the formats of q8_0.cuh.
#include "gemv/q8_0.cuh"
#include "gemv/kernels.cuh"
#include "gemv/spread.cuh"
