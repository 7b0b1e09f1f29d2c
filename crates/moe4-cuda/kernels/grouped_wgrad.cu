// dw[e] (+)= alpha * a^T * b over the tokens of expert e, which is blockIdx.z; dw[e] is [n, k].
//
//   QUANTIZED   a [n, Tp], b [k, Tp]: BF16 values of columnwise operands, summed over the expert's token positions
//   else        a [T, n], b [T, k]: summed over the expert's rows
//
// An expert without tokens gets zeros, or its buffer is left alone where it is added to. blockIdx.x: 128 of k,
// blockIdx.y: 128 of n.
//
// Compile-time choices: QUANTIZED, BF16_GRADIENT, ACCUMULATE.
#include "epilogue.cuh"
#include "mma_loop.cuh"

#if BF16_GRADIENT
typedef u16 Gradient;
#else
typedef float Gradient;
#endif

struct Gradients {
    Gradient* base;
    u64 stride;
    Gradient* const* table;  // [E], or none
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_wgrad(const u16* __restrict__ a, const u16* __restrict__ b, u32 n, u32 k, u64 positions,
                  const Scales scales, const Groups groups, const Gradients out) {
    const u32 expert = blockIdx.z, row = blockIdx.y * TILE_ROWS, col = blockIdx.x * TILE_COLS;
    const u64* const bounds = QUANTIZED ? groups.padded : groups.offsets;
    const u64 begin = bounds[expert];
    const u32 length = (u32)(bounds[expert + 1] - begin);
    if (ACCUMULATE && length == 0) return;
    Accumulators acc = {};
    multiply(acc,
             Side<QUANTIZED>(a + begin * (QUANTIZED ? 1 : n), QUANTIZED ? positions : n, length,
                             [&](u32 i) { return row + i < n ? row + i : OUTSIDE; }),
             Side<QUANTIZED>(b + begin * (QUANTIZED ? 1 : k), QUANTIZED ? positions : k, length,
                             [&](u32 i) { return col + i < k ? col + i : OUTSIDE; }),
             length);
    const float alpha = product_alpha(scales, expert);
    Gradient* const dw = out.table ? out.table[expert] : out.base + expert * out.stride;
    const Slabs slabs = slabs_of_warp(shared_stages());
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS; m++)
        epilogue_gradient<N8, ACCUMULATE>(acc[m],
                                          fragment_rows(row, min(n - row, TILE_ROWS), warp_row() + m * FRAGMENT_ROWS),
                                          col + warp_slice() * WARP_COLS, k, alpha, dw, slabs);
}
