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

// To 32 columns of accumulators times alpha, that of c's columns. `bias` begins at column 0 of c.
DEVICE void add_bias(float (&v)[4][4], const float* bias, const Columns& columns) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        const float2 b = load_columns(bias, columns.first + 8 * k + 2 * lane_of_quad(), columns.end);
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[k][i] = __fadd_rn(v[k][i], i % 2 ? b.y : b.x);
    }
}

DEVICE void round_group(Words& w, const float (&v)[4][4]) {
#pragma unroll
    for (u32 half = 0; half < 2; half++)
#pragma unroll
        for (u32 k = 0; k < 4; k++) w[half][k] = to_bf16x2(v[k][2 * half], v[k][2 * half + 1]);
}

// Zeros for what is not there of 32 features, of which `left` are, in the two parts of c that hold them. Every
// activation is zero at zero, so their h is zero as well, or NaN beside a weight that is not finite: no amax looks at
// either.
DEVICE void clear_missing(Words& first, Words& second, const FragmentRows& rows, u32 left) {
    if (rows.count == FRAGMENT_ROWS && left >= GROUP_COLS) return;
#pragma unroll
    for (u32 half = 0; half < 2; half++)
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            // Elementwise, a part has 16 features.
            constexpr bool PAIRS = GATED && LAYOUT == ELEMENTWISE;
            if (!rows.has(half) || (!PAIRS && 8 * k >= left)) first[half][k] = 0;
            if (GATED && (!rows.has(half) || (PAIRS ? 16 : 8 * k) >= left)) second[half][k] = 0;
        }
}

// h of 32 features, from the two parts of c that hold them, into its slab.
DEVICE void put_activated(Slab h, FragmentAmax& found, const Words& first, const Words& second, const RowValues& prob,
                          const ActivationParameters& p) {
    const auto value = [&](u32 g, u32 u, u32 half) {
        return __fmul_rn(evaluate(p, __uint_as_float(g), __uint_as_float(u)).value, prob.of[half]);
    };
    constexpr u32 UPPER = 0xFFFF0000u;
    Words words;
#pragma unroll
    for (u32 half = 0; half < 2; half++)
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const u32 a = first[half][k], b = GATED ? second[half][k] : 0;
            u32& word = words[half][k];
            if constexpr (GATED && LAYOUT == ELEMENTWISE) {
                // A word of c is gate and up of one feature: number 4k + t of its 16.
                word = to_bf16x2(value(a << 16, a & UPPER, half), value(b << 16, b & UPPER, half));
                u16* const row = reinterpret_cast<u16*>(h.words + (lane_row() + 8 * half) * SLAB_PITCH);
                row[4 * k + lane_of_quad()] = (u16)word, row[16 + 4 * k + lane_of_quad()] = (u16)(word >> 16);
            } else {
                word = to_bf16x2(value(a << 16, b << 16, half), value(a & UPPER, b & UPPER, half));
            }
            found.add(word);
        }
    if constexpr (!GATED || LAYOUT != ELEMENTWISE) h.put(words);
}

// The fragment's first feature is `feature`, a multiple of 32.
template <u32 N8>
DEVICE void epilogue_act(const float (&acc)[N8][4], const FragmentRows& rows, u32 expert, u32 feature, float alpha,
                         const RowValues& prob, const ActOut& out, Slabs slabs) {
    constexpr u32 GROUPS = N8 / 4, FEATURE_GROUPS = GATED ? GROUPS / 2 : GROUPS;
    static_assert(N8 % (GATED ? 8 : 4) == 0, "whole groups of 32 features");
    const float* const bias = out.b1 ? out.b1 + (u64)expert * fc1_columns(out.ffn) : nullptr;
    FeaturePlaces<u16> c(out.c, rows, feature, out.ffn);
    RowPlaces<u16> h(out.h, out.ffn, rows, feature);
    FragmentAmax found;
#pragma unroll 1
    for (u32 p = 0; p < FEATURE_GROUPS; p++) {
        const u32 here = feature + GROUP_COLS * p;
        if (here >= out.ffn) break;
        float v[GATED ? 2 : 1][4][4];
        with_group<FEATURE_GROUPS>(p, [&](u32 at) {
            scale_group<N8>(v[0], acc, first_group(at), alpha);
            if constexpr (GATED) scale_group<N8>(v[1], acc, second_group(at, GROUPS), alpha);
        });
        if (bias) {
            add_bias(v[0], bias, first_columns(here, out.ffn));
            if constexpr (GATED) add_bias(v[1], bias, second_columns(here, out.ffn));
        }
        Words first, second;
        round_group(first, v[0]);
        if constexpr (GATED) round_group(second, v[1]);
        clear_missing(first, second, rows, out.ffn - here);
        slabs[0].put(first);
        if constexpr (GATED) slabs[1].put(second);
        put_activated(slabs[2], found, first, second, prob, out.activation);
        __syncwarp();
        const FeaturesThere there(rows, out.ffn - here);
        const FeaturePieces c_pieces = get_pieces(slabs);
        const RowPieces h_pieces = slabs[2].pieces();
        c.store(c_pieces, there);
        h.store(h_pieces, there.h);
        found.add_columns(slabs[2], out.h_amax.sign_mask);
        __syncwarp();
        c.advance();
        h.first += GROUP_COLS;
    }
    finish_amax(found, out.h_amax, expert, out.h, out.ffn, rows, feature, GROUP_COLS * FEATURE_GROUPS, out.ffn, 1, 0);
}

// Zeros in a tile of nobody's rows, `features` features from `feature` on.
DEVICE void act_nobody(u64 row, u32 rows, u32 feature, u32 features, const ActOut& out) {
    features = min(features, out.ffn - feature);
    store_zeros(out.h, out.ffn, row, rows, feature, feature + features);
    zero_gate_up(out.c, row, rows, feature, features, out.ffn);
}
