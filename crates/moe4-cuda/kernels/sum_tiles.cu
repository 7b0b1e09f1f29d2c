// out[e, col] = the sum of partial[tile, col] over the tiles of expert e, in order; zero for an expert without rows.
// blockIdx.x: 256 columns, blockIdx.y: the expert.
#include "groups.cuh"

constexpr u32 THREADS = 256;

DEVICE u32 tiles_of(const Groups& groups, u32 expert) {
    return (u32)((groups.offsets[expert + 1] - groups.offsets[expert] + TILE_ROWS - 1) / TILE_ROWS);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sum_tiles(const float* __restrict__ partial, u32 cols, const Groups groups, float* __restrict__ out) {
    __shared__ u32 first;
    const u32 expert = blockIdx.y;
    if (threadIdx.x == 0) first = 0;
    __syncthreads();
    u32 before = 0;
    for (u32 e = threadIdx.x; e < expert; e += THREADS) before += tiles_of(groups, e);
    before = __reduce_add_sync(~0u, before);
    if (threadIdx.x % 32 == 0) atomicAdd(&first, before);
    __syncthreads();
    const u32 col = blockIdx.x * THREADS + threadIdx.x, count = tiles_of(groups, expert);
    if (col >= cols) return;
    float sum = 0.0f;
    for (u32 i = 0; i < count; i++) sum = __fadd_rn(sum, partial[(u64)(first + i) * cols + col]);
    out[(u64)expert * cols + col] = sum;
}
