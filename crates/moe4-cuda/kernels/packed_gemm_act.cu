// `grouped_gemm_act` with weights as packed codes, for few rows an expert; see packed_loop.cuh and epilogue_act.cuh.
//
// blockIdx.x: 128 features, or 256 without an up projection; the other dimensions: which tile of rows.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX, SIGN_MASK, ROWS.
#include "epilogue_act.cuh"
#include "packed_loop.cuh"

constexpr u32 WARP_FEATURES = GATED ? WARP_COLS / 2 : WARP_COLS;
constexpr u32 TILE_FEATURES = WARPS * WARP_FEATURES;
static_assert(NO_WEIGHT_ROW == OUTSIDE, "one value for both");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM)
    packed_gemm_act(const u16* __restrict__ x, const PackedWeights w1, const Scales scales, const Groups groups,
                    const ActOut out) {
    const Tile tile = load_tile(groups, block_in_grid());
    const u32 feature = blockIdx.x * TILE_FEATURES;
    if (tile.expert == NO_TILE || tile.rows == 0) return;
    if (tile.expert == groups.experts) return act_nobody(tile.row, tile.rows, feature, TILE_FEATURES, out);
    const float alpha = product_alpha(scales, tile.expert);
    const Slabs slabs = slabs_of_warp(shared_stages());
    multiply_tile<false>(
        x, w1, tile,
        [&](u32 i) { return fc1_row(i % WARP_COLS, WARP_COLS, feature + i / WARP_COLS * WARP_FEATURES, out.ffn); },
        [&](const float (&sums)[N8][4], const FragmentRows& rows) {
            epilogue_act<N8>(sums, rows, tile.expert, feature + warp() * WARP_FEATURES, alpha,
                             load_row_values(out.prob, rows), out, slabs);
        });
}
