// A block of sixteen BF16 values to E2M1 codes.
//
// Eight elements make one 32-bit word of codes, element k in bits 4k..4k+3; signs and magnitudes are treated apart.
// The conversion instruction is used where it exists (nearest rounding on sm_100 and later). Elsewhere:
//
//   nearest     E2M1's codes are linear in v on [0, 2], [2, 4] and [4, 6], each time half as steep, so that
//                   code = round(min(2v, v + 2, v/2 + 4))
//               Each line is added to 1.5 * 2^23 by one operation that rounds to nearest even at the units; the
//               smallest is taken afterwards, since rounding keeps the order. Lines meet at even codes, so ties fall as
//               E2M1 wants them. Up to v < 7 there is no need to saturate; see `is_usual`.
//   stochastic  t = |v| + r/256 * step, then down to the grid. `step` is half the power of two below |v|, at least 1/2.
//               Above 1 that is an addition to the bits of v, which carries into the exponent as it should; below 1 it
//               is one in FP32; each is the larger one where it is meant. E2M1's subnormals line up with those of FP32
//               after a multiplication by a power of two: the code is then the exponent and the first bit of the
//               mantissa.
//
// The value of a code in BF16 is found the same way: bits 6..8 of a BF16 number, all others zero, are 2^-126 of what
// they are in E2M1, subnormals among them. Two multiplications, since block scales reach 448, give code times block
// scale: one by 2^119 of the scale, one by 2^7. Both are exact, and zeros keep their signs. Codes need not be packed
// for it.
#pragma once
#include "numerics.cuh"

// Codes of a block, elements 0..7 and 8..15.
struct Codes {
    u32 low, high;
};

// Eight elements as neighbours in memory: (0,1) (2,3) (4,5) (6,7).
struct Neighbours {
    static constexpr bool IN_ORDER = true;
    u32 pairs[4];

    DEVICE void unpack(const u32 (&m)[4], float (&v)[8]) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[2 * i] = lower(m[i]), v[2 * i + 1] = upper(m[i]);
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
    static constexpr bool IN_ORDER = false;
    u32 pairs[4];

    DEVICE void unpack(const u32 (&m)[4], float (&v)[8]) {
        v[0] = lower(m[0]), v[1] = lower(m[2]), v[2] = upper(m[0]), v[3] = upper(m[2]);
        v[4] = lower(m[1]), v[5] = lower(m[3]), v[6] = upper(m[1]), v[7] = upper(m[3]);
    }
    __device__ __forceinline__ u32 with_signs(u32 word) const {
        const u32 even = permute_signs(pairs[0], pairs[1], 0xFDB9), odd = permute_signs(pairs[2], pairs[3], 0xFDB9);
        return word | (even & 0x08080808u) | (odd & 0x80808080u);
    }
};

// A block and its magnitudes, in pairs.
template <class Eight>
struct Block {
    Eight low, high;
    u32 low_magnitudes[4], high_magnitudes[4];

    __device__ __forceinline__ Block(const Eight& low, const Eight& high) : low(low), high(high) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // By assembly, or the compiler takes the signs off each element once more.
            asm("and.b32 %0, %1, 0x7FFF7FFF;" : "=r"(low_magnitudes[i]) : "r"(low.pairs[i]));
            asm("and.b32 %0, %1, 0x7FFF7FFF;" : "=r"(high_magnitudes[i]) : "r"(high.pairs[i]));
        }
    }

    // The bits of the largest magnitude as those of an FP32 number; not finite if any element is not.
    __device__ __forceinline__ u32 amax_bits() const {
        u32 m = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) m = __vimax3_u16x2(m, low_magnitudes[i], high_magnitudes[i]);
        return max(m << 16, m & 0xFFFF0000u);
    }
};

// What the blocks of one expert's operand share: the factor of a block's amax, and for each scale byte what its
// elements are multiplied by. After a transform both are a quarter of that and the elements are left four times as
// large: exact, unless an element that counts is subnormal when divided by four, which only an amax below 2^-80 allows.
// Stochastic rounding wants 2^-8 of the multiplier, which is exact unless the amax is above 2^100. A quarter of the
// smallest multipliers is not exact either, but they are for blocks above 2^126, where a transformed value four times
// as large is infinite.
struct Scaling {
    float multipliers[128];
    float block;  // NaN if no block may take the short way
    float exact_block;
    u64 stream;  // of random numbers, if there are any

