// The largest finite magnitudes of a fragment's BF16 values, before and after the RHT along its 16 rows: bit for bit
// what group_amax and group_hadamard_amax find in the stored tensor.
//
// Rows of a tile begin at their expert's first row, so 16 rows of a fragment are one group of the transform, rows past
// the end being zeros. Row g lies in lanes 4g .. 4g + 3: butterflies with strides 1, 2 and 4 cross lanes, the last,
// with stride 8, joins the two rows of a lane. The larger magnitude of a + b and a - b is |a| + |b|, with the same
// rounding. Rounding to BF16 keeps the order, so only the maximum is divided by four and rounded. A NaN loses every
// comparison, as it should; a maximum that is infinite sends the warp back to what it has stored, for the finite ones.
//
// Compile-time choice: AMAX.
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

struct FragmentAmax {
    u32 before = 0;      // packed pairs
    float after = 0.0f;  // not yet divided by four
    u32 signs[2];        // of the lane's rows, for both values of a word
    u32 first_sign;      // for the step that crosses to the neighbouring row
    float later_signs[2];

    __device__ __forceinline__ FragmentAmax(u32 sign_mask) {
        const u32 g = lane_row(), both = 0x80008000u;
        signs[0] = sign_mask >> g & 1 ? both : 0;
        signs[1] = sign_mask >> (g + 8) & 1 ? both : 0;
        first_sign = g & 1 ? both : 0;
        later_signs[0] = g & 2 ? -1.0f : 1.0f;
        later_signs[1] = g & 4 ? -1.0f : 1.0f;
    }

    // The lower rows of a butterfly take the sum, the upper ones the difference from what the lower ones had.
    __device__ __forceinline__ float2 across_lanes(u32 word, u32 half) const {
        const u32 mine = word ^ signs[half], other = __shfl_xor_sync(~0u, mine, 4), signed_ = mine ^ first_sign;
        float2 v = make_float2(__fadd_rn(lower(other), lower(signed_)), __fadd_rn(upper(other), upper(signed_)));
#pragma unroll
        for (u32 step = 0; step < 2; step++) {
            // A product with one is exact.
            v.x = __fmaf_rn(v.x, later_signs[step], __shfl_xor_sync(~0u, v.x, 8 << step));
            v.y = __fmaf_rn(v.y, later_signs[step], __shfl_xor_sync(~0u, v.y, 8 << step));
        }
        return v;
    }

    // A pair of columns: row g and row g + 8, zeros past the end.
    __device__ __forceinline__ void add(u32 upper_row, u32 lower_row) {
        if constexpr (AMAX != NO_AMAX) before = max_magnitude(before, max_magnitude(upper_row, lower_row));
        if constexpr (AMAX == AMAX_RHT) {
            const float2 a = across_lanes(upper_row, 0), b = across_lanes(lower_row, 1);
            after = fmaxf(after, __fadd_rn(fabsf(a.x), fabsf(b.x)));
            after = fmaxf(after, __fadd_rn(fabsf(a.y), fabsf(b.y)));
        }
    }

    __device__ __forceinline__ void add(const Words& w) {
#pragma unroll
        for (u32 k = 0; k < 4; k++) add(w[0][k], w[1][k]);
    }

    __device__ __forceinline__ bool is_finite() const {
        return !has_infinity(before) && after < __uint_as_float(0x7F800000u);
    }
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
            if (fabsf(v[i]) < __uint_as_float(0x7F800000u)) found.after = fmaxf(found.after, fabsf(v[i]));
    }
}

// Into the expert's result. Most warps find one there that is as large already.
DEVICE void write_amax(u32* out, u32 value) {
    value = __reduce_max_sync(~0u, value);
    if (lane() == 0 && value > *const_cast<volatile u32*>(out)) atomicMax(out, value);
}

// The fragment's amaxes into those of the expert. The warp has stored `runs` times `width` columns of tensor `x`
// [., cols], from `col` on and `apart` columns from each other; columns from `end` of the first run on are not there.
DEVICE void finish_amax(FragmentAmax found, const AmaxOut& out, u32 expert, const u16* x, u64 cols,
                        const FragmentRows& rows, u32 col, u32 width, u32 end, u32 runs, u64 apart) {
    if constexpr (AMAX == NO_AMAX) return;
    if (__any_sync(~0u, !found.is_finite())) {
        __syncwarp();  // what other lanes have stored
        found.before = 0, found.after = 0.0f;
#pragma unroll 1
        for (u32 i = lane(); i < width * runs; i += 32) {
            const u32 at = col + i % width;
            if (at < end) add_finite(found, x + i / width * apart, cols, rows, at, out.sign_mask);
        }
    }
    const u32 before = larger_half(found.before);
    write_amax(out.amax + expert, before);
    if constexpr (AMAX == AMAX_RHT)
        write_amax(out.amax_rht + expert, to_bf16x2(0.0f, __fmul_rn(found.after, 0.25f)) & 0xFFFF0000u);
    if constexpr (AMAX == AMAX_BOUND)
        write_amax(out.amax_rht + expert, __float_as_uint(fminf(__fmul_rn(4.0f, __uint_as_float(before)), FLOAT_MAX)));
}
