// Products with the formats of iq4_xs.cuh.
#include "gemv/iq4_xs.cuh"
#include "gemv/kernels.cuh"
#include "gemv/spread.cuh"