    // By 128 threads, of which this is number `thread`; all must meet at a barrier before it is used.
    __device__ __forceinline__ void fill(u32 thread, float amax, bool transformed, bool stochastic) {
        const GlobalScale global = GlobalScale::from_amax(amax);
        const float factor = transformed ? 0.25f : 1.0f;
        multipliers[thread] = __fmul_rn(global.multiplier(thread), factor);
        if (thread != 0) return;
        exact_block = __fmul_rn(global.block, factor);
        const bool short_way = !(transformed && amax < 0x1p-80f) && !(stochastic && amax > 0x1p100f);
        block = short_way ? exact_block : __uint_as_float(0x7FC00000u);
    }
};

// Whether a block of this amax, relative to the global scale, may take the short way: it is finite, and no element can
// reach 7, since the scale is neither subnormal, where its rounding moves elements by up to half, nor far saturated. A
// transformed block that is infinite only for not having been divided by four is not usual either.
DEVICE bool is_usual(float relative) {
    constexpr u32 LEAST = 0x3C800000u, BOUND = 0x43FA0000u;  // 2^-6, 500
    return __float_as_uint(relative) - LEAST < BOUND - LEAST;
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

// What is wanted of a block: codes packed, BF16 values, or both.
enum Form { PACKED = 1, VALUES = 2 };

// Codes, scale byte and values of one block; parts that nobody wanted are meaningless.
struct Quantized {
    Codes codes;
    u32 scale;
    u32 values[8];  // sixteen in pairs, neighbours in memory
};

// The values of two codes, one in bits 6..8 of each half, with the signs of `x`. `scale_pair` comes from `value_scale`.
DEVICE u32 value_pair(u32 codes, u32 x, u32 scale_pair) {
    return multiply_bf16x2(multiply_bf16x2(codes | (x & 0x80008000u), scale_pair), 0x43004300u);
}

// 2^119 times a scale that is neither subnormal nor NaN, in both halves.
DEVICE u32 value_scale(u32 scale) { return scale * 0x00100010u + 0x77807780u; }

// The values of the eight codes of a word, whose signs do not count.
DEVICE void values_of_word(u32 word, const u32 (&x)[4], u32 scale_pair, u32* values) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 byte = permute_bytes(word, 0, 0x4440 + i);
        values[i] = value_pair((byte * 0x00040040u) & 0x01C001C0u, x[i], scale_pair);
    }
}

// Magnitudes of the codes of eight elements, which `m` is multiplied with; their values if the form has them, with the
// signs of `signs`.
template <int FORM, bool SATURATE>
DEVICE u32 nearest_codes(const float (&x)[8], float m, const u32 (&signs)[4], u32 scale_pair, u32* values) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __fmul_rn(x[i], m);
#if __CUDA_ARCH__ >= 1000
    u32 word;
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
    if constexpr (FORM & VALUES) values_of_word(word, signs, scale_pair, values);
    return word;
#else
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 even = nearest_code(SATURATE ? fminf(v[2 * i], 6.0f) : v[2 * i]),
                  odd = nearest_code(SATURATE ? fminf(v[2 * i + 1], 6.0f) : v[2 * i + 1]);
        // The lower half of MAGIC_BITS is zero, so that of a sum of two codes, one of them shifted, holds them alone.
        pair[i] = even + (odd << 4);
        // Here the upper half is that of MAGIC_BITS and the odd code; what does not belong is taken off again.
        if constexpr (FORM & VALUES)
            values[i] = value_pair((even + odd * 0x10000u) * 64 - MAGIC_BITS * 64, signs[i], scale_pair);
    }
    return permute_bytes(permute_bytes(pair[0], pair[1], 0x0040), permute_bytes(pair[2], pair[3], 0x0040), 0x5410);
#endif
}

// Likewise, rounded at random: a byte for each element, that of element 0 lowest. Without saturation, `m` is 2^-8 of
// what the elements are multiplied by. Values alone are not packed before.
template <int FORM, bool SATURATE>
DEVICE u32 stochastic_codes(const float (&x)[8], float m, u32 random_low, u32 random_high, const u32 (&signs)[4],
                            u32 scale_pair, u32* values) {
    u32 z[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float a = __fmul_rn(x[k], m);
        if (SATURATE) a = __fmul_rn(fminf(a, 6.0f), 0x1p-8f);
        // r << 8: as a float r * 2^-141, so that the product is r * 2^-17.
        const u32 r = permute_bytes(k < 4 ? random_low : random_high, 0, 0x4404 + ((k & 3) << 4));
        const u32 below_one = __float_as_uint(__fmaf_rn(__uint_as_float(r), 0x1p124f, a));
        const u32 above_one = __float_as_uint(a) + (r << 6);
        z[k] = __float_as_uint(__fmul_rz(__uint_as_float(max(below_one, above_one)), 0x1p-118f));
    }
    // Codes lie in bits 22..24, so that the upper halves of two elements share a word; what is above 6 reaches 8 at
    // most.
    const auto pair = [&](int i, int j) { return __vminu2(permute_bytes(z[i], z[j], 0x7632), 0x01FF01FFu); };
    if constexpr (FORM == VALUES) {
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = value_pair(pair(2 * i, 2 * i + 1) & 0x01C001C0u, signs[i], scale_pair);
        return 0;
    } else {
        u32 word = (pair(0, 4) >> 6) & 0x00070007u;
        word |= (pair(1, 5) >> 2) & 0x00700070u;
        word |= (pair(2, 6) << 2) & 0x07000700u;
        word |= (pair(3, 7) << 6) & 0x70007000u;
        if constexpr (FORM & VALUES) values_of_word(word, signs, scale_pair, values);
        return word;
    }
}

