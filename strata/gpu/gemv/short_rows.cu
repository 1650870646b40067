// Down products of experts with short rows.
#include "gemv/small4.cuh"
#include "gemv/short_rows.cuh"
