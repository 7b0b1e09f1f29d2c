// Maxima of magnitudes: of packed pairs, of a thread block, of an expert.
#pragma once
#include "numerics.cuh"

// Whether a packed maximum holds an infinity.
DEVICE bool has_infinity(u32 pair) { return (pair & 0x7FFF0000u) == 0x7F800000u || (pair & 0x7FFFu) == 0x7F80u; }

// The packed maximum with the finite ones of a pair.
DEVICE u32 max_finite(u32 m, u32 pair) {
    const u32 low = (pair & 0x7FFFu) < 0x7F80u ? pair & 0x7FFFu : 0;
    const u32 high = (pair & 0x7FFF0000u) < 0x7F800000u ? pair & 0x7FFF0000u : 0;
    return max_magnitude(m, low | high);
}

// The packed maximum of the finite ones of a thread's words.
template <u32 COUNT>
DEVICE u32 max_finite(const uint4 (&v)[COUNT]) {
    u32 m = 0;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++)
        m = max_magnitude(max_magnitude(m, max_magnitude(v[i].x, v[i].y)), max_magnitude(v[i].z, v[i].w));
    if (has_infinity(m)) {
        m = 0;
        for (u32 i = 0; i < COUNT; i++)
            m = max_finite(max_finite(max_finite(max_finite(m, v[i].x), v[i].y), v[i].z), v[i].w);
    }
    return m;
}

// The larger half of a packed maximum as the bits of an FP32 number.
DEVICE u32 larger_half(u32 pair) { return max(pair << 16 & 0x7FFF0000u, pair & 0x7FFF0000u); }

// The maximum over the thread block into `out`, by one thread. All threads take part.
DEVICE void reduce_max(u32 value, u32* out) {
    __shared__ u32 largest[32];
    value = __reduce_max_sync(~0u, value);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    value = __reduce_max_sync(~0u, threadIdx.x < blockDim.x / 32 ? largest[threadIdx.x] : 0);
    if (threadIdx.x == 0 && value != 0) atomicMax(out, value);
}
