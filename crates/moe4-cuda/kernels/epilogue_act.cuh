// FC1's epilogue on a fragment of accumulators: c = bf16(alpha * acc + b1), h = bf16(act(c) * prob), and h's amaxes.
//
// The activation reads the rounded c, which is what the backward has. See glu.cuh for which columns a fragment holds.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX (of h).
#pragma once
#include "epilogue.cuh"
#include "fragment_amax.cuh"
#include "glu.cuh"

struct ActOut {
    const float* b1;    // [E, N1], or none
    const float* prob;  // [T]
    u16* c;             // [T, N1]
    u16* h;             // [T, F]
    u32 ffn;
    ActivationParameters activation;
    AmaxOut h_amax;
};

// Elementwise, a word of c is gate and up of one feature: feature 4k + t of the 16 in a group. Two blocks' values, k
// even in the lower half, become a word of h, features 2t and 2t + 1 of 8.
DEVICE u32 gather_features(u32 pair) {
    const u32 from = 2 * lane_of_quad() % 4;
    const u32 a = __shfl_sync(~0u, pair, from, 4), b = __shfl_sync(~0u, pair, from + 1, 4);
    return permute_bytes(a, b, lane_of_quad() < 2 ? 0x5410 : 0x7632);
}

// `h` of 32 features from the groups of c that hold them; `second` is of no meaning without an up projection.
DEVICE void activate(Words& h, const Words& first, const Words& second, const RowValues& prob,
                     const ActivationParameters& p) {
    const auto value = [&](float g, float u, u32 half) { return __fmul_rn(evaluate(p, g, u).value, prob.of[half]); };
#pragma unroll
    for (u32 half = 0; half < 2; half++)
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if constexpr (GATED && LAYOUT == ELEMENTWISE) {
                const Words& c = k < 2 ? first : second;
                const u32 a = c[half][2 * (k % 2)], b = c[half][2 * (k % 2) + 1];
                h[half][k] =
                    gather_features(to_bf16x2(value(lower(a), upper(a), half), value(lower(b), upper(b), half)));
            } else {
                const u32 g = first[half][k], u = GATED ? second[half][k] : 0;
                h[half][k] = to_bf16x2(value(lower(g), lower(u), half), value(upper(g), upper(u), half));
            }
        }
}

// The fragment's first feature is `feature`, a multiple of 32.
template <u32 N8>
DEVICE void epilogue_act(const float (&acc)[N8][4], const FragmentRows& rows, u32 expert, u32 feature, float alpha,
                         const ActOut& out) {
    constexpr u32 GROUPS = N8 / 4, FEATURE_GROUPS = GATED ? GROUPS / 2 : GROUPS;
    static_assert(N8 % (GATED ? 8 : 4) == 0, "whole groups of 32 features");
    const u32 n1 = fc1_columns(out.ffn);
    const float* const bias = out.b1 ? out.b1 + (u64)expert * n1 : nullptr;
    const RowValues prob = load_row_values(out.prob, rows), one{{1.0f, 1.0f}};
    FragmentAmax found(out.h_amax.sign_mask);
#pragma unroll
    for (u32 p = 0; p < FEATURE_GROUPS; p++) {
        const u32 here = feature + GROUP_COLS * p;
        const Columns first = first_columns(here, out.ffn), second = second_columns(here, out.ffn);
        Words gate, up, h;
        round_group<N8>(gate, acc, first_group(p), first.first, first.end, alpha, bias, one);
        store_words(gate, out.c, n1, rows, first.first, first.end);
        if constexpr (GATED) {
            round_group<N8>(up, acc, second_group(p, GROUPS), second.first, second.end, alpha, bias, one);
            store_words(up, out.c, n1, rows, second.first, second.end);
        }
        activate(h, gate, up, prob, out.activation);
#pragma unroll
        for (u32 half = 0; half < 2; half++)
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                if (!rows.has(half) || here + 8 * k >= out.ffn) h[half][k] = 0;
        store_words(h, out.h, out.ffn, rows, here, out.ffn);
        found.add(h);
    }
    finish_amax(found, out.h_amax, expert, out.h, out.ffn, rows, feature, GROUP_COLS * FEATURE_GROUPS, out.ffn, 1, 0);
}
