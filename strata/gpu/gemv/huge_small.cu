// Products of huge matrices with Q8_0, IQ4_NL and IQ4_XS.
#include "gemv/iq4_xs.cuh"
#include "gemv/q8_0.cuh"
#include "gemv/small4.cuh"
#include "gemv/huge.cuh"
