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

// Two neighbouring columns, rounded, of the lane's row g + 8 * half.
DEVICE u32 rounded_pair(const float (&v)[4], u32 half, float alpha) {
    return to_bf16x2(__fmul_rn(alpha, v[2 * half]), __fmul_rn(alpha, v[2 * half + 1]));
}
DEVICE u32 biased_pair(const float (&v)[4], u32 half, float alpha, float2 bias, const RowValues& weight) {
    return to_bf16x2(__fadd_rn(__fmul_rn(alpha, v[2 * half]), __fmul_rn(bias.x, weight.of[half])),
                     __fadd_rn(__fmul_rn(alpha, v[2 * half + 1]), __fmul_rn(bias.y, weight.of[half])));
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

// Columns of a fragment whose first is `col` to a tensor [., cols], a panel at a time: `word(half, j, before)` is the
// pair of columns of accumulators j and row g + 8 * half, where `before` is what the tensor has there, if it is READ.
// All is written out, which these epilogues are short enough for.
template <u32 N8, bool READ, class Word>
DEVICE void store_words(u16* to, u64 cols, const FragmentRows& rows, u32 col, Slabs slabs, Word word) {
    static_assert(N8 % PANEL_N8 == 0, "whole panels");
    const PanelPieces pieces(to, cols, rows, col);
#pragma unroll
    for (u32 p = 0; p < N8 / PANEL_N8; p++) {
        if (col + PANEL_COLS * p >= cols) break;
        // Two panels take turns: whoever writes one has met those who read it at the barrier of the other.
        const Panel panel = slabs.panel(p % 2);
        if constexpr (READ) {
            pieces.of_panel(p, [&](u32 i, const uint4* from) { panel.piece(i) = *from; });
            __syncwarp();
        }
#pragma unroll
        for (u32 k = 0; k < PANEL_N8; k++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32& pair = panel.pair(half, k);
                pair = word(half, PANEL_N8 * p + k, READ ? pair : 0);
            }
        __syncwarp();
        uint4 v[PANEL_PIECES];
#pragma unroll
        for (u32 i = 0; i < PANEL_PIECES; i++) v[i] = panel.piece(i);
        pieces.of_panel(p, [&](u32 i, uint4* place) { *place = v[i]; });
    }
    __syncwarp();
}

// The fragment's first column is `col`.
template <u32 N8>
DEVICE void epilogue_plain(const float (&acc)[N8][4], const FragmentRows& rows, u32 expert, u32 col, float alpha,
                           const RowValues& weight, const PlainOut& out, Slabs slabs) {
    if (out.bias) {
        const float* const bias = out.bias + (u64)expert * out.cols;
        store_words<N8, false>(out.out, out.cols, rows, col, slabs, [&](u32 half, u32 j, u32) {
            const float2 b = load_columns(bias, col + 8 * j + 2 * lane_of_quad(), out.cols);
            return biased_pair(acc[j], half, alpha, b, weight);
        });
    } else {
        store_words<N8, false>(out.out, out.cols, rows, col, slabs,
                               [&](u32 half, u32 j, u32) { return rounded_pair(acc[j], half, alpha); });
    }
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
    store_words<N8, ACCUMULATED>(dw, cols, rows, col, slabs, [&](u32 half, u32 j, u32 before) {
        return to_bf16x2(__fadd_rn(lower(before), __fmul_rn(alpha, acc[j][2 * half])),
                         __fadd_rn(upper(before), __fmul_rn(alpha, acc[j][2 * half + 1])));
    });
}
