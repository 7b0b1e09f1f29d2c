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

// A streamed word is the first to leave the L2 cache, where others wait to be read again.
template <bool STREAMED, class Word>
DEVICE void put(Word* to, Word word) {
    if constexpr (STREAMED)
        __stcs(to, word);
    else
        *to = word;
}

// The sixteen BF16 values of a block.
template <bool STREAMED = false>
DEVICE void store_unpacked(uint4* values, Codes c, u32 scale) {
    const u32 s = __float_as_uint(e4m3_to_float(scale)) >> 16, pair = s | s << 16;
    if (scale == E4M3_NAN) {
        // The codes are 0; the product's NaN would be another one.
        put<STREAMED>(values + 1, make_uint4(pair, pair, pair, pair));
        put<STREAMED>(values, make_uint4(pair, pair, pair, pair));
        return;
    }
    const uint2 a = unpack_codes(c.low, pair), b = unpack_codes(c.low >> 16, pair);
    const uint2 d = unpack_codes(c.high, pair), e = unpack_codes(c.high >> 16, pair);
    put<STREAMED>(values, make_uint4(a.x, a.y, b.x, b.y));
    put<STREAMED>(values + 1, make_uint4(d.x, d.y, e.x, e.y));
}

// A place in the operand: block `block` of `blocks` in row `row`. Plain operands are walked by adding to addresses.
// Scales are never streamed: their bytes come one by one, and the cache gathers them.
template <bool IN_TILES, int FORM, bool STREAMED = false>
struct Cursor {
    uint2* codes;
    u8* scales;
    uint4* values;
    u64 row, block, blocks;

    __device__ __forceinline__ Cursor(const Out& out, u64 row, u64 block, u64 blocks)
        : codes(reinterpret_cast<uint2*>(out.codes) + row * blocks + block),
          scales(IN_TILES ? out.scales : out.scales + row * blocks + block),
          values(reinterpret_cast<uint4*>(out.unpacked) + (row * blocks + block) * 2),
          row(row),
          block(block),
          blocks(blocks) {}

    __device__ __forceinline__ void store_packed(const Quantized& q) const {
        put<STREAMED>(codes, make_uint2(q.codes.low, q.codes.high));
        if constexpr (IN_TILES)
            scales[scale_index<true>(row, block, blocks)] = q.scale;
        else
            *scales = q.scale;
    }

    // A block that comes with its values.
    __device__ __forceinline__ void store(const Quantized& q) const {
        if constexpr (FORM & PACKED) store_packed(q);
        const u32(&v)[8] = q.values;
        if constexpr (FORM & VALUES) {
            put<STREAMED>(values, make_uint4(v[0], v[1], v[2], v[3]));
            put<STREAMED>(values + 1, make_uint4(v[4], v[5], v[6], v[7]));
        }
    }

    // A block that comes without, of any scale.
    __device__ __forceinline__ void store_any(const Quantized& q) const {
        if constexpr (FORM & PACKED) store_packed(q);
        if constexpr (FORM & VALUES) store_unpacked<STREAMED>(values, q.codes, q.scale);
    }

    // To the same block of a row further down.
    __device__ __forceinline__ void advance(u32 rows) {
        const u64 step = rows * blocks;
        codes += step, values += 2 * step, row += rows;
        if constexpr (!IN_TILES) scales += step;
    }
};
