// partial[tile, col] = the sum of (weight[t] *) x[t, col] over the rows of a tile; x [T, cols] BF16, sums in FP32.
// sum_tiles adds up those of an expert.
//
// A thread takes 8 neighbouring columns of every eighth row; the eight sums of a column are added in order. blockIdx.x:
// 256 columns; the other dimensions: which tile.
//
// Compile-time choice: WEIGHTED.
#include "groups.cuh"

constexpr u32 THREADS = 256;
constexpr u32 VECTORS = 32;                  // of 8 columns, side by side
constexpr u32 ROW_STEP = THREADS / VECTORS;  // rows between two of a thread

extern "C" __global__ void __launch_bounds__(THREADS)
    column_sums(const u16* __restrict__ x, u32 cols, const float* __restrict__ weight, const Groups groups,
                float* __restrict__ partial) {
    __shared__ float sums[ROW_STEP][VECTORS * 8];
    const u32 index = block_in_grid();
    const Tile tile = load_tile(groups, index);
    if (tile.expert >= groups.experts) return;
    const u32 vector = threadIdx.x % VECTORS, first = threadIdx.x / VECTORS;
    const u32 col = (blockIdx.x * VECTORS + vector) * 8;
    float sum[8] = {};
    if (col < cols)
        for (u32 row = first; row < tile.rows; row += ROW_STEP) {
            const uint4 v = *reinterpret_cast<const uint4*>(x + (tile.row + row) * cols + col);
            const u32 w[4] = {v.x, v.y, v.z, v.w};
            const float factor = WEIGHTED ? weight[tile.row + row] : 1.0f;
#pragma unroll
            for (u32 p = 0; p < 4; p++) {
                sum[2 * p] = __fadd_rn(sum[2 * p], WEIGHTED ? __fmul_rn(factor, lower(w[p])) : lower(w[p]));
                sum[2 * p + 1] = __fadd_rn(sum[2 * p + 1], WEIGHTED ? __fmul_rn(factor, upper(w[p])) : upper(w[p]));
            }
        }
#pragma unroll
    for (u32 p = 0; p < 8; p++) sums[first][vector * 8 + p] = sum[p];
    __syncthreads();
    const u32 mine = blockIdx.x * VECTORS * 8 + threadIdx.x;
    if (mine >= cols) return;
    float total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < ROW_STEP; i++) total = __fadd_rn(total, sums[i][threadIdx.x]);
    partial[(u64)index * cols + mine] = total;
}
