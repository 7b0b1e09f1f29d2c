// The largest finite magnitudes of a fragment's BF16 values, before and after the RHT along its 16 rows: bit for bit
// what group_amax and group_hadamard_amax find in the stored tensor.
//
// Rows of a tile begin at their expert's first row, so 16 rows of a fragment are one group of the transform, rows past
// the end being zeros. The transform takes columns from slabs, a lane a column or two. Of its last butterflies only the
// larger magnitude counts: that of a + b and a - b is |a| + |b|, with the same rounding. Rounding to BF16 keeps the
// order, so only the maximum is divided by four and rounded. A maximum that is not finite sends the warp back to what
// it has stored, for the finite ones.
//
// Compile-time choices: AMAX, SIGN_MASK.
#pragma once
#include "fragment.cuh"
#include "reduce.cuh"

constexpr u32 NO_AMAX = 0, AMAX_ONLY = 1, AMAX_RHT = 2, AMAX_BOUND = 3;  // the last: four times the amax

// The launch clears both.
struct AmaxOut {
    u32* amax;      // [E]
    u32* amax_rht;  // [E]
    u32 sign_mask;
};

// The larger of `m` and the magnitudes of sixteen values after the transform, not yet divided by four, as integers:
// three at a time, and NaN is larger than infinity.
DEVICE int transformed_max(int m, float (&v)[FRAGMENT_ROWS], u32 sign_mask) {
#pragma unroll
    for (u32 i = 0; i < FRAGMENT_ROWS; i++) {
        if constexpr (SIGN_MASK == MASK_AT_LAUNCH)
            v[i] = __uint_as_float(__float_as_uint(v[i]) ^ (sign_mask << (31 - i) & 0x80000000u));
        else if (SIGN_MASK >> i & 1)
            v[i] = -v[i];
    }
#pragma unroll
    for (u32 stride = 1; stride < FRAGMENT_ROWS / 2; stride *= 2)
#pragma unroll
        for (u32 i = 0; i < FRAGMENT_ROWS; i++)
            if (!(i & stride)) {
                const float a = v[i], b = v[i + stride];
                v[i] = __fadd_rn(a, b);
                v[i + stride] = __fsub_rn(a, b);
            }
    const auto larger = [&](u32 i) { return __float_as_int(__fadd_rn(fabsf(v[i]), fabsf(v[i + FRAGMENT_ROWS / 2]))); };
#pragma unroll
    for (u32 i = 0; i < FRAGMENT_ROWS / 2; i += 2) m = __vimax3_s32(m, larger(i), larger(i + 1));
    return m;
}

struct FragmentAmax {
    u32 before = 0;  // packed pairs
    int after = 0;   // bits of FP32, not yet divided by four

    __device__ __forceinline__ void add(u32 word) {
        if constexpr (AMAX != NO_AMAX) before = max_magnitude(before, word);
    }

    // The columns of a slab, one for each lane.
    __device__ __forceinline__ void add_columns(Slab slab, u32 sign_mask) {
        if constexpr (AMAX != AMAX_RHT) return;
        const u32 selector = lane() < 16 ? 0x1044 : 0x3244;  // the lower or the upper half of a word, behind zeros
        u32 words[FRAGMENT_ROWS];
        get_columns(words, slab, slab);
        float v[FRAGMENT_ROWS];
#pragma unroll
        for (u32 i = 0; i < FRAGMENT_ROWS; i++) v[i] = __uint_as_float(permute_bytes(words[i], 0, selector));
        after = transformed_max(after, v, sign_mask);
    }

    // The columns of two slabs, two for each lane.
    __device__ __forceinline__ void add_columns(Slab first, Slab second, u32 sign_mask) {
        if constexpr (AMAX != AMAX_RHT) return;
        u32 words[FRAGMENT_ROWS];
        get_columns(words, first, second);
        float low[FRAGMENT_ROWS], high[FRAGMENT_ROWS];
#pragma unroll
        for (u32 i = 0; i < FRAGMENT_ROWS; i++) low[i] = lower(words[i]), high[i] = upper(words[i]);
        after = transformed_max(after, low, sign_mask);
        after = transformed_max(after, high, sign_mask);
    }

    __device__ __forceinline__ bool is_finite() const { return !has_infinity(before) && after < 0x7F800000; }
};

// A column's finite magnitudes, read back from the tensor.
DEVICE void add_finite(FragmentAmax& found, const u16* x, u64 cols, const FragmentRows& rows, u32 col, u32 sign_mask) {
    float v[FRAGMENT_ROWS];
#pragma unroll
    for (u32 i = 0; i < FRAGMENT_ROWS; i++) {
        const u32 bits = i < rows.count ? x[(rows.first + i) * cols + col] : 0;
        found.before = max_finite(found.before, bits);
        v[i] = lower(bits);
    }
    if constexpr (AMAX == AMAX_RHT) {
        hadamard<MASK_AT_LAUNCH>(v, sign_mask);
#pragma unroll
        for (u32 i = 0; i < FRAGMENT_ROWS; i++)
            if (fabsf(v[i]) < __uint_as_float(0x7F800000u)) found.after = max(found.after, __float_as_int(fabsf(v[i])));
    }
}

// Into the expert's result, which was `seen` some time ago. Most warps have seen one that is as large already.
DEVICE void write_amax(u32* out, u32 seen, u32 value) {
    value = __reduce_max_sync(~0u, value);
    if (lane() == 0 && value > seen) atomicMax(out, value);
}

// The fragment's amaxes into those of the expert. The warp has stored `runs` times `width` columns of tensor `x`
// [., cols], from `col` on and `apart` columns from each other; columns from `end` of the first run on are not there.
DEVICE void finish_amax(FragmentAmax found, const AmaxOut& out, u32 expert, const u16* x, u64 cols,
                        const FragmentRows& rows, u32 col, u32 width, u32 end, u32 runs, u64 apart) {
    if constexpr (AMAX == NO_AMAX) return;
    u32 *const amax = out.amax + expert, *const amax_rht = out.amax_rht + expert;
    // Both before anything waits for one of them.
    const u32 seen = *const_cast<volatile u32*>(amax);
    const u32 seen_rht = AMAX == AMAX_ONLY ? 0 : *const_cast<volatile u32*>(amax_rht);
    if (__any_sync(~0u, !found.is_finite())) {
        __syncwarp();  // what other lanes have stored
        found = {};
#pragma unroll 1
        for (u32 i = lane(); i < width * runs; i += 32) {
            const u32 at = col + i % width;
            if (at < end) add_finite(found, x + i / width * apart, cols, rows, at, out.sign_mask);
        }
    }
    const u32 before = larger_half(found.before);
    write_amax(amax, seen, before);
    if constexpr (AMAX == AMAX_RHT)
        write_amax(amax_rht, seen_rht, to_bf16x2(0.0f, __fmul_rn(__int_as_float(found.after), 0.25f)) & 0xFFFF0000u);
    if constexpr (AMAX == AMAX_BOUND)
        write_amax(amax_rht, seen_rht, __float_as_uint(fminf(__fmul_rn(4.0f, __uint_as_float(before)), FLOAT_MAX)));
}
