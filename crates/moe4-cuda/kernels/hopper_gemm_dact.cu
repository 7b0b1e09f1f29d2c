// `grouped_gemm_dact` on Hopper: dc and dprob from dy, W2 and c; see hopper_rows.cuh and epilogue_dact.cuh.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX, SIGN_MASK.
#include "epilogue_dact.cuh"
#include "hopper_rows.cuh"

struct Prepared {
    ExpertScales scales;
    RowValues prob;
    FeaturePieces c;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_gemm_dact(const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap w2,
                     const __grid_constant__ Groups groups, const __grid_constant__ RowProduct product,
                     const Scales scales, const __grid_constant__ DactOut out) {
    multiply_rows<true, false>(
        &dy, &w2, groups, product,
        [&](const FragmentRows& rows, u32 expert, Place place) {
            return Prepared{load_scales(scales, expert), load_row_values(out.prob, rows),
                            load_features(out.c, rows, place.column * TILE_N, out.ffn)};
        },
        [&](const float (&acc)[N8][4], const Prepared& p, const FragmentRows& rows, u32 expert, Place place,
            Slabs slabs) {
            epilogue_dact<N8>(acc, rows, expert, place.column * TILE_N, p.scales.alpha(), p.prob, p.c, out, slabs);
        },
        [&](const Tile& tile, Place place) { dact_nobody(tile.row, tile.rows, place.column * TILE_N, TILE_N, out); });
}
