// One expert's weight [n, k] BF16 in tiles of 16 x 16, nearest, under an amax that `weights_amax` left.
//
//   codes [n, k/2], scales [n, k/16]: a tile's scale repeated over its 16 rows
//
// blockIdx.z is the expert, of those whose weights lie `stride` elements apart.
//
// Compile-time choices: UNPACKED (also code times block scale in BF16).
#include "quantize_weights.cuh"

constexpr int FORM = PACKED | (UNPACKED ? VALUES : 0);
constexpr u32 THREADS = 256;
constexpr u32 TILES = THREADS / 32 * WARP_TILES;  // of a thread block, side by side

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_weights(const u16* __restrict__ w, u64 stride, u32 n, u32 k, const float* __restrict__ amax, Out out) {
    const u32 expert = blockIdx.z, blocks = k / BLOCK;
    __shared__ Scaling scaling;
    if (threadIdx.x < 128) scaling.fill(threadIdx.x, amax[expert], false, false);
    __syncthreads();
    const u32 first_block = blockIdx.x * TILES + threadIdx.x / 32 * WARP_TILES;
    TileRows rows(blockIdx.y, first_block, first_block + threadIdx.x % WARP_TILES < blocks);
    rows.load(w, expert * stride, k);
    rows.store<FORM, false>(scaling, rows.amax_bits(), out, (u64)expert * n, blocks);
}
