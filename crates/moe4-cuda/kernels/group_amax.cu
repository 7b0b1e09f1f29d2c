// Per-expert max of finite absolute values of [T, cols] BF16.
//
// The rows of a tile are one run of memory, which `gridDim.x` thread blocks share. Bit patterns of magnitudes order
// like the magnitudes themselves, so the expert's result is an integer maximum: atomic, and the same in any order. The
// host clears `amax` before.
#include "groups.cuh"
#include "reduce.cuh"

constexpr u32 THREADS = 256;
constexpr u32 UNROLL = 8;
constexpr u32 CHUNK = THREADS * UNROLL;  // 16-byte words

extern "C" __global__ void __launch_bounds__(THREADS)
    group_amax(const u16* __restrict__ x, u64 cols, const Groups groups, u32* amax) {
    const Tile tile = load_tile(groups, block_in_grid());
    if (tile.expert >= groups.experts) return;
    const u16 *const begin = x + tile.row * cols, *const end = begin + tile.rows * cols;
    // Whole 16-byte words in the middle; what is left before and behind them goes element by element.
    const u64 lead = min((u64)(end - begin), (u64)(-(long long)((u64)begin / 2) & 7));
    const uint4* const words = reinterpret_cast<const uint4*>(begin + lead);
    const u64 count = (end - begin - lead) / 8;
    u32 m = 0;
    for (u64 chunk = (u64)blockIdx.x * CHUNK; chunk < count; chunk += (u64)gridDim.x * CHUNK) {
        uint4 w[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) {
            const u64 at = chunk + threadIdx.x + i * THREADS;
            w[i] = at < count ? __ldcs(words + at) : make_uint4(0, 0, 0, 0);
        }
        u32 here = 0;
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++)
            here = max_magnitude(max_magnitude(here, max_magnitude(w[i].x, w[i].y)), max_magnitude(w[i].z, w[i].w));
        if (has_infinity(here)) {
            here = 0;
#pragma unroll 1
            for (u32 i = 0; i < UNROLL; i++) {
                const u64 at = chunk + threadIdx.x + i * THREADS;
                const uint4 v = at < count ? words[at] : make_uint4(0, 0, 0, 0);
                here = max_finite(max_finite(max_finite(max_finite(here, v.x), v.y), v.z), v.w);
            }
        }
        m = max_magnitude(m, here);
    }
    if (blockIdx.x == 0) {
        const u64 behind = lead + count * 8;
        for (u64 i = threadIdx.x; i < lead; i += THREADS) m = max_finite(m, begin[i]);
        for (u64 i = behind + threadIdx.x; i < (u64)(end - begin); i += THREADS) m = max_finite(m, begin[i]);
    }
    reduce_max(larger_half(m), amax + tile.expert);
}
