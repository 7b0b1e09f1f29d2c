// `grouped_gemm_dact` on Hopper: dc and dprob from dy, W2 and c; see hopper_rows.cuh and epilogue_dact.cuh.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX, SIGN_MASK, H_AGAIN.
#define TILE_COLUMNS 128
#include "epilogue_dact.cuh"
#include "hopper_rows.cuh"

struct Prepared {
    ExpertScales scales;
    RowValues prob[FRAGMENTS];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_gemm_dact(const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap w2,
                     const __grid_constant__ Groups groups, const __grid_constant__ RowProduct product,
                     const Scales scales, const __grid_constant__ DactOut out) {
    multiply_rows<true, false>(
        &dy, &w2, groups, product,
        [&](const Tile& tile, Place) {
            return Prepared{load_scales(scales, tile.expert),
                            {load_row_values(out.prob, rows_of(tile, 0)), load_row_values(out.prob, rows_of(tile, 1))}};
        },
        [&](const Accumulators& acc, const Prepared& p, const Tile& tile, Place place, Slabs slabs) {
            const float alpha = p.scales.alpha();
            const u32 feature = place.column * TILE_N;
#pragma unroll 1
            for (u32 m = 0; m < FRAGMENTS; m++) {
                const FragmentRows rows = rows_of(tile, m);
                epilogue_dact<N8>(acc, m, rows, tile.expert, feature, alpha, m ? p.prob[1] : p.prob[0],
                                  load_features(out.c, rows, feature, out.ffn), out, slabs);
            }
        },
        [&](const Tile& tile, Place place) {
            dact_nobody(tile.row, tile.rows, place.column * TILE_N, TILE_N, out);
        });
}
