// Products of each expert's rows with its weight on Hopper, operands in BF16: acc = a [T, k] * W[e], tile by tile.
//
//   weight        K-major       [n, k]: the rows of W are columns of the product (fprop)
//                 MN-major      [k, n]: dgrad
//   SPLIT_HALVES  the tile's columns are two runs of rows of W1: gates, and the ups of the same features
//
// See hopper_pipeline.cuh for the main loop and groups.cuh for tiles of rows. Copies of a tile may reach rows behind
// the expert's last; what they give stays in accumulators that no epilogue looks at.
#pragma once
#include "epilogue.cuh"
#include "groups.cuh"
#include "hopper_pipeline.cuh"

// Tiles of rows that are worked on together.
constexpr u32 BAND = 4;

struct RowProduct {
    u32 n, k;     // columns, and length of the contraction
    u32 width;    // columns of the product from a tile to the next; with SPLIT_HALVES, of either half
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

// For each fragment of an expert's rows, `prepare(rows, expert, place)` loads what its epilogue will want, while the
// products run, and `finish(acc, prepared, rows, expert, place, slabs)` is the epilogue. `nobody(tile, place)` gets
// tiles of nobody's rows.
template <bool MN_MAJOR, bool SPLIT_HALVES, class Prepare, class Finish, class Nobody>
DEVICE void multiply_rows(const TensorMap* a, const TensorMap* w, const Groups& groups, const RowProduct& product,
                          Prepare prepare, Finish finish, Nobody nobody) {
    extern __shared__ __align__(1024) u8 stages[];
    __shared__ RingState state;
    Ring ring(stages, state);
    ring.init(state);
    const u32 warp_group = threadIdx.x / WARP_GROUP;
    if (warp_group == MULTIPLIERS) {
        give_registers<COPY_REGISTERS>();
        if (threadIdx.x % WARP_GROUP == 0) copy_rows<MN_MAJOR, SPLIT_HALVES>(ring, a, w, groups, product);
        return;
    }
    take_registers<MULTIPLY_REGISTERS>();
    const Slabs slabs = slabs_of_warp(stages + STAGES * STAGE_BYTES);
    const u32 end = groups.most_tiles * product.columns;
    const auto words_of = [&](u32 index) {
        const u32 row = place_of<BAND>(index, groups.most_tiles, product.columns).row;
        return load_tile_words(groups, index < end ? row : NO_TILE);
    };
    TileWords next = words_of(blockIdx.x);
    for (u32 index = blockIdx.x; index < end; index += gridDim.x) {
        const Place place = place_of<BAND>(index, groups.most_tiles, product.columns);
        const Tile tile = next.tile();
        next = words_of(index + gridDim.x);
        const FragmentRows rows = fragment_rows(tile.row, tile.rows, threadIdx.x / 32 * FRAGMENT_ROWS);
        if (tile.expert < groups.experts) {
            const u32 blocks = (product.k + BLOCK - 1) / BLOCK;
            if (warp_group * (TILE_M / MULTIPLIERS) >= tile.rows) {
                skip(ring, blocks, warp_group);
                continue;
            }
            const auto prepared = prepare(rows, tile.expert, place);
            float acc[N8][4];
            if (SPLIT_HALVES || product.n - place.column * TILE_N > TILE_N / 2)
                multiply<TILE_N, MN_MAJOR, false>(ring, acc, blocks, warp_group);
            else
                multiply<TILE_N / 2, MN_MAJOR, false>(ring, acc, blocks, warp_group);
            finish(acc, prepared, rows, tile.expert, place, slabs);
        } else if (tile.expert != NO_TILE) {
            nobody(tile, place);
        }
    }
}
