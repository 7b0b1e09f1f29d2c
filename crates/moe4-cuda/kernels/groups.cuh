// Rows of each expert, as `group_offsets` leaves them in device memory, and the tiles that a grid is cut into.
//
// Expert e owns rows offsets[e]..offsets[e+1] and, in a columnwise operand, token positions padded[e]..padded[e+1].
// Behind the last expert stands one more entry for the rows and positions of nobody. Tiles of TILE_ROWS rows start
// anew at each expert; tiles[e] is the first tile of expert e. A launch knows no splits: it starts as many thread
// blocks as any splits could need, and those past tiles[E + 1] leave at once.
#pragma once
#include "numerics.cuh"

constexpr u32 TILE_ROWS = 128;

struct Groups {
    const u64* offsets;  // [E + 2]
    const u64* padded;   // [E + 2]
    const u32* tiles;    // [E + 2]
    u32 experts;
};

struct Tile {
    u32 expert;      // `experts` for rows of nobody
    u32 rows;        // live rows in this tile, at most TILE_ROWS
    u32 positions;   // token positions in this tile, a multiple of 16
    u64 row;         // first row
    u64 position;    // first token position of a columnwise operand
    u64 token;       // first row, counted within the expert
};

// The tile of this thread block, found by all its threads together. False if there is none.
DEVICE bool find_tile(const Groups& groups, u32 index, Tile& tile) {
    __shared__ u32 found;
    const u32 last = groups.tiles[groups.experts + 1];
    if (index >= last) return false;
    // Exactly one expert holds the tile, so exactly one thread writes.
    for (u32 e = threadIdx.x; e <= groups.experts; e += blockDim.x)
        if (groups.tiles[e] <= index && index < groups.tiles[e + 1]) found = e;
    __syncthreads();
    const u32 e = found;
    const u64 token = (u64)(index - groups.tiles[e]) * TILE_ROWS;
    const u64 row = groups.offsets[e], position = groups.padded[e];
    const u64 rows = groups.offsets[e + 1] - row, positions = groups.padded[e + 1] - position;
    tile.expert = e;
    tile.token = token;
    tile.row = row + token;
    tile.position = position + token;
    tile.rows = rows > token ? (u32)min(rows - token, (u64)TILE_ROWS) : 0;
    tile.positions = positions > token ? (u32)min(positions - token, (u64)TILE_ROWS) : 0;
    return true;
}
