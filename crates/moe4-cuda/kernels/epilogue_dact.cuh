// The epilogue of FC2's dgrad on a fragment of accumulators, whose columns are features:
//
//   dh = alpha * acc        dc = bf16(dh * prob * act'(c))        dprob = sum of act(c) * dh over the features
//
// and, where asked for, dh itself, h = bf16(act(c) * prob) with the bits of the forward, and dc's amaxes. dprob is left
// as a sum for each 32 features, whatever the tile, which sum_slices adds up in order.
//
// Compile-time choices: ACTIVATION, LAYOUT, AMAX (of dc), SIGN_MASK, H_AGAIN (whether h is written).
#pragma once
#include "epilogue.cuh"
#include "fragment_amax.cuh"
#include "glu.cuh"

struct DactOut {
    const u16* c;       // [T, N1]
    const float* prob;  // [T]
    u16* dc;            // [T, N1]
    float* dprob;       // [slices, T]: a slice is 32 features
    u16* h;             // [T, F]
    float* dh;          // [T, F], or none
    u64 rows;           // T
    u32 ffn;
    ActivationParameters activation;
    AmaxOut dc_amax;
};

// What a pair of accumulators gives: dh, times alpha already, of features with these gates and ups.
struct PairOfFeatures {
    float value[2], dg[2], du[2];
};

DEVICE PairOfFeatures differentiate(float first, float second, u32 gate, u32 up, float prob,
                                    const ActivationParameters& p) {
    PairOfFeatures out;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const Evaluated at = evaluate(p, i ? upper(gate) : lower(gate), i ? upper(up) : lower(up));
        const float scaled = __fmul_rn(i ? second : first, prob);
        out.value[i] = at.value;
        out.dg[i] = __fmul_rn(scaled, at.dg), out.du[i] = __fmul_rn(scaled, at.du);
    }
    return out;
}

// Zeros for what is not there of 32 features, of which `left` are. Their c is zero as well, and activations are zero at
// zero, so they add nothing to dprob; their dc is zero, or NaN beside a weight that is not finite: no amax looks at it.
DEVICE void clear_missing(float (&dh)[4][4], const FragmentRows& rows, u32 left) {
    if (rows.count == FRAGMENT_ROWS && left >= GROUP_COLS) return;
#pragma unroll
    for (u32 k = 0; k < 4; k++)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (!rows.has(i / 2) || 8 * k >= left) dh[k][i] = 0.0f;
}

// For diagnosis: 32 features from `feature` on.
DEVICE void store_dh(const float (&dh)[4][4], const FragmentRows& rows, u32 feature, const DactOut& out) {
#pragma unroll
    for (u32 k = 0; k < 4; k++)
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            if (rows.has(half) && feature + 8 * k < out.ffn)
                *reinterpret_cast<float2*>(out.dh + rows.row(half) * out.ffn + feature + 8 * k + 2 * lane_of_quad()) =
                    make_float2(dh[k][2 * half], dh[k][2 * half + 1]);
}

// The sum over four lanes of v[0], in the even ones, and of v[1] in the odd ones: each lane gives one of them away.
DEVICE float sum_of_quad(const float (&v)[2]) {
    const bool odd = lane() & 1;
    const float sum = __fadd_rn(odd ? v[1] : v[0], __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1));
    return __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
}

