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
#include "epilogue.cuh"

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

// The 32 features from `feature` on in memory: their columns of c in two runs of 32, or in one without an up
// projection.
struct FeaturePieces {
    RowPieces first, second;
};

DEVICE FeaturePieces load_features(const u16* c, const FragmentRows& rows, u32 feature, u32 ffn) {
    FeaturePieces v;
    const Columns first = first_columns(feature, ffn), second = second_columns(feature, ffn);
    v.first = load_pieces(c, fc1_columns(ffn), rows, first.first, first.end);
    if constexpr (GATED) v.second = load_pieces(c, fc1_columns(ffn), rows, second.first, second.end);
    return v;
}

// Slabs 0 and 1 with the two runs.
DEVICE void put_features(Slabs slabs, const FeaturePieces& v) {
    slabs[0].put(v.first);
    if constexpr (GATED) slabs[1].put(v.second);
}

DEVICE void store_features(Slabs slabs, u16* c, const FragmentRows& rows, u32 feature, u32 ffn) {
    const Columns first = first_columns(feature, ffn), second = second_columns(feature, ffn);
    slabs[0].store(c, fc1_columns(ffn), rows, first.first, first.end);
    if constexpr (GATED) slabs[1].store(c, fc1_columns(ffn), rows, second.first, second.end);
}

// Gates and ups of features 8k + 2t and 8k + 2t + 1. Elementwise they are neighbours in one of the slabs.
struct GateUp {
    u32 gate, up;
};

DEVICE u64* elementwise_pair(Slabs slabs, u32 half, u32 k) {
    const u32 word = 8 * (k % 2) + 2 * lane_of_quad();
    return reinterpret_cast<u64*>(slabs[k / 2].words + (lane_row() + 8 * half) * SLAB_PITCH + word);
}

DEVICE GateUp get_features(Slabs slabs, u32 half, u32 k) {
    if constexpr (GATED && LAYOUT == ELEMENTWISE) {
        const u64 both = *elementwise_pair(slabs, half, k);
        const u32 low = (u32)both, high = (u32)(both >> 32);
        return {permute_bytes(low, high, 0x5410), permute_bytes(low, high, 0x7632)};
    } else {
        return {slabs[0].pair(half, k), GATED ? slabs[1].pair(half, k) : 0};
    }
}

DEVICE void set_features(Slabs slabs, u32 half, u32 k, GateUp v) {
    if constexpr (GATED && LAYOUT == ELEMENTWISE) {
        const u32 low = permute_bytes(v.gate, v.up, 0x5410), high = permute_bytes(v.gate, v.up, 0x7632);
        *elementwise_pair(slabs, half, k) = (u64)high << 32 | low;
    } else {
        slabs[0].pair(half, k) = v.gate;
        if constexpr (GATED) slabs[1].pair(half, k) = v.up;
    }
}

// Zeros in `rows` rows of c, `features` features from `feature` on.
DEVICE void zero_gate_up(u16* c, u64 row, u32 rows, u32 feature, u32 features, u32 ffn) {
    const u64 n1 = fc1_columns(ffn);
    const u32 col = first_columns(feature, ffn).first, cols = GATED && LAYOUT != HALVES ? 2 * features : features;
    store_zeros(c, n1, row, rows, col, col + cols);
    if (GATED && LAYOUT == HALVES) store_zeros(c, n1, row, rows, ffn + feature, ffn + feature + features);
}
