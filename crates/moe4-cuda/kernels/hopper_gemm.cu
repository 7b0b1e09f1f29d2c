// `grouped_gemm` on Hopper: out [T, n] = bf16(alpha * a * W[e] (+ bias * prob)); see hopper_rows.cuh.
//
// Compile-time choice: DGRAD (dgrad).
#include "hopper_rows.cuh"

struct Prepared {
    ExpertScales scales;
    RowValues weight;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap w,
                const __grid_constant__ Groups groups, const __grid_constant__ RowProduct product, const Scales scales,
                const __grid_constant__ PlainOut out) {
    multiply_rows<DGRAD, false>(
        &a, &w, groups, product,
        [&](const FragmentRows& rows, u32 expert, Place) {
            return Prepared{load_scales(scales, expert), bias_weights(out, rows)};
        },
        [&](const float (&acc)[N8][4], const Prepared& p, const FragmentRows& rows, u32 expert, Place place,
            Slabs slabs) {
            epilogue_plain<N8>(acc, rows, expert, place.column * TILE_N, p.scales.alpha(), p.weight, out, slabs);
        },
        [&](const Tile& tile, Place place) {
            const u32 column = place.column * TILE_N;
            store_zeros(out.out, out.cols, tile.row, tile.rows, column, min(column + TILE_N, out.cols));
        });
}
