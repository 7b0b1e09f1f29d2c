// Packed codes to operands of mma.m16n8k16, between shared memory and registers: code * block scale * 2^-7, exact in
// BF16.
//
// The three bits of a magnitude at bits 6..8 of a BF16 number are 2^-126 of what they are in E2M1 (encode.cuh), and the
// sign belongs to bit 15. One multiplication by 2^119 of the block scale, the most that fits BF16, gives the value but
// for the factor; who sums the products takes that off again.
//
//   fprop   A lane wants neighbours of a row of codes: a byte. Its copies 6 and 18 bits further up put both magnitudes
//           into place, and both signs six bits below theirs.
//   dgrad   It wants the same column of two neighbouring rows: a code of either. Two copies of a code, 6 bits apart,
//           hold its magnitude and its sign.
#pragma once
#include "numerics.cuh"

constexpr u32 MAGNITUDES = 0x01C001C0u, SIGNS = 0x80008000u;
// What the operands are to be multiplied by.
constexpr float PRODUCT_FACTOR = 128.0f;

// What codes are multiplied by under the scale of this byte, in both halves. A NaN scale makes all values NaN.
DEVICE u32 decode_scale(u32 byte) {
    return permute_bytes(__float_as_uint(__fmul_rn(e4m3_to_float(byte), 0x1p119f)), 0, 0x3232);
}

// Of a byte of two codes, the first one in the lower half.
DEVICE u32 decode_byte(u32 byte, u32 scale) {
    const u32 spread = byte * 0x00040040u;
    return multiply_bf16x2((spread & MAGNITUDES) | ((spread << 6) & SIGNS), scale);
}

// Of code I of either word, that of `first` in the lower half.
template <u32 I>
DEVICE u32 decode_codes(u32 first, u32 second, u32 scale) {
    constexpr bool UPPER = I % 2 == 1;
    const u32 bytes = permute_bytes(first, second, 0x4400 + I / 2 * 0x1111);
    const u32 codes = bytes & (UPPER ? 0x00F000F0u : 0x000F000Fu);
    return multiply_bf16x2((codes * (UPPER ? 0x0104u : 0x1040u)) & (MAGNITUDES | SIGNS), scale);
}
