// `grouped_gemm_act` on Hopper: c and h from x and W1; see hopper_rows.cuh and epilogue_act.cuh.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX, SIGN_MASK.
#include "epilogue_act.cuh"
#include "hopper_rows.cuh"

constexpr u32 FEATURES = GATED ? TILE_N / 2 : TILE_N;

struct Prepared {
    ExpertScales scales;
    RowValues prob;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_gemm_act(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w1,
                    const __grid_constant__ Groups groups, const __grid_constant__ RowProduct product,
                    const Scales scales, const __grid_constant__ ActOut out) {
    multiply_rows<false, GATED && LAYOUT == HALVES>(
        &x, &w1, groups, product,
        [&](const FragmentRows& rows, u32 expert, Place) {
            return Prepared{load_scales(scales, expert), load_row_values(out.prob, rows)};
        },
        [&](const float (&acc)[N8][4], const Prepared& p, const FragmentRows& rows, u32 expert, Place place,
            Slabs slabs) {
            epilogue_act<N8>(acc, rows, expert, place.column * FEATURES, p.scales.alpha(), p.prob, out, slabs);
        },
        [&](const Tile& tile, Place place) {
            act_nobody(tile.row, tile.rows, place.column * FEATURES, FEATURES, out);
        });
}
