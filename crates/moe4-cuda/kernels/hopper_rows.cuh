// Products of each expert's rows with its weight on Hopper, operands in BF16: acc = a [T, k] * W[e], tile by tile.
//
//   weight        K-major       [n, k]: the rows of W are columns of the product (fprop)
//                 MN-major      [k, n]: dgrad
//   SPLIT_HALVES  the tile's columns are two runs of rows of W1: gates, and the ups of the same features
//
// See hopper_pipeline.cuh for the main loop and groups.cuh for tiles of rows. Copies of a tile may reach rows behind the
// expert's last; what they give stays in accumulators that no epilogue looks at.
#pragma once
#include "epilogue.cuh"
#include "groups.cuh"
#include "hopper_pipeline.cuh"

// Tiles of rows that are worked on together.
constexpr u32 BAND = 4;

struct RowProduct {
    u32 k;        // length of the contraction
    u32 width;    // columns of a tile; features, where the tile holds gates and ups of them
    u32 columns;  // tiles side by side
    u32 ups;      // the first row of W1 with ups, if gates and ups are halves
};

template <bool MN_MAJOR, bool SPLIT_HALVES>
DEVICE void copy_rows(Ring ring, const TensorMap* a, const TensorMap* w, const Groups& groups,
                      const RowProduct& product) {
    for (u32 index = blockIdx.x; index < groups.most_tiles * product.columns; index += gridDim.x) {
        const Place place = place_of<BAND>(index, groups.most_tiles, product.columns);
        const Tile tile = load_tile(groups, place.row);
        if (tile.expert >= groups.experts) continue;
        const u32 column = place.column * product.width;
        for (u32 k = 0; k < product.k; k += TILE_K) {
            const u32 full = ring.begin_copies();
            copy_box(ring.a(), a, full, k, (u32)tile.row);
            if constexpr (MN_MAJOR) {
#pragma unroll
                for (u32 i = 0; i < TILE_N / LINE_VALUES; i++)
                    copy_box(ring.b() + i * TILE_K * LINE, w, full, column + i * LINE_VALUES, k, tile.expert);
            } else {
                const u32 second = SPLIT_HALVES ? product.ups + column : column + TILE_N / 2;
                copy_box(ring.b(), w, full, k, column, tile.expert);
                copy_box(ring.b() + B_BYTES / 2, w, full, k, second, tile.expert);
            }
            ring.advance();
        }
    }
}

// `finish(acc, rows, expert, place)` gets each fragment of an expert's rows, `nobody(rows, place)` those of nobody.
template <bool MN_MAJOR, bool SPLIT_HALVES, class Finish, class Nobody>
DEVICE void multiply_rows(const TensorMap* a, const TensorMap* w, const Groups& groups, const RowProduct& product,
                          Finish finish, Nobody nobody) {
    extern __shared__ __align__(1024) u8 stages[];
    __shared__ u64 barriers[2 * STAGES];
    Ring ring(stages, barriers);
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    const u32 warp_group = threadIdx.x / WARP_GROUP;
    if (warp_group == MULTIPLIERS) {
        give_registers<COPY_REGISTERS>();
        if (threadIdx.x % WARP_GROUP == 0) copy_rows<MN_MAJOR, SPLIT_HALVES>(ring, a, w, groups, product);
        return;
    }
    take_registers<MULTIPLY_REGISTERS>();
    for (u32 index = blockIdx.x; index < groups.most_tiles * product.columns; index += gridDim.x) {
        const Place place = place_of<BAND>(index, groups.most_tiles, product.columns);
        const Tile tile = load_tile(groups, place.row);
        const FragmentRows rows = fragment_rows(tile.row, tile.rows, threadIdx.x / 32 * FRAGMENT_ROWS);
        if (tile.expert < groups.experts) {
            float acc[N8][4];
            multiply<MN_MAJOR, false>(ring, acc, (product.k + BLOCK - 1) / BLOCK, warp_group);
            finish(acc, rows, tile.expert, place);
        } else if (tile.expert != NO_TILE) {
            nobody(rows, place);
        }
    }
}
