// `grouped_wgrad` on Hopper, quantized operands in BF16: dw[e] (+)= alpha * a * b^T over the expert's token positions.
//
//   a [n, Tp], b [k, Tp]: columnwise copies; a contraction never leaves the expert's own positions
//
// See hopper_pipeline.cuh for the main loop. Compile-time choices: DW_BF16, ACCUMULATE.
#include "epilogue.cuh"
#include "groups.cuh"
#include "hopper_pipeline.cuh"

constexpr u32 BAND = 8;

#if DW_BF16
typedef u16 Gradient;
#else
typedef float Gradient;
#endif

struct WgradShape {
    u32 n, k;           // rows and columns of a gradient
    u32 rows, columns;  // in tiles
    u64 stride;         // elements from an expert's gradient to the next
};

struct Positions {
    u64 first;
    u32 blocks;  // of sixteen
};

DEVICE Positions positions_of(const Groups& groups, u32 expert) {
    const u64 first = groups.padded[expert];
    return {first, (u32)((groups.padded[expert + 1] - first) / BLOCK)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_wgrad(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                 const __grid_constant__ Groups groups, const __grid_constant__ WgradShape shape, const Scales scales,
                 Gradient* dw) {
    extern __shared__ __align__(1024) u8 stages[];
    __shared__ u64 barriers[2 * STAGES];
    Ring ring(stages, barriers);
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    const u32 warp_group = threadIdx.x / WARP_GROUP, each = shape.rows * shape.columns;
    if (warp_group == MULTIPLIERS) {
        give_registers<COPY_REGISTERS>();
        if (threadIdx.x % WARP_GROUP != 0) return;
        for (u32 index = blockIdx.x; index < each * groups.experts; index += gridDim.x) {
            const Positions positions = positions_of(groups, index / each);
            const Place place = place_of<BAND>(index % each, shape.rows, shape.columns);
            for (u32 block = 0; block < positions.blocks; block += TILE_K / BLOCK) {
                const u32 full = ring.begin_copies(), position = (u32)positions.first + block * BLOCK;
                copy_box(ring.a(), &a, full, position, place.row * TILE_M);
#pragma unroll
                for (u32 i = 0; i < 2; i++)
                    copy_box(ring.b() + i * (B_BYTES / 2), &b, full, position, place.column * TILE_N + i * TILE_N / 2);
                ring.advance();
            }
        }
        return;
    }
    take_registers<MULTIPLY_REGISTERS>();
    for (u32 index = blockIdx.x; index < each * groups.experts; index += gridDim.x) {
        const u32 expert = index / each, blocks = positions_of(groups, expert).blocks;
        if (ACCUMULATE && blocks == 0) continue;
        const Place place = place_of<BAND>(index % each, shape.rows, shape.columns);
        float acc[N8][4];
        multiply<false, true>(ring, acc, blocks, warp_group);
        const u32 row = place.row * TILE_M;
        const FragmentRows rows =
            fragment_rows(row, min(TILE_M, shape.n - row), threadIdx.x / 32 * FRAGMENT_ROWS);
        epilogue_gradient<N8, ACCUMULATE>(acc, rows, place.column * TILE_N, shape.k, product_alpha(scales, expert),
                                          dw + expert * shape.stride);
    }
}
