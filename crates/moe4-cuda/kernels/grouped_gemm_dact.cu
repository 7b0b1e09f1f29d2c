// FC2's dgrad with the activation's backward: dh = alpha * dy * W2[e], and from it and the saved c what
// epilogue_dact.cuh says.
//
//   dy [T, H], W2[e] [H, F]
//
// blockIdx.x: 128 features; the other dimensions: which tile of rows.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX (of dc), SIGN_MASK, H_AGAIN.
#include "epilogue_dact.cuh"
#include "mma_loop.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_gemm_dact(const u16* __restrict__ dy, const Weights w2, u32 hidden, const Scales scales,
                      const Groups groups, const DactOut out) {
    const Tile tile = load_tile(groups, block_in_grid());
    const u32 feature = blockIdx.x * TILE_COLS;
    if (tile.expert == NO_TILE || tile.rows == 0) return;
    if (tile.expert == groups.experts) return dact_nobody(tile.row, tile.rows, feature, TILE_COLS, out);
    Accumulators acc = {};
    multiply(acc, tile_rows(dy, hidden, tile),
             Side<false>(w2.of(tile.expert), out.ffn, hidden,
                         [&](u32 i) { return feature + i < out.ffn ? feature + i : OUTSIDE; }),
             hidden);
    const float alpha = product_alpha(scales, tile.expert);
    const Slabs slabs = slabs_of_warp(shared_stages());
    const u32 first = feature + warp_slice() * WARP_COLS;
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS; m++) {
        const FragmentRows rows = fragment_rows(tile.row, tile.rows, warp_row() + m * FRAGMENT_ROWS);
        epilogue_dact<N8>(acc[m], rows, tile.expert, first, alpha, load_row_values(out.prob, rows),
                          load_features(out.c, rows, first, out.ffn), out, slabs);
    }
}
