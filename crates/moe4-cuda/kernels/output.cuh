// Where the parts of a quantized operand go.
#pragma once
#include "encode.cuh"

struct Out {
    u8* codes;
    u8* scales;
    u16* unpacked;
};

// Where the scale of (row, block) lies among `blocks` in a row: plain, or in the 128x4 layout of the tensor cores.
template <bool IN_TILES>
DEVICE u64 scale_index(u64 row, u64 block, u64 blocks) {
    if (!IN_TILES) return row * blocks + block;
    const u64 tile = row / 128 * ((blocks + 3) / 4) + block / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

// Four codes, in the low half of `codes`, times the scale: exact in BF16.
DEVICE uint2 unpack_codes(u32 codes, u32 scale_pair) {
    // BF16 of the eight magnitudes, upper and lower bytes; a selector's nibble picks one.
    const u32 magnitudes = codes & 0x7777u;
    const u32 upper_bytes = permute_bytes(0x3F3F3F00u, 0x40404040u, magnitudes);
    const u32 lower_bytes = permute_bytes(0xC0800000u, 0xC0804000u, magnitudes);
    u32 first = permute_bytes(lower_bytes, upper_bytes, 0x5140),
        second = permute_bytes(lower_bytes, upper_bytes, 0x7362);
    first |= (codes & 8) << 12 | (codes & 0x80) << 24;
    second |= (codes & 0x800) << 4 | (codes & 0x8000) << 16;
    uint2 out;
    out.x = multiply_bf16x2(first, scale_pair);
    out.y = multiply_bf16x2(second, scale_pair);
    return out;
}

// The sixteen BF16 values of block number `block`.
DEVICE void store_unpacked(u16* unpacked, u64 block, Codes c, u32 scale) {
    const u32 s = __float_as_uint(e4m3_to_float(scale)) >> 16, pair = s | s << 16;
    if (scale == E4M3_NAN) {
        // The codes are 0; the product's NaN would be another one.
        reinterpret_cast<uint4*>(unpacked)[block * 2] = reinterpret_cast<uint4*>(unpacked)[block * 2 + 1] =
            make_uint4(pair, pair, pair, pair);
        return;
    }
    const uint2 a = unpack_codes(c.low, pair), b = unpack_codes(c.low >> 16, pair);
    const uint2 d = unpack_codes(c.high, pair), e = unpack_codes(c.high >> 16, pair);
    uint4* const out = reinterpret_cast<uint4*>(unpacked) + block * 2;
    out[0] = make_uint4(a.x, a.y, b.x, b.y);
    out[1] = make_uint4(d.x, d.y, e.x, e.y);
}

// A place in the operand: block `block` of `blocks` in row `row`. Plain operands are walked by adding to addresses.
template <bool IN_TILES, bool WITH_VALUES>
struct Cursor {
    uint2* codes;
    u8* scales;
    u64 number, row, block, blocks;
    u16* unpacked;

    __device__ __forceinline__ Cursor(const Out& out, u64 row, u64 block, u64 blocks)
        : codes(reinterpret_cast<uint2*>(out.codes) + row * blocks + block),
          scales(IN_TILES ? out.scales : out.scales + row * blocks + block),
          number(row * blocks + block),
          row(row),
          block(block),
          blocks(blocks),
          unpacked(out.unpacked) {}

    __device__ __forceinline__ void store(const Quantized& q) const {
        *codes = make_uint2(q.codes.low, q.codes.high);
        if constexpr (IN_TILES)
            scales[scale_index<true>(row, block, blocks)] = q.scale;
        else
            *scales = q.scale;
        if constexpr (WITH_VALUES) store_unpacked(unpacked, number, q.codes, q.scale);
    }

    // To the same block of a row further down.
    __device__ __forceinline__ void advance(u32 rows) {
        const u64 step = rows * blocks;
        codes += step, number += step, row += rows;
        if constexpr (!IN_TILES) scales += step;
    }
};
