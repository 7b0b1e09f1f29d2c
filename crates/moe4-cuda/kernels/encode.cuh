// A block of sixteen BF16 values to E2M1 codes.
//
// Eight elements make one 32-bit word of codes, element k in bits 4k..4k+3; signs and magnitudes are treated apart.
// The conversion instruction is used where it exists (nearest rounding on sm_100 and later). Elsewhere:
//
//   nearest     E2M1's codes are linear in v on [0, 2], [2, 4] and [4, 6], each time half as steep, so that
//                   code = round(min(2v, v + 2, v/2 + 4))
//               Each line is added to 1.5 * 2^23 by one operation that rounds to nearest even at the units; the smallest
//               is taken afterwards, since rounding keeps the order. Lines meet at even codes, so ties fall as E2M1 wants
//               them. Up to v < 7 there is no need to saturate; see `Scaling::common`.
//   stochastic  t = |v| + r/256 * step, then down to the grid. `step` is half the power of two below |v|, at least 1/2.
//               E2M1's subnormals line up with those of FP32 after a multiplication by 2^-126: the code is then the
//               exponent and the first bit of the mantissa.
#pragma once
#include "numerics.cuh"

constexpr bool BY_INSTRUCTION = __CUDA_ARCH__ >= 1000;

// Codes of a block, elements 0..7 and 8..15.
struct Codes {
    u32 low, high;
};

// Eight elements as neighbours in memory: (0,1) (2,3) (4,5) (6,7).
struct Neighbours {
    u32 pairs[4];

    __device__ __forceinline__ void magnitudes(float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 m = pairs[i] & 0x7FFF7FFFu;
            v[2 * i] = lower(m), v[2 * i + 1] = upper(m);
        }
    }
    // Signs at bits 3, 7, ... 31.
    __device__ __forceinline__ u32 with_signs(u32 word) const {
        const u32 a = permute_signs(pairs[0], pairs[1], 0xFBD9), b = permute_signs(pairs[2], pairs[3], 0xFBD9);
        const u32 even = permute_bytes(a, b, 0x5410), odd = permute_bytes(a, b, 0x7632);
        return word | (even & 0x08080808u) | (odd & 0x80808080u);
    }
};

// Eight elements in the order in which signs are gathered fastest: (0,2) (4,6) (1,3) (5,7).
struct Interleaved {
    u32 pairs[4];

    __device__ __forceinline__ void magnitudes(float (&v)[8]) const {
        u32 m[4];
#pragma unroll
        for (int i = 0; i < 4; i++) m[i] = pairs[i] & 0x7FFF7FFFu;
        v[0] = lower(m[0]), v[1] = lower(m[2]), v[2] = upper(m[0]), v[3] = upper(m[2]);
        v[4] = lower(m[1]), v[5] = lower(m[3]), v[6] = upper(m[1]), v[7] = upper(m[3]);
    }
    __device__ __forceinline__ u32 with_signs(u32 word) const {
        const u32 even = permute_signs(pairs[0], pairs[1], 0xFDB9), odd = permute_signs(pairs[2], pairs[3], 0xFDB9);
        return word | (even & 0x08080808u) | (odd & 0x80808080u);
    }
};

// The bits of the largest magnitude of a block as those of an FP32 number; not finite if any element is not.
template <class Eight>
DEVICE u32 block_amax_bits(const Eight& low, const Eight& high) {
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) m = __vimax3_u16x2(m, low.pairs[i] & 0x7FFF7FFFu, high.pairs[i] & 0x7FFF7FFFu);
    return max(m << 16, m & 0xFFFF0000u);
}

// What the blocks of one expert's operand share: the factor of a block's amax, and for each scale byte what its elements
// are multiplied by. After a transform both are a quarter of that and the elements are left four times as large: exact,
// as long as nothing is near the ends of the range of BF16; see `is_usual`.
struct Scaling {
    const float* multipliers;  // [128]
    float block;

    // The block's amax relative to the global scale. Rounded to E4M3 it is the scale byte.
    __device__ __forceinline__ float relative(u32 amax_bits) const { return __fmul_rn(__uint_as_float(amax_bits), block); }
};

struct Multipliers {
    float of_scale[128];

    // By all threads of a block; they must meet at a barrier before the table is read.
    __device__ __forceinline__ Scaling fill(float amax, bool transformed) {
        const GlobalScale global = GlobalScale::from_amax(amax);
        const float factor = transformed ? 0.25f : 1.0f;
        if (threadIdx.x < 128) of_scale[threadIdx.x] = __fmul_rn(global.multiplier(threadIdx.x), factor);
        return {of_scale, __fmul_rn(global.block, factor)};
    }
};

// Whether a block may take the short way. Nearest: no element can reach 7, since the scale is neither subnormal, where its
// rounding moves elements by up to half, nor far saturated. Transformed: no element that counts is subnormal when divided
// by four, and none is infinite for not having been divided yet.
template <bool STOCHASTIC, bool TRANSFORMED>
DEVICE bool is_usual(u32 amax_bits, float relative) {
    constexpr u32 LEAST = (127u - 100) << 23, INFINITE = 0x7F800000u;
    return (STOCHASTIC || (relative >= 0x1p-6f && relative < 500.0f)) &&
           (!TRANSFORMED || amax_bits - LEAST < INFINITE - LEAST);
}

