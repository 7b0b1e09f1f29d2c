// Number formats and their rounding, bit for bit as in the library's `numerics` module.
//
//   BF16    loaded in pairs, element 0 in the low half of a 32-bit word
//   E4M3    block scales; nearest even, saturating at 448
//   E2M1    elements; codes 0..7 stand for 0, .5, 1, 1.5, 2, 3, 4, 6, bit 3 is the sign
//
// Compiled without contraction of products and sums: every fused multiply-add below is written out, and where it is
// used its product is exact, so that one rounding is what the contract asks for.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__

constexpr u32 BLOCK = 16;  // elements of a block, along a row or along tokens
constexpr u8 E4M3_NAN = 0x7F;
constexpr float FLOAT_MAX = 3.402823466e+38f;

DEVICE float lower(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float upper(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Two floats to BF16, nearest even.
DEVICE u32 to_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Products in both halves, each rounded once.
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
    u32 out;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#else
    // Adding -0 changes nothing, not even the sign of a zero.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return out;
}

// Bytes of `b:a` by selector; with bit 3 of a selector's nibble set, that byte's sign bit eight times.
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE u32 permute_signs(u32 a, u32 b, u32 selector) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
    return out;
}

// The larger magnitude in each half; the sign is meaningless, and NaN loses.
DEVICE u32 max_magnitude(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 860
    u32 out;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
#else
    const auto larger = [](u32 x, u32 y) {
        x = x > 0x7F80u ? 0 : x, y = y > 0x7F80u ? 0 : y;
        return x > y ? x : y;
    };
    return larger(a & 0x7FFF, b & 0x7FFF) | larger(a >> 16 & 0x7FFF, b >> 16 & 0x7FFF) << 16;
#endif
}

DEVICE float e4m3_to_float(u32 byte) {
    const u32 magnitude = byte & 0x7F;
    const float normal = __uint_as_float((magnitude << 20) + (120u << 23));
    const float subnormal = __uint2float_rn(magnitude) * 0x1p-9f;
    const float value = magnitude == 0x7F ? __uint_as_float(0x7FC00000u) : magnitude < 8 ? subnormal : normal;
    return byte & 0x80 ? -value : value;
}

// NaN gives 0x7F. The sign, which only a meaningless amax brings about, is left out: bytes are indices.
DEVICE u32 float_to_e4m3(float v) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(v));
    return pair & 0x7F;
#else
    if (v != v) return E4M3_NAN;
    const float capped = fminf(fabsf(v), 448.0f);
    const u32 bits = __float_as_uint(capped);
    const u32 normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1)) >> 20) - (120u << 3);
    const u32 subnormal = __float_as_uint(__fadd_rn(capped, 16384.0f)) - __float_as_uint(16384.0f);
    return capped < 0x1p-6f ? subnormal : normal;
#endif
}

// The two levels of scaling, from the amax of an expert's operand.
struct GlobalScale {
    float block;   // S_enc * fl(1/6): a block's amax times this is its scale before rounding
    float decode;  // S_dec = 1 / S_enc

    // True divisions; multiplying by an approximate reciprocal changes bytes.
    DEVICE GlobalScale from_amax(float amax) {
        const float encode = amax == 0.0f ? 1.0f : fminf(__fdiv_rn(2688.0f, amax), FLOAT_MAX);
        return {__fmul_rn(encode, 1.0f / 6.0f), __frcp_rn(encode)};
    }

    // What the elements of a block with this scale byte are multiplied by.
    __device__ __forceinline__ float multiplier(u32 scale) const {
        return fminf(__frcp_rn(__fmul_rn(e4m3_to_float(scale), decode)), FLOAT_MAX);
    }
};

// Philox4x32-10. The round keys depend on the seed alone and are computed once for a launch, on the host.
struct RandomStream {
    u32 keys[20];
    u64 stream;
    const u64* shift;  // added to the stream, so that a recorded launch need not repeat its numbers; may be null

    __device__ __forceinline__ u64 shifted() const { return stream + (shift ? *shift : 0); }
};

struct RandomBlock {
    u32 words[4];  // byte i of the sixteen serves element i of the block
};

// `stream` is the shifted one.
DEVICE RandomBlock random_block(const RandomStream& random, u64 stream, u64 position) {
    u32 c0 = (u32)position, c1 = (u32)(position >> 32), c2 = (u32)stream, c3 = (u32)(stream >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 p0 = (u64)0xD2511F53u * c0, p1 = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(p1 >> 32) ^ c1 ^ random.keys[2 * round];
        c1 = (u32)p1;
        c2 = (u32)(p0 >> 32) ^ c3 ^ random.keys[2 * round + 1];
        c3 = (u32)p0;
    }
    return {{c0, c1, c2, c3}};
}

// The randomized Hadamard transform of sixteen values: signs, butterflies with strides 1, 2, 4, 8. The factor 1/4 is
// left to the caller. A mask known at compile time costs nothing: its signs turn into subtractions. MASK_AT_LAUNCH
// stands for `mask`.
constexpr u32 MASK_AT_LAUNCH = 0x10000;

template <u32 MASK>
DEVICE void hadamard(float (&v)[16], u32 mask) {
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        if constexpr (MASK == MASK_AT_LAUNCH)
            v[i] = __uint_as_float(__float_as_uint(v[i]) ^ (mask << (31 - i) & 0x80000000u));
        else if (MASK >> i & 1)
            v[i] = -v[i];
    }
#pragma unroll
    for (u32 stride = 1; stride < 16; stride *= 2)
#pragma unroll
        for (u32 i = 0; i < 16; i++)
            if (!(i & stride)) {
                const float a = v[i], b = v[i + stride];
                v[i] = __fadd_rn(a, b);
                v[i + stride] = __fsub_rn(a, b);
            }
}
