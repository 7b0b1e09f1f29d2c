// Addresses that a launch carries, into device memory: tensors of experts that lie anywhere. A graph that records the
// launch records them.
#include "numerics.cuh"

constexpr u32 MOST = 256;

struct Addresses {
    u64 of[MOST];
};

extern "C" __global__ void __launch_bounds__(MOST)
    addresses(const __grid_constant__ Addresses given, u32 count, u64* __restrict__ table) {
    if (threadIdx.x < count) table[threadIdx.x] = given.of[threadIdx.x];
}
