// FC1 with its activation: c = bf16(alpha * x * W1[e]^T + b1), h = bf16(act(c) * prob), and h's amaxes.
//
//   x [T, H], W1[e] [N1, H], c [T, N1], h [T, F]
//
// A tile of 128 columns holds gates and ups of the same features: its rows of W1 are picked accordingly, see glu.cuh.
// blockIdx.x: 64 features, or 128 without an up projection; the other dimensions: which tile of rows.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX (of h), SIGN_MASK.
#include "epilogue_act.cuh"
#include "mma_loop.cuh"

constexpr u32 WARP_FEATURES = GATED ? WARP_COLS / 2 : WARP_COLS;
constexpr u32 TILE_FEATURES = GATED ? TILE_COLS / 2 : TILE_COLS;
static_assert(NO_WEIGHT_ROW == OUTSIDE, "one value for both");

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_gemm_act(const u16* __restrict__ x, const Weights w1, u32 hidden, const Scales scales, const Groups groups,
                     const ActOut out) {
    const Tile tile = load_tile(groups, block_in_grid());
    const u32 feature = blockIdx.x * TILE_FEATURES;
    if (tile.expert == NO_TILE || tile.rows == 0) return;
    if (tile.expert == groups.experts) return act_nobody(tile.row, tile.rows, feature, TILE_FEATURES, out);
    Accumulators acc = {};
    multiply(acc, tile_rows(x, hidden, tile),
             Side<true>(w1.of(tile.expert), hidden, hidden,
                        [&](u32 i) {
                            const u32 of_warp = feature + i / WARP_COLS * WARP_FEATURES;
                            return fc1_row(i % WARP_COLS, WARP_COLS, of_warp, out.ffn);
                        }),
             hidden);
    const float alpha = product_alpha(scales, tile.expert);
    const Slabs slabs = slabs_of_warp(shared_stages());
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS; m++) {
        const FragmentRows rows = fragment_rows(tile.row, tile.rows, warp_row() + m * FRAGMENT_ROWS);
        epilogue_act<N8>(acc[m], rows, tile.expert, feature + warp_slice() * WARP_FEATURES, alpha,
                         load_row_values(out.prob, rows), out, slabs);
    }
}
