// The BF16 values of packed codes under their block scales in the plain layout: code * f32(scale), exact. The global
// scale is left out. A NaN scale gives NaN. A thread takes a block of 16.
#include "output.cuh"

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    unpack(const uint2* __restrict__ codes, const u8* __restrict__ scales, u64 blocks, uint4* __restrict__ values) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < blocks; i += (u64)gridDim.x * THREADS) {
        const uint2 c = __ldcs(codes + i);
        const u32 scale = scales[i];
        store_unpacked(values + i * 2, {c.x, c.y}, (scale & 0x7F) == E4M3_NAN ? E4M3_NAN : scale);
    }
}
