// FC1's epilogue on a fragment of accumulators: c = bf16(alpha * acc + b1), h = bf16(act(c) * prob), and h's amaxes.
//
// The activation reads the rounded c, which is what the backward has. See glu.cuh for which columns a fragment holds.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX (of h), SIGN_MASK.
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

// h of 32 features, of which `left` are there, from the two parts of c that hold them, into its slab.
DEVICE void put_activated(Slab h, FragmentAmax& found, const Words& first, const Words& second, const RowValues& prob,
                          const FragmentRows& rows, u32 left, const ActivationParameters& p) {
    const auto value = [&](u32 g, u32 u, u32 half) {
        return __fmul_rn(evaluate(p, __uint_as_float(g), __uint_as_float(u)).value, prob.of[half]);
    };
    constexpr u32 UPPER = 0xFFFF0000u;
#pragma unroll
    for (u32 half = 0; half < 2; half++)
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if constexpr (GATED && LAYOUT == ELEMENTWISE) {
                // A word of c is gate and up of one feature: number 4k + t of its 16.
                const u32 a = first[half][k], b = second[half][k];
                u32 word = to_bf16x2(value(a << 16, a & UPPER, half), value(b << 16, b & UPPER, half));
                if (left <= 16) word &= 0xFFFFu;
                if (!rows.has(half)) word = 0;
                found.add(word);
                u16* const row = reinterpret_cast<u16*>(h.words + (lane_row() + 8 * half) * SLAB_PITCH);
                row[4 * k + lane_of_quad()] = (u16)word, row[16 + 4 * k + lane_of_quad()] = (u16)(word >> 16);
            } else {
                const u32 g = first[half][k], u = GATED ? second[half][k] : 0;
                u32 word = to_bf16x2(value(g << 16, u << 16, half), value(g & UPPER, u & UPPER, half));
                if (!rows.has(half) || 8 * k >= left) word = 0;
                found.add(word);
                h.pair(half, k) = word;
            }
        }
}

// The fragment's first feature is `feature`, a multiple of 32.
template <u32 N8>
DEVICE void epilogue_act(const float (&acc)[N8][4], const FragmentRows& rows, u32 expert, u32 feature, float alpha,
                         const RowValues& prob, const ActOut& out, Slabs slabs) {
    constexpr u32 GROUPS = N8 / 4, FEATURE_GROUPS = GATED ? GROUPS / 2 : GROUPS;
    static_assert(N8 % (GATED ? 8 : 4) == 0, "whole groups of 32 features");
    const float* const bias = out.b1 ? out.b1 + (u64)expert * fc1_columns(out.ffn) : nullptr;
    const RowValues one{{1.0f, 1.0f}};
    FragmentAmax found;
#pragma unroll 1
    for (u32 p = 0; p < FEATURE_GROUPS; p++) {
        const u32 here = feature + GROUP_COLS * p;
        if (here >= out.ffn) break;
        const Columns first = first_columns(here, out.ffn), second = second_columns(here, out.ffn);
        float v[4][4];
        Words gate, up;
        take_group<N8>(v, acc, first_group(p));
        round_group(gate, v, first.first, first.end, alpha, bias, one);
        slabs[0].put(gate);
        if constexpr (GATED) {
            take_group<N8>(v, acc, second_group(p, GROUPS));
            round_group(up, v, second.first, second.end, alpha, bias, one);
            slabs[1].put(up);
        }
        put_activated(slabs[2], found, gate, up, prob, rows, out.ffn - here, out.activation);
        __syncwarp();
        store_features(slabs, out.c, rows, here, out.ffn);
        slabs[2].store(out.h, out.ffn, rows, here, out.ffn);
        found.add_columns(slabs[2], out.h_amax.sign_mask);
        __syncwarp();
    }
    finish_amax(found, out.h_amax, expert, out.h, out.ffn, rows, feature, GROUP_COLS * FEATURE_GROUPS, out.ffn, 1, 0);
}

// Zeros in a tile of nobody's rows, `features` features from `feature` on.
DEVICE void act_nobody(u64 row, u32 rows, u32 feature, u32 features, const ActOut& out) {
    features = min(features, out.ffn - feature);
    store_zeros(out.h, out.ffn, row, rows, feature, feature + features);
    zero_gate_up(out.c, row, rows, feature, features, out.ffn);
}
