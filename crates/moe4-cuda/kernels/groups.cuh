// Rows of each expert, as `group_offsets` leaves them in device memory, and the tiles that a grid is cut into.
//
// Expert e owns rows offsets[e]..offsets[e+1] and, in a columnwise operand, token positions padded[e]..padded[e+1].
// Behind the last expert stands one more entry for the rows and positions of nobody. Tiles of TILE_ROWS rows start
// anew at each expert. A launch knows no splits: it starts as many thread blocks as any splits could need, and the list
// of tiles is as long; entries that no tile needs have no expert.
#pragma once
#include "numerics.cuh"

constexpr u32 TILE_ROWS = 128;
constexpr u32 NO_TILE = 0xFFFFFFFFu;

struct Tile {
    u64 row;        // first row
    u64 position;   // first token position of a columnwise operand
    u64 token;      // first row, counted within the expert
    u32 expert;     // the number of experts for rows of nobody; NO_TILE for an entry that is not needed
    u16 rows;       // at most TILE_ROWS
    u16 positions;  // at most TILE_ROWS, a multiple of 16
};
static_assert(sizeof(Tile) == 32, "two words of 16 bytes");

struct Groups {
    const u64* offsets;  // [E + 2]
    const u64* padded;   // [E + 2]
    const Tile* tiles;   // [most_tiles]
    u32 experts, most_tiles;
};

// A tile as it lies in memory: loaded ahead, and looked at when it is needed.
struct TileWords {
    uint4 first, second;

    __device__ __forceinline__ Tile tile() const {
        const auto join = [](u32 low, u32 high) { return (u64)high << 32 | low; };
        return {join(first.x, first.y), join(first.z, first.w), join(second.x, second.y), second.z,
                (u16)second.w,          (u16)(second.w >> 16)};
    }
};

DEVICE TileWords load_tile_words(const Groups& groups, u32 index) {
    if (index >= groups.most_tiles) return {make_uint4(0, 0, 0, 0), make_uint4(0, 0, NO_TILE, 0)};
    const uint4* const words = reinterpret_cast<const uint4*>(groups.tiles + index);
    return {__ldg(words), __ldg(words + 1)};
}

DEVICE Tile load_tile(const Groups& groups, u32 index) { return load_tile_words(groups, index).tile(); }

// Tiles are spread over two dimensions of the grid, each of which has its limit.
DEVICE u32 block_in_grid() { return blockIdx.z * gridDim.y + blockIdx.y; }
