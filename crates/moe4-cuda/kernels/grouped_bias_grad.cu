// dprob[t] += the sum of b2[e, j] * dy[t, j] over j, for the rows of each expert e; dy [T, cols] BF16. db2 is what
// column_sums and sum_tiles make of it.
//
// A warp takes a row, and each lane every 32nd group of 8 columns; lanes are added by halves. blockIdx.x: which share
// of a tile's rows; the other dimensions: which tile.
#include "groups.cuh"

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    grouped_bias_grad(const u16* __restrict__ dy, u32 cols, const float* __restrict__ b2, const Groups groups,
                      float* dprob) {
    const Tile tile = load_tile(groups, block_in_grid());
    if (tile.expert >= groups.experts) return;
    const u32 lane = threadIdx.x % 32;
    const float* const bias = b2 + (u64)tile.expert * cols;
    for (u32 row = blockIdx.x * WARPS + threadIdx.x / 32; row < tile.rows; row += gridDim.x * WARPS) {
        const u16* const from = dy + (tile.row + row) * cols;
        float sum = 0.0f;
        for (u32 col = lane * 8; col < cols; col += 32 * 8) {
            const uint4 v = *reinterpret_cast<const uint4*>(from + col);
            const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 p = 0; p < 4; p++) {
                sum = __fadd_rn(sum, __fmul_rn(bias[col + 2 * p], lower(w[p])));
                sum = __fadd_rn(sum, __fmul_rn(bias[col + 2 * p + 1], upper(w[p])));
            }
        }
#pragma unroll
        for (u32 step = 16; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
        if (lane == 0) dprob[tile.row + row] = __fadd_rn(dprob[tile.row + row], sum);
    }
}
