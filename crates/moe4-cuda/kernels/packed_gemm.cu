// `grouped_gemm` with weights as packed codes, for few rows an expert; see packed_loop.cuh. Sums have the same bits.
//
// blockIdx.x: 256 columns; the other dimensions: which tile of rows.
//
// Compile-time choices: DGRAD, ROWS.
#include "epilogue.cuh"
#include "packed_loop.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM)
    packed_gemm(const u16* __restrict__ a, const PackedWeights w, const Scales scales, const Groups groups,
                const PlainOut out) {
    const Tile tile = load_tile(groups, block_in_grid());
    const u32 col = blockIdx.x * TILE_COLS;
    if (tile.expert == NO_TILE || tile.rows == 0) return;
    if (tile.expert == groups.experts)
        return store_zeros(out.out, out.cols, tile.row, tile.rows, col, min(col + TILE_COLS, out.cols));
    const float alpha = product_alpha(scales, tile.expert);
    const Slabs slabs = slabs_of_warp(shared_stages());
    multiply_tile<DGRAD>(
        a, w, tile, [&](u32 i) { return col + i < out.cols ? col + i : OUTSIDE; },
        [&](const float (&sums)[N8][4], const FragmentRows& rows) {
            epilogue_plain<N8>(sums, rows, tile.expert, col + warp() * WARP_COLS, alpha, bias_weights(out, rows), out,
                               slabs);
        });
}
