// Products with the formats of k.cuh.
#include "gemv/k.cuh"
#include "gemv/kernels.cuh"
#include "gemv/spread.cuh"
