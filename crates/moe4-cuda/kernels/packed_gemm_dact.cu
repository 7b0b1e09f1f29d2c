// `grouped_gemm_dact` with weights as packed codes, for few rows an expert; see packed_loop.cuh and epilogue_dact.cuh.
//
// blockIdx.x: 256 features; the other dimensions: which tile of rows.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX, SIGN_MASK, H_AGAIN, ROWS.
#include "epilogue_dact.cuh"
#include "packed_loop.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM)
    packed_gemm_dact(const u16* __restrict__ dy, const PackedWeights w2, const Scales scales, const Groups groups,
                     const DactOut out) {
    const Tile tile = load_tile(groups, block_in_grid());
    const u32 feature = blockIdx.x * TILE_COLS;
    if (tile.expert == NO_TILE || tile.rows == 0) return;
    if (tile.expert == groups.experts) return dact_nobody(tile.row, tile.rows, feature, TILE_COLS, out);
    const float alpha = product_alpha(scales, tile.expert);
    const Slabs slabs = slabs_of_warp(shared_stages());
    const u32 first = feature + warp() * WARP_COLS;
    multiply_tile<true>(
        dy, w2, tile, [&](u32 i) { return feature + i < out.ffn ? feature + i : OUTSIDE; },
        [&](const float (&sums)[N8][4], const FragmentRows& rows) {
            epilogue_dact<N8>(sums, rows, tile.expert, first, alpha, load_row_values(out.prob, rows),
                              load_features(out.c, rows, first, out.ffn), out, slabs);
        });
}
