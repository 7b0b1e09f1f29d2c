// `grouped_gemm` on Hopper: out [T, n] = bf16(alpha * a * W[e] (+ bias * prob)); see hopper_rows.cuh.
//
// Compile-time choice: DGRAD.
#include "hopper_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap w,
                const __grid_constant__ Groups groups, const __grid_constant__ RowProduct product, const Scales scales,
                const __grid_constant__ PlainOut out) {
    multiply_rows<DGRAD, false>(
        &a, &w, groups, product, [&](const Tile& tile, Place) { return load_scales(scales, tile.expert); },
        [&](const Accumulators& acc, const ExpertScales& of_expert, const Tile& tile, Place place, Slabs slabs) {
            const float alpha = of_expert.alpha();
#pragma unroll 1
            for (u32 m = 0; m < FRAGMENTS; m++) {
                const FragmentRows rows = rows_of(tile, m);
                epilogue_plain<N8>(acc, m, rows, tile.expert, place.column * TILE_N, alpha, bias_weights(out, rows), out,
                                   slabs);
            }
        },
        [&](const Tile& tile, Place place) {
            const u32 column = place.column * TILE_N;
            store_zeros(out.out, out.cols, tile.row, tile.rows, column, min(column + TILE_N, out.cols));
        });
}
