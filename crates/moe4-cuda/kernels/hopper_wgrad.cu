// `grouped_wgrad` on Hopper, quantized operands in BF16: dw[e] (+)= alpha * a * b^T over the expert's token positions.
//
//   a [n, Tp], b [k, Tp]: columnwise copies; a contraction never leaves the expert's own positions
//
// See hopper_pipeline.cuh for the main loop. Compile-time choices: BF16_GRADIENT, ACCUMULATE.
#include "epilogue.cuh"
#include "groups.cuh"
#include "hopper_pipeline.cuh"

constexpr u32 BAND = 8;

#if BF16_GRADIENT
typedef u16 Gradient;
#else
typedef float Gradient;
#endif

struct WgradShape {
    u32 n, k;           // rows and columns of a gradient
    u32 rows, columns;  // in tiles
    u64 stride;         // elements from an expert's gradient to the next
};

// An expert's token positions, loaded ahead of what is done with them.
struct Positions {
    u64 first, end;

    __device__ __forceinline__ u32 blocks() const { return (u32)((end - first) / BLOCK); }
};

DEVICE Positions positions_of(const Groups& groups, u32 expert) {
    return {__ldg(groups.padded + expert), __ldg(groups.padded + expert + 1)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_wgrad(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                 const __grid_constant__ Groups groups, const __grid_constant__ WgradShape shape, const Scales scales,
                 Gradient* dw) {
    extern __shared__ __align__(1024) u8 stages[];
    __shared__ RingState state;
    Ring ring(stages, state);
    ring.init(state);
    const u32 warp_group = threadIdx.x / WARP_GROUP, each = shape.rows * shape.columns;
    if (warp_group == MULTIPLIERS) {
        give_registers<COPY_REGISTERS>();
        if (threadIdx.x % WARP_GROUP != 0) return;
        for (u32 index = blockIdx.x; index < each * groups.experts; index += gridDim.x) {
            const Positions positions = positions_of(groups, index / each);
            const Place place = place_of<BAND>(index % each, shape.rows, shape.columns);
            for (u32 block = 0; block < positions.blocks(); block += TILE_K / BLOCK) {
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
    const Slabs slabs = slabs_of_warp(stages + STAGES * STAGE_BYTES);
    const u32 end = each * groups.experts;
    const auto positions_at = [&](u32 index) { return positions_of(groups, min(index, end - 1) / each); };
    Positions next = positions_at(blockIdx.x);
    for (u32 index = blockIdx.x; index < end; index += gridDim.x) {
        const u32 expert = index / each, blocks = next.blocks();
        next = positions_at(index + gridDim.x);
        const Place place = place_of<BAND>(index % each, shape.rows, shape.columns);
        const u32 row = place.row * TILE_M, height = min(TILE_M, shape.n - row), column = place.column * TILE_N;
        Gradient* const to = dw + expert * shape.stride;
        if (blocks == 0) {
            constexpr u32 WORDS = sizeof(Gradient) / 2;
            if (!ACCUMULATE)
                store_zeros(reinterpret_cast<u16*>(to), WORDS * shape.k, row, height, WORDS * column,
                            WORDS * min(column + TILE_N, shape.k));
            continue;
        }
        if (warp_group * (TILE_M / MULTIPLIERS) >= height) {
            skip(ring, blocks, warp_group);
            continue;
        }
        const ExpertScales of_expert = load_scales(scales, expert);
        float acc[N8][4];
        if (shape.k - column > TILE_N / 2)
            multiply<TILE_N, false, true>(ring, acc, blocks, warp_group);
        else
            multiply<TILE_N / 2, false, true>(ring, acc, blocks, warp_group);
        const FragmentRows rows = fragment_rows(row, height, threadIdx.x / 32 * FRAGMENT_ROWS);
        epilogue_gradient<N8, ACCUMULATE>(acc, rows, column, shape.k, of_expert.alpha(), to, slabs);
    }
}
