// out[T, cols] = bf16(alpha * a[T, k] * w[e] (+ bias * weight)), each expert's rows with its own weight.
//
//   fprop   w[e] is [cols, k]      dgrad   w[e] is [k, cols]
//
// Operands are BF16 values; alpha undoes the global scales of quantized ones. Rows of nobody become zero. blockIdx.x:
// 128 columns; the other dimensions: which tile of rows.
//
// Compile-time choice: DGRAD.
#include "epilogue.cuh"
#include "mma_loop.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_gemm(const u16* __restrict__ a, const Weights w, u32 contraction, const Scales scales, const Groups groups,
                 const PlainOut out) {
    const Tile tile = load_tile(groups, block_in_grid());
    const u32 col = blockIdx.x * TILE_COLS;
    if (tile.expert == NO_TILE || tile.rows == 0) return;
    if (tile.expert == groups.experts)
        return store_zeros(out.out, out.cols, tile.row, tile.rows, col, min(col + TILE_COLS, out.cols));
    Accumulators acc = {};
    multiply(acc, tile_rows(a, contraction, tile),
             Side<!DGRAD>(w.of(tile.expert), DGRAD ? out.cols : contraction, contraction,
                          [&](u32 i) { return col + i < out.cols ? col + i : OUTSIDE; }),
             contraction);
    const float alpha = product_alpha(scales, tile.expert);
    const Slabs slabs = slabs_of_warp(shared_stages());
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS; m++) {
        const FragmentRows rows = fragment_rows(tile.row, tile.rows, warp_row() + m * FRAGMENT_ROWS);
        epilogue_plain<N8>(acc[m], rows, tile.expert, col + warp_slice() * WARP_COLS, alpha, bias_weights(out, rows),
                           out, slabs);
    }
}