// The scale byte; 0x7F if the amax is not finite, although it may be infinite and its product as well.
DEVICE u32 scale_byte(u32 amax_bits, float relative) {
    return amax_bits >= 0x7F800000u ? E4M3_NAN : float_to_e4m3(relative);
}

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23, where one unit in the last place is 1
constexpr u32 MAGIC_BITS = 0x4B400000u;

// MAGIC_BITS plus the code of magnitude v, or plus something larger than 7 if v >= 7.
DEVICE u32 nearest_code(float v) {
    const int a = __float_as_int(__fmaf_rn(v, 2.0f, MAGIC));
    const int b = __float_as_int(__fadd_rn(v, MAGIC + 2.0f));
    const int c = __float_as_int(__fmaf_rn(v, 0.5f, MAGIC + 4.0f));
    return __vimin3_s32(a, b, c);
}

template <bool SATURATE, class Eight>
DEVICE u32 encode_nearest(const Eight& eight, float m) {
    float v[8];
    eight.magnitudes(v);
    u32 word = 0;
    if constexpr (BY_INSTRUCTION) {
#if __CUDA_ARCH__ >= 1000
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = __fmul_rn(v[i], m);
        asm("{\n"
            ".reg .b8 b0, b1, b2, b3;\n"
            "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
            "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
            "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
            "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
            "mov.b32 %0, {b0, b1, b2, b3};\n"
            "}"
            : "=r"(word)
            : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
#endif
    } else {
        // What the shifts leave of MAGIC_BITS in the word is taken out beforehand.
        word = 0u - (MAGIC_BITS + (MAGIC_BITS << 4) + (MAGIC_BITS << 8));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float scaled = __fmul_rn(v[i], m);
            word += nearest_code(SATURATE ? fminf(scaled, 6.0f) : scaled) << (4 * i);
        }
    }
    return eight.with_signs(word);
}

template <class Eight>
DEVICE u32 encode_stochastic(const Eight& eight, float m, u32 random_low, u32 random_high) {
    float v[8];
    eight.magnitudes(v);
    u32 z[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float a = fminf(__fmul_rn(v[k], m), 6.0f);
        const float power = fmaxf(__uint_as_float(__float_as_uint(a) & 0x7F800000u), 1.0f);
        // 2^14 + r * 2^-9: the last byte of this float is the random byte.
        const u32 byte = permute_bytes(k < 4 ? random_low : random_high, 0x46800000u, 0x7650 + (k & 3));
        const float t = __fmaf_rn(__fadd_rn(__uint_as_float(byte), -16384.0f), power, a);
        z[k] = __float_as_uint(__fmul_rz(t, 0x1p-126f));
    }
    // Codes lie in bits 22..24; the upper halves of elements k and k + 4 share a word.
    u32 word = (permute_bytes(z[0], z[4], 0x7632) >> 6) & 0x00070007u;
    word |= (permute_bytes(z[1], z[5], 0x7632) >> 2) & 0x00700070u;
    word |= (permute_bytes(z[2], z[6], 0x7632) << 2) & 0x07000700u;
    word |= (permute_bytes(z[3], z[7], 0x7632) << 6) & 0x70007000u;
    return eight.with_signs(word);
}

// Codes and scale byte of one block.
struct Quantized {
    Codes codes;
    u32 scale;
};

// Any block. `position` is where its random bytes are found; `factor` undoes that of the scaling.
template <bool STOCHASTIC, class Eight>
DEVICE Quantized quantize_any(const Eight& low, const Eight& high, const Scaling& scaling, float factor,
                              const RandomStream& random, u64 position) {
    const u32 amax = block_amax_bits(low, high);
    const u32 scale = scale_byte(amax, __fmul_rn(__uint_as_float(amax), __fmul_rn(scaling.block, factor)));
    if (scale == E4M3_NAN) return {{0, 0}, scale};
    const float m = __fmul_rn(scaling.multipliers[scale], factor);
    if constexpr (STOCHASTIC) {
        const RandomBlock r = random_block(random, position);
        return {{encode_stochastic(low, m, r.words[0], r.words[1]), encode_stochastic(high, m, r.words[2], r.words[3])},
                scale};
    } else {
        return {{encode_nearest<true>(low, m), encode_nearest<true>(high, m)}, scale};
    }
}

// One block by the short way, if it may take it; else by `rare`, which is kept out of line.
template <bool STOCHASTIC, bool TRANSFORMED, class Eight, class Rare>
DEVICE Quantized quantize(const Eight& low, const Eight& high, const Scaling& scaling, const RandomStream& random,
                          u64 position, Rare rare) {
    const u32 amax = block_amax_bits(low, high);
    const float relative = scaling.relative(amax);
    if (!is_usual<STOCHASTIC, TRANSFORMED>(amax, relative)) return rare();
    if constexpr (STOCHASTIC) {
        const u32 scale = TRANSFORMED ? float_to_e4m3(relative) : scale_byte(amax, relative);
        const float m = scaling.multipliers[scale];
        const RandomBlock r = random_block(random, position);
        const u32 keep = TRANSFORMED || scale != E4M3_NAN ? ~0u : 0u;
        return {{encode_stochastic(low, m, r.words[0], r.words[1]) & keep,
                 encode_stochastic(high, m, r.words[2], r.words[3]) & keep},
                scale};
    } else {
        const u32 scale = float_to_e4m3(relative);
        const float m = scaling.multipliers[scale];
        return {{encode_nearest<false>(low, m), encode_nearest<false>(high, m)}, scale};
    }
}