// Codes and, if wanted, values of a block. Values are of a scale that is neither subnormal nor NaN, and of elements
// that are neighbours.
template <int FORM, bool SATURATE, class Eight>
DEVICE Quantized encode_nearest(const Block<Eight>& block, float m, u32 scale) {
    static_assert(!(FORM & VALUES) || Eight::IN_ORDER, "values are signed as they come");
    float low[8], high[8];
    Eight::unpack(block.low_magnitudes, low);
    Eight::unpack(block.high_magnitudes, high);
    const u32 scale_pair = value_scale(scale);
    Quantized q;
    q.scale = scale;
    const u32 l = nearest_codes<FORM, SATURATE>(low, m, block.low.pairs, scale_pair, q.values);
    const u32 h = nearest_codes<FORM, SATURATE>(high, m, block.high.pairs, scale_pair, q.values + 4);
    q.codes = {block.low.with_signs(l), block.high.with_signs(h)};
    return q;
}

// `position` is where the block's random bytes are found.
template <int FORM, bool SATURATE, class Eight>
DEVICE Quantized encode_stochastic(const Block<Eight>& block, float m, u32 scale, const RandomStream& random,
                                   u64 stream, u64 position) {
    static_assert(!(FORM & VALUES) || Eight::IN_ORDER, "values are signed as they come");
    const RandomBlock r = random_block(random, stream, position);
    const float scaled = SATURATE ? m : __fmul_rn(m, 0x1p-8f);
    float low[8], high[8];
    Eight::unpack(block.low_magnitudes, low);
    Eight::unpack(block.high_magnitudes, high);
    const u32 scale_pair = value_scale(scale);
    const u32(&w)[4] = r.words;
    Quantized q;
    q.scale = scale;
    const u32 l = stochastic_codes<FORM, SATURATE>(low, scaled, w[0], w[1], block.low.pairs, scale_pair, q.values);
    const u32 h =
        stochastic_codes<FORM, SATURATE>(high, scaled, w[2], w[3], block.high.pairs, scale_pair, q.values + 4);
    q.codes = {block.low.with_signs(l), block.high.with_signs(h)};
    return q;
}

// Any block, packed. `factor` undoes that of the scaling; `position` is where the random bytes are found.
template <bool STOCHASTIC, class Eight>
DEVICE Quantized quantize_any(const Block<Eight>& block, const Scaling& scaling, float factor,
                              const RandomStream& random, u64 position) {
    const u32 amax = block.amax_bits();
    if (amax >= 0x7F800000u) return {{0, 0}, E4M3_NAN};
    const u32 scale = float_to_e4m3(__fmul_rn(__uint_as_float(amax), __fmul_rn(scaling.exact_block, factor)));
    const float m = __fmul_rn(scaling.multipliers[scale], factor);
    if constexpr (STOCHASTIC)
        return encode_stochastic<PACKED, true>(block, m, scale, random, scaling.stream, position);
    else
        return encode_nearest<PACKED, true>(block, m, scale);
}

// One block by the short way; what comes out is meaningless if that is not `usual`. No branch: so the work of one block
// hides the latencies of another.
template <bool STOCHASTIC, int FORM, class Eight>
DEVICE Quantized quantize_usual(const Block<Eight>& block, const Scaling& scaling, const RandomStream& random,
                                u64 position, bool& usual) {
    const float relative = __fmul_rn(__uint_as_float(block.amax_bits()), scaling.block);
    usual = is_usual(relative);
    const u32 scale = float_to_e4m3(relative);
    const float m = scaling.multipliers[scale];
    if constexpr (STOCHASTIC)
        return encode_stochastic<FORM, false>(block, m, scale, random, scaling.stream, position);
    else
        return encode_nearest<FORM, false>(block, m, scale);
}
