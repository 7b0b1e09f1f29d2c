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

// What a pair of accumulators gives.
struct PairOfFeatures {
    float dh[2], value[2], dg[2], du[2];
};

DEVICE PairOfFeatures differentiate(float first, float second, u32 gate, u32 up, float alpha, float prob,
                                    const ActivationParameters& p) {
    PairOfFeatures out;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const Evaluated at = evaluate(p, i ? upper(gate) : lower(gate), i ? upper(up) : lower(up));
        const float dh = __fmul_rn(alpha, i ? second : first), scaled = __fmul_rn(dh, prob);
        out.dh[i] = dh, out.value[i] = at.value;
        out.dg[i] = __fmul_rn(scaled, at.dg), out.du[i] = __fmul_rn(scaled, at.du);
    }
    return out;
}

// For diagnosis: 32 features from `feature` on.
DEVICE void store_dh(const float (&acc)[4][4], const FragmentRows& rows, u32 feature, float alpha, const DactOut& out) {
#pragma unroll
    for (u32 k = 0; k < 4; k++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const float (&v)[4] = acc[k];
            if (rows.has(half) && feature + 8 * k < out.ffn)
                *reinterpret_cast<float2*>(out.dh + rows.row(half) * out.ffn + feature + 8 * k + 2 * lane_of_quad()) =
                    make_float2(__fmul_rn(alpha, v[2 * half]), __fmul_rn(alpha, v[2 * half + 1]));
        }
}

// The fragment's first feature is `feature`, a multiple of 32. `next` is c of its first 32 features; further ones are
// loaded ahead.
template <u32 N8>
DEVICE void epilogue_dact(const float (&acc)[N8][4], const FragmentRows& rows, u32 expert, u32 feature, float alpha,
                          const RowValues& prob, FeaturePieces next, const DactOut& out, Slabs slabs) {
    static_assert(N8 % 4 == 0, "whole groups of 32 features");
    FragmentAmax found;
#pragma unroll 1
    for (u32 group = 0; group < N8 / 4; group++) {
        const u32 here = feature + GROUP_COLS * group;
        if (here >= out.ffn) break;
        float dh[4][4];
        take_group<N8>(dh, acc, group);
        put_features(slabs, next);
        if (group + 1 < N8 / 4) next = load_features(out.c, rows, here + GROUP_COLS, out.ffn);
        __syncwarp();
        float sums[2] = {};
#pragma unroll
        for (u32 k = 0; k < 4; k++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const float (&v)[4] = dh[k];
                const GateUp c = get_features(slabs, half, k);
                const PairOfFeatures pair =
                    differentiate(v[2 * half], v[2 * half + 1], c.gate, c.up, alpha, prob.of[half], out.activation);
                const bool live = rows.has(half) && here + 8 * k < out.ffn;
                const GateUp dc = {live ? to_bf16x2(pair.dg[0], pair.dg[1]) : 0,
                                   live && GATED ? to_bf16x2(pair.du[0], pair.du[1]) : 0};
                set_features(slabs, half, k, dc);
                found.add(dc.gate);
                if constexpr (GATED) found.add(dc.up);
                if constexpr (H_AGAIN)
                    slabs[2].pair(half, k) =
                        to_bf16x2(__fmul_rn(pair.value[0], prob.of[half]), __fmul_rn(pair.value[1], prob.of[half]));
#pragma unroll
                for (u32 i = 0; i < 2; i++)
                    sums[half] = __fadd_rn(sums[half], live ? __fmul_rn(pair.value[i], pair.dh[i]) : 0.0f);
            }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            sums[half] = __fadd_rn(sums[half], __shfl_xor_sync(~0u, sums[half], 1));
            sums[half] = __fadd_rn(sums[half], __shfl_xor_sync(~0u, sums[half], 2));
            if (lane_of_quad() == 0 && rows.has(half))
                out.dprob[here / GROUP_COLS * out.rows + rows.row(half)] = sums[half];
        }
        if (out.dh) store_dh(dh, rows, here, alpha, out);
        __syncwarp();
        store_features(slabs, out.dc, rows, here, out.ffn);
        if constexpr (H_AGAIN) slabs[2].store(out.h, out.ffn, rows, here, out.ffn);
        if constexpr (GATED)
            found.add_columns(slabs[0], slabs[1], out.dc_amax.sign_mask);
        else
            found.add_columns(slabs[0], out.dc_amax.sign_mask);
        __syncwarp();
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
