// Products with the formats of grids.cuh.
#include "gemv/grids.cuh"
#include "gemv/kernels.cuh"
