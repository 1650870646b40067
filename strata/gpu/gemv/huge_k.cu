// Products of huge matrices with the formats of k.cuh.
#include "gemv/k.cuh"
#include "gemv/huge.cuh"
