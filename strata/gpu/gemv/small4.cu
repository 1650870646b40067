// Products with the formats of small4.cuh.
#include "gemv/small4.cuh"
#include "gemv/kernels.cuh"
#include "gemv/spread.cuh"