// The fragment's first feature is `feature`, a multiple of 32. `next` is c of its first 32 features; further ones are
// loaded ahead.
template <u32 N8>
DEVICE void epilogue_dact(const float (&acc)[N8][4], const FragmentRows& rows, u32 expert, u32 feature, float alpha,
                          const RowValues& prob, FeaturePieces next, const DactOut& out, Slabs slabs) {
    static_assert(N8 % 4 == 0, "whole groups of 32 features");
    FeaturePlaces<const u16> next_c(out.c, rows, feature, out.ffn);
    FeaturePlaces<u16> dc(out.dc, rows, feature, out.ffn);
    RowPlaces<u16> h(out.h, out.ffn, rows, feature);
    // Two lanes of a quad store sums, that of row g and that of row g + 8.
    const u32 half_of_sum = lane_of_quad();
    float* dprob = out.dprob + feature / GROUP_COLS * out.rows + rows.row(half_of_sum);
    FragmentAmax found;
#pragma unroll 1
    for (u32 group = 0; group < N8 / 4; group++) {
        const u32 here = feature + GROUP_COLS * group;
        if (here >= out.ffn) break;
        const u32 left = out.ffn - here;
        float dh[4][4];
        with_group<N8 / 4>(group, [&](u32 at) { scale_group<N8>(dh, acc, at, alpha); });
        put_pieces(slabs, next);
        next_c.advance();
        next = next_c.load({rows, group + 1 < N8 / 4 && left > GROUP_COLS ? left - GROUP_COLS : 0});
        if (out.dh) store_dh(dh, rows, here, out);
        clear_missing(dh, rows, left);
        __syncwarp();
        float sums[2] = {};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const GatesUps c = get_features(slabs, half);
            GatesUps dc_words;
            u32 h_words[4];
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                const float first = dh[k][2 * half], second = dh[k][2 * half + 1];
                const PairOfFeatures pair =
                    differentiate(first, second, c.gate[k], GATED ? c.up[k] : 0, prob.of[half], out.activation);
                found.add(dc_words.gate[k] = to_bf16x2(pair.dg[0], pair.dg[1]));
                if constexpr (GATED) found.add(dc_words.up[k] = to_bf16x2(pair.du[0], pair.du[1]));
                if constexpr (H_AGAIN)
                    h_words[k] =
                        to_bf16x2(__fmul_rn(pair.value[0], prob.of[half]), __fmul_rn(pair.value[1], prob.of[half]));
                sums[half] = __fadd_rn(sums[half], __fmul_rn(pair.value[0], first));
                sums[half] = __fadd_rn(sums[half], __fmul_rn(pair.value[1], second));
            }
            put_features(slabs, half, dc_words);
            if constexpr (H_AGAIN) slabs[2].put(half, h_words);
        }
        const float sum = sum_of_quad(sums);
        if (half_of_sum < 2 && rows.has(half_of_sum)) *dprob = sum;
        dprob += out.rows;
        __syncwarp();
        const FeaturesThere there(rows, left);
        const FeaturePieces dc_pieces = get_pieces(slabs);
        RowPieces h_pieces;
        if constexpr (H_AGAIN) h_pieces = slabs[2].pieces();
        dc.store(dc_pieces, there);
        if constexpr (H_AGAIN) h.store(h_pieces, there.h);
        if constexpr (GATED)
            found.add_columns(slabs[0], slabs[1], out.dc_amax.sign_mask);
        else
            found.add_columns(slabs[0], out.dc_amax.sign_mask);
        __syncwarp();
        dc.advance();
        h.first += GROUP_COLS;
    }
    // The columns of dc that the fragment's features have: two runs, or one.
    const Columns first = first_columns(feature, out.ffn);
    constexpr u32 FEATURES = 8 * N8;
    if constexpr (GATED && LAYOUT != HALVES)
        finish_amax(found, out.dc_amax, expert, out.dc, 2 * out.ffn, rows, first.first, 2 * FEATURES, first.end, 1, 0);
    else
        finish_amax(found, out.dc_amax, expert, out.dc, fc1_columns(out.ffn), rows, first.first, FEATURES, first.end,
                    GATED ? 2 : 1, out.ffn);
}

// Zeros in a tile of nobody's rows, `features` features from `feature` on.
DEVICE void dact_nobody(u64 row, u32 rows, u32 feature, u32 features, const DactOut& out) {
    features = min(features, out.ffn - feature);
    zero_gate_up(out.dc, row, rows, feature, features, out.ffn);
    if (H_AGAIN) store_zeros(out.h, out.ffn, row, rows, feature, feature + features);
    if (out.dh)
        store_zeros(reinterpret_cast<u16*>(out.dh), 2 * out.ffn, row, rows, 2 * feature, 2 * (feature + features));
}
