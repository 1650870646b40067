// Products with the formats of small5.cuh.
#include "gemv/small5.cuh"
#include "gemv/kernels.cuh"
