// Where the gate and the up column of a feature lie in `c` and `dc` [T, N1], and in the columns of an FC1 fragment.
//
//   HALVES         gates, then ups          a fragment: half its columns gates, the other half the same features' ups
//   INTERLEAVED    32 gates, 32 ups, ...    contiguous columns, beginning with gates
//   ELEMENTWISE    gate even, up odd        contiguous columns
//   ungated        the features alone       contiguous columns
//
// In every layout gate and up of a feature are in one thread. Features go in groups of 32, which begin at multiples of
// 32. The last group may have 16.
//
// Compile-time choices: ACTIVATION, LAYOUT.
#pragma once
#include "activation.cuh"
#include "fragment.cuh"

constexpr u32 HALVES = 0, INTERLEAVED = 1, ELEMENTWISE = 2;

// A run of columns of `c`, and where those that exist end.
struct Columns {
    u32 first, end;
};

// Columns of FC1 for so many features.
DEVICE u32 fc1_columns(u32 ffn) { return GATED ? 2 * ffn : ffn; }

// The 32 columns of a fragment's group of accumulators that hold the first and the second part of the 32 features
// from `feature` on: gates and ups, or, elementwise, the first and the last 16 features.
DEVICE Columns first_columns(u32 feature, u32 ffn) {
    if (!GATED || LAYOUT == HALVES) return {feature, ffn};
    return {2 * feature, 2 * ffn};
}
DEVICE Columns second_columns(u32 feature, u32 ffn) {
    if (LAYOUT == HALVES) return {ffn + feature, 2 * ffn};
    return {2 * feature + GROUP_COLS, 2 * ffn};
}

// The groups of accumulators for group `p` of a fragment's features, of `groups` groups of columns.
DEVICE u32 first_group(u32 p) { return !GATED || LAYOUT == HALVES ? p : 2 * p; }
DEVICE u32 second_group(u32 p, u32 groups) { return LAYOUT == HALVES ? p + groups / 2 : 2 * p + 1; }

// The row of FC1's weight that column `i` of a fragment of `width` columns stands for, where `feature` is the
// fragment's first; none past the last feature.
constexpr u32 NO_WEIGHT_ROW = 0xFFFFFFFFu;
DEVICE u32 fc1_row(u32 i, u32 width, u32 feature, u32 ffn) {
    if (GATED && LAYOUT == HALVES) {
        const u32 f = feature + i % (width / 2);
        return f < ffn ? f + (i < width / 2 ? 0 : ffn) : NO_WEIGHT_ROW;
    }
    const u32 row = (GATED ? 2 * feature : feature) + i;
    return row < fc1_columns(ffn) ? row : NO_WEIGHT_ROW;
}

// Gates and ups of the 32 features from `feature` on, as pairs of features.
struct GateUp {
    Words gate, up;
};

// Elementwise, gate and up of a pair of features are 8 bytes of each lane, 32 of a quad.
DEVICE uint2* elementwise_pair(u16* c, const FragmentRows& rows, u32 half, u32 feature, u32 k, u32 ffn) {
    return reinterpret_cast<uint2*>(c + rows.row(half) * (2 * ffn) + 2 * (feature + 8 * k + 2 * lane_of_quad()));
}

// Zeros past the last feature and the last row.
DEVICE void load_gate_up(GateUp& v, const u16* c, const FragmentRows& rows, u32 feature, u32 ffn) {
    if constexpr (GATED && LAYOUT == ELEMENTWISE) {
#pragma unroll
        for (u32 half = 0; half < 2; half++)
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                uint2 both = make_uint2(0, 0);
                if (rows.has(half) && feature + 8 * k < ffn)
                    both = *elementwise_pair(const_cast<u16*>(c), rows, half, feature, k, ffn);
                v.gate[half][k] = permute_bytes(both.x, both.y, 0x5410);
                v.up[half][k] = permute_bytes(both.x, both.y, 0x7632);
            }
    } else {
        const u64 n1 = fc1_columns(ffn);
        const Columns gate = first_columns(feature, ffn);
        load_words(v.gate, c, n1, rows, gate.first, gate.end);
        if constexpr (GATED) {
            const Columns up = second_columns(feature, ffn);
            load_words(v.up, c, n1, rows, up.first, up.end);
        }
    }
}

DEVICE void store_gate_up(const GateUp& v, u16* c, const FragmentRows& rows, u32 feature, u32 ffn) {
    if constexpr (GATED && LAYOUT == ELEMENTWISE) {
#pragma unroll
        for (u32 half = 0; half < 2; half++)
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                if (rows.has(half) && feature + 8 * k < ffn)
                    *elementwise_pair(c, rows, half, feature, k, ffn) =
                        make_uint2(permute_bytes(v.gate[half][k], v.up[half][k], 0x5410),
                                   permute_bytes(v.gate[half][k], v.up[half][k], 0x7632));
    } else {
        const u64 n1 = fc1_columns(ffn);
        const Columns gate = first_columns(feature, ffn);
        store_words(v.gate, c, n1, rows, gate.first, gate.end);
        if constexpr (GATED) {
            const Columns up = second_columns(feature, ffn);
            store_words(v.up, c, n1, rows, up.first, up.end);
        }
    }
}
