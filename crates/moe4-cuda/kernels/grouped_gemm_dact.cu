// FC2's dgrad with the activation's backward: dh = alpha * dy * W2[e], and from it and the saved c what
// epilogue_dact.cuh says.
//
//   dy [T, H], W2[e] [H, F]
//
// blockIdx.x: 128 features, which are two slices of dprob; the other dimensions: which tile of rows.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX (of dc).
#include "epilogue_dact.cuh"
#include "mma_loop.cuh"

DEVICE void fill_with_zeros(const Tile& tile, u32 feature, const DactOut& out) {
    const u32 features = min(TILE_COLS, out.ffn - feature);
    const u64 n1 = fc1_columns(out.ffn);
    const u32 col = first_columns(feature, out.ffn).first, cols = GATED && LAYOUT != HALVES ? 2 * features : features;
    store_zeros(out.dc, n1, tile.row, tile.rows, col, col + cols);
    if (GATED && LAYOUT == HALVES)
        store_zeros(out.dc, n1, tile.row, tile.rows, out.ffn + feature, out.ffn + feature + features);
    if (out.h) store_zeros(out.h, out.ffn, tile.row, tile.rows, feature, feature + features);
    if (out.dh)
        store_zeros(reinterpret_cast<u16*>(out.dh), 2 * out.ffn, tile.row, tile.rows, 2 * feature,
                    2 * (feature + features));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_gemm_dact(const u16* __restrict__ dy, const Weights w2, u32 hidden, const Scales scales,
                      const Groups groups, const DactOut out) {
    const Tile tile = load_tile(groups, block_in_grid());
    const u32 feature = blockIdx.x * TILE_COLS;
    if (tile.expert == NO_TILE || tile.rows == 0) return;
    if (tile.expert == groups.experts) return fill_with_zeros(tile, feature, out);
    Accumulators acc = {};
    multiply(acc, tile_rows(dy, hidden, tile),
             Side<false>(w2.of(tile.expert), out.ffn, hidden,
                         [&](u32 i) { return feature + i < out.ffn ? feature + i : OUTSIDE; }),
             hidden);
    const float alpha = product_alpha(scales, tile.expert);
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS; m++)
        epilogue_dact<N8>(acc[m], fragment_rows(tile.row, tile.rows, warp_row() + m * FRAGMENT_ROWS), tile.expert,
                          feature + warp_slice() * WARP_COLS, blockIdx.x * 2 + warp_slice(), alpha, out);
}
