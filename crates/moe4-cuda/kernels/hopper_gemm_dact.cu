// `grouped_gemm_dact` on Hopper: dc and dprob from dy, W2 and c; see hopper_rows.cuh and epilogue_dact.cuh.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX.
#include "epilogue_dact.cuh"
#include "hopper_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_gemm_dact(const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap w2,
                     const __grid_constant__ Groups groups, const __grid_constant__ RowProduct product,
                     const Scales scales, const __grid_constant__ DactOut out) {
    multiply_rows<true, false>(
        &dy, &w2, groups, product,
        [&](const float (&acc)[N8][4], const FragmentRows& rows, u32 expert, Place place) {
            const float alpha = product_alpha(scales, expert);
            epilogue_dact<N8>(acc, rows, expert, place.column * TILE_N, place.column, alpha, out);
        },
        [&](const FragmentRows& rows, Place place) { dact_nobody<TILE_N>(rows, place.column, out); });
}
