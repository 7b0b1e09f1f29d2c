// `grouped_gemm_act` on Hopper: c and h from x and W1; see hopper_rows.cuh and epilogue_act.cuh.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX, SIGN_MASK.
#include "epilogue_act.cuh"
#include "hopper_rows.cuh"

constexpr u32 FEATURES = GATED ? TILE_N / 2 : TILE_N;

struct Prepared {
    ExpertScales scales;
    RowValues prob[FRAGMENTS];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_gemm_act(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w1,
                    const __grid_constant__ Groups groups, const __grid_constant__ RowProduct product,
                    const Scales scales, const __grid_constant__ ActOut out) {
    multiply_rows<false, GATED && LAYOUT == HALVES>(
        &x, &w1, groups, product,
        [&](const Tile& tile, Place) {
            return Prepared{load_scales(scales, tile.expert),
                            {load_row_values(out.prob, rows_of(tile, 0)), load_row_values(out.prob, rows_of(tile, 1))}};
        },
        [&](const Accumulators& acc, const Prepared& p, const Tile& tile, Place place, Slabs slabs) {
            const float alpha = p.scales.alpha();
#pragma unroll 1
            for (u32 m = 0; m < FRAGMENTS; m++)
                epilogue_act<N8>(acc, m, rows_of(tile, m), tile.expert, place.column * FEATURES, alpha,
                                 m ? p.prob[1] : p.prob[0], out, slabs);
        },
        [&](const Tile& tile, Place place) {
            act_nobody(tile.row, tile.rows, place.column * FEATURES, FEATURES, out);
        });
}
