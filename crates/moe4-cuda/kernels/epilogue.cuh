// What becomes of a fragment of accumulators (fragment.cuh) in the products without an activation.
//
//   plain     out = bf16(alpha * acc (+ bias * weight))
//   gradient  dw = (dw or 0) + alpha * acc, in FP32 or rounded to BF16
//
// alpha is the product of the decode scales of two quantized operands; operands without a scale count as 1. Every
// element goes through the same operations in the same order as on the CPU.
#pragma once
#include "fragment.cuh"

// The amaxes [E] that the operands were quantized with; none for operands that were not.
struct Scales {
    const float* a;
    const float* b;
};

// Those of one expert, loaded ahead of what is done with them.
struct ExpertScales {
    float a, b;
    bool has_a, has_b;

    __device__ __forceinline__ float alpha() const {
        const float x = has_a ? GlobalScale::from_amax(a).decode : 1.0f;
        const float y = has_b ? GlobalScale::from_amax(b).decode : 1.0f;
        return fminf(__double2float_rn(__dmul_rn(x, y)), FLOAT_MAX);
    }
};

DEVICE ExpertScales load_scales(const Scales& scales, u32 expert) {
    return {scales.a ? __ldg(scales.a + expert) : 0.0f, scales.b ? __ldg(scales.b + expert) : 0.0f, scales.a != nullptr,
            scales.b != nullptr};
}

DEVICE float product_alpha(const Scales& scales, u32 expert) { return load_scales(scales, expert).alpha(); }

// 32 columns, rounded: the first lies at column `col` of an output with columns up to `end`. `bias` begins at the
// output's column 0, or there is none.
DEVICE void round_group(Words& w, const float (&acc)[4][4], u32 col, u32 end, float alpha, const float* bias,
                        const RowValues& weight) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        const float (&v)[4] = acc[k];
        if (bias) {
            const float2 b = load_columns(bias, col + 8 * k + 2 * lane_of_quad(), end);
#pragma unroll
            for (u32 half = 0; half < 2; half++)
                w[half][k] = to_bf16x2(__fadd_rn(__fmul_rn(alpha, v[2 * half]), __fmul_rn(b.x, weight.of[half])),
                                       __fadd_rn(__fmul_rn(alpha, v[2 * half + 1]), __fmul_rn(b.y, weight.of[half])));
        } else {
#pragma unroll
            for (u32 half = 0; half < 2; half++)
                w[half][k] = to_bf16x2(__fmul_rn(alpha, v[2 * half]), __fmul_rn(alpha, v[2 * half + 1]));
        }
    }
}

struct PlainOut {
    const float* bias;  // [E, cols], or none
    const float* prob;  // [T], or none: scales the bias
    u16* out;           // [T, cols]
    u32 cols;
};

// The weight of the bias of each row.
DEVICE RowValues bias_weights(const PlainOut& out, const FragmentRows& rows) {
    return out.prob ? load_row_values(out.prob, rows) : RowValues{{1.0f, 1.0f}};
}

// The fragment's first column is `col`.
template <u32 N8>
DEVICE void epilogue_plain(const float (&acc)[N8][4], const FragmentRows& rows, u32 expert, u32 col, float alpha,
                           const RowValues& weight, const PlainOut& out, Slabs slabs) {
    static_assert(N8 % 4 == 0, "whole groups of 32 columns");
    const float* const bias = out.bias ? out.bias + (u64)expert * out.cols : nullptr;
#pragma unroll 1
    for (u32 group = 0; group < N8 / 4; group++) {
        const u32 first = col + GROUP_COLS * group;
        if (first >= out.cols) break;
        float v[4][4];
        take_group<N8>(v, acc, group);
        Words w;
        round_group(w, v, first, out.cols, alpha, bias, weight);
        // Two slabs take turns: whoever writes one has met those who read it at the barrier of the other.
        const Slab slab = slabs[group % 2];
        slab.put(w);
        __syncwarp();
        slab.store(out.out, out.cols, rows, first, out.cols);
    }
    __syncwarp();
}

// Threads that have accumulators, the first of a block; all of a smaller one.
constexpr u32 EPILOGUE_THREADS = 256;

// Zeros in columns col..end of `rows` rows of a tensor [., cols].
DEVICE void store_zeros(u16* to, u64 cols, u64 row, u32 rows, u32 col, u32 end) {
    const u32 chunks = (end - col) / 8, threads = min(blockDim.x, EPILOGUE_THREADS);
    for (u32 i = threadIdx.x; i < rows * chunks; i += threads)
        *reinterpret_cast<uint4*>(to + (row + i / chunks) * cols + col + i % chunks * 8) = make_uint4(0, 0, 0, 0);
}

// A fragment of an expert's weight gradient [., cols] at `dw`, FP32. Two lanes that are neighbours exchange halves of
// two blocks of 8 columns, so that each has 16 bytes of a row.
template <u32 N8, bool ACCUMULATED>
DEVICE void epilogue_gradient(const float (&acc)[N8][4], const FragmentRows& rows, u32 col, u32 cols, float alpha,
                              float* dw, Slabs) {
    static_assert(N8 % 2 == 0, "blocks of 8 columns by twos");
    const bool odd = lane_of_quad() & 1;
#pragma unroll
    for (u32 j = 0; j < N8; j += 2) {
        const u32 at = col + 8 * (j + odd) + 4 * (lane_of_quad() / 2);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float v[4];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const float first = __fmul_rn(alpha, acc[j][2 * half + i]);
                const float second = __fmul_rn(alpha, acc[j + 1][2 * half + i]);
                const float got = __shfl_xor_sync(~0u, odd ? first : second, 1);
                v[i] = odd ? got : first;
                v[i + 2] = odd ? second : got;
            }
            if (!rows.has(half) || at >= cols) continue;
            float4* const to = reinterpret_cast<float4*>(dw + rows.row(half) * cols + at);
            const float4 before = ACCUMULATED ? *to : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            *to = make_float4(__fadd_rn(before.x, v[0]), __fadd_rn(before.y, v[1]), __fadd_rn(before.z, v[2]),
                              __fadd_rn(before.w, v[3]));
        }
    }
}

// The same in BF16: one rounding an update.
template <u32 N8, bool ACCUMULATED>
DEVICE void epilogue_gradient(const float (&acc)[N8][4], const FragmentRows& rows, u32 col, u32 cols, float alpha,
                              u16* dw, Slabs slabs) {
    static_assert(N8 % 4 == 0, "whole groups of 32 columns");
#pragma unroll 1
    for (u32 group = 0; group < N8 / 4; group++) {
        const u32 first = col + GROUP_COLS * group;
        if (first >= cols) break;
        float of_group[4][4];
        take_group<N8>(of_group, acc, group);
        const Slab slab = slabs[group % 2];
        if constexpr (ACCUMULATED) {
            slab.put(load_pieces(dw, cols, rows, first, cols));
            __syncwarp();
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++)
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                const float (&v)[4] = of_group[k];
                const u32 before = ACCUMULATED ? slab.pair(half, k) : 0;
                slab.pair(half, k) = to_bf16x2(__fadd_rn(lower(before), __fmul_rn(alpha, v[2 * half])),
                                               __fadd_rn(upper(before), __fmul_rn(alpha, v[2 * half + 1])));
            }
        __syncwarp();
        slab.store(dw, cols, rows, first, cols);
    }
    __syncwarp();
}
