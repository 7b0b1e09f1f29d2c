// A weight's tiles of 16 x 16 to codes under one scale each, nearest.
//
// Eight threads take a tile, two of its rows each; four tiles that follow each other in a row lie in one warp, so that
// each row is read in 128 bytes and its codes are written in 32.
#pragma once
#include "encode.cuh"
#include "output.cuh"

constexpr u32 WARP_TILES = 4;  // of a warp, side by side

// With the saturation that the short way leaves out.
static __device__ __noinline__ Codes encode_rare(Neighbours low, Neighbours high, float m) {
    return encode_nearest<PACKED, true>(Block<Neighbours>(low, high), m, 0).codes;
}

// What a thread has of its tile: rows `row` and `row` + 1 of an expert, columns `block` * 16 and on. `live` says
// whether there is such a tile.
struct TileRows {
    u32 row, block;
    bool live;
    Neighbours low[2], high[2];

    // In the tiles that begin in row `band` * 16, and with block `first_block` in the first four lanes.
    __device__ __forceinline__ TileRows(u32 band, u32 first_block, bool live)
        : row(band * BLOCK + threadIdx.x % 32 / 4 * 2), block(first_block + threadIdx.x % 4), live(live) {}

    // For the last time, of a weight [n, k] that begins at element `begin`.
    __device__ __forceinline__ void load(const u16* w, u64 begin, u32 k) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const uint4* const from = reinterpret_cast<const uint4*>(w + begin + (u64)(row + i) * k + block * BLOCK);
            const uint4 a = live ? __ldcs(from) : make_uint4(0, 0, 0, 0),
                        b = live ? __ldcs(from + 1) : make_uint4(0, 0, 0, 0);
            low[i] = {{a.x, a.y, a.z, a.w}}, high[i] = {{b.x, b.y, b.z, b.w}};
        }
    }

    // The bits of the tile's largest magnitude. All lanes take part.
    __device__ __forceinline__ u32 amax_bits() const {
        u32 largest = 0;
#pragma unroll
        for (u32 i = 0; i < 2; i++) largest = max(largest, Block<Neighbours>(low[i], high[i]).amax_bits());
        // Over the eight threads of a tile, which are four lanes apart.
#pragma unroll
        for (u32 step = 4; step < 32; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
        return largest;
    }

    // To rows `first_row` and on of the operand, which an expert's first row goes to.
    template <int FORM, bool STREAMED>
    __device__ __forceinline__ void store(const Scaling& scaling, u32 largest, const Out& out, u64 first_row,
                                          u32 blocks) const {
        if (!live) return;
        const float relative = __fmul_rn(__uint_as_float(largest), scaling.block);
        const bool finite = largest < 0x7F800000u, usual = is_usual(relative);
        const u32 scale = finite ? float_to_e4m3(relative) : E4M3_NAN;
        const float m = scaling.multipliers[scale];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            Codes codes{0, 0};
            if (usual)
                codes = encode_nearest<PACKED, false>(Block<Neighbours>(low[i], high[i]), m, scale).codes;
            else if (finite)
                codes = encode_rare(low[i], high[i], m);
            Cursor<false, FORM, STREAMED>(out, first_row + row + i, block, blocks).store_any({codes, scale});
        }
    }
};
