// out[t] = the sum of `slices` partial sums [slices, T], in order; zero for rows of nobody, whose partial sums nobody
// wrote.
#include "groups.cuh"

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    sum_slices(const float* __restrict__ partial, u32 slices, u64 rows, const Groups groups, float* __restrict__ out) {
    const u64 live = groups.offsets[groups.experts];
    for (u64 t = (u64)blockIdx.x * THREADS + threadIdx.x; t < rows; t += (u64)gridDim.x * THREADS) {
        float sum = 0.0f;
        if (t < live)
            for (u32 i = 0; i < slices; i++) sum = __fadd_rn(sum, partial[i * rows + t]);
        out[t] = sum;
    }
}
