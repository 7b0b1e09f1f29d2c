// The largest finite magnitude of each expert's weight: `count` BF16 elements, those of blockIdx.y `stride` elements
// behind those of the expert before. The host clears `amax` before; see group_amax.cu.
#include "reduce.cuh"

constexpr u32 THREADS = 256;
constexpr u32 UNROLL = 8;

extern "C" __global__ void __launch_bounds__(THREADS)
    weights_amax(const u16* __restrict__ w, u64 stride, u64 count, u32* amax) {
    const uint4* const words = reinterpret_cast<const uint4*>(w + blockIdx.y * stride);
    const u64 end = count / 8;  // a multiple of 16 x 16 elements
    u32 m = 0;
    for (u64 first = (u64)blockIdx.x * THREADS * UNROLL; first < end; first += (u64)gridDim.x * THREADS * UNROLL) {
        uint4 v[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) {
            const u64 at = first + threadIdx.x + i * THREADS;
            v[i] = at < end ? __ldcs(words + at) : make_uint4(0, 0, 0, 0);
        }
        m = max_magnitude(m, max_finite(v));
    }
    reduce_max(larger_half(m), amax + blockIdx.y);
}
