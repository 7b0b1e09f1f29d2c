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

// 32 features in memory: the lane's pieces of their columns of c in two runs of 32, or in one without an up projection.
struct FeaturePieces {
    RowPieces first, second;
};

// Which of the lane's pieces are there, of 32 features of which `left` are: of h, and of the two runs of c.
struct FeaturesThere {
    bool h[2], first[2], second[2];

    __device__ __forceinline__ FeaturesThere(const FragmentRows& rows, u32 left) {
        constexpr bool PAIRS = GATED && LAYOUT == ELEMENTWISE;
        const u32 piece = 8 * lane_of_quad();
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            h[half] = rows.has(half) && piece < left;
            first[half] = PAIRS ? rows.has(half) && piece < 2 * left : h[half];
            second[half] = PAIRS ? rows.has(half) && piece + GROUP_COLS < 2 * left : h[half];
        }
    }
};

// Where the pieces lie in c or dc, of features from `feature` on.
template <class T>
struct FeaturePlaces {
    RowPlaces<T> run;
    u32 apart;  // columns from the first run to the second

    __device__ __forceinline__ FeaturePlaces(T* c, const FragmentRows& rows, u32 feature, u32 ffn)
        : run(c, fc1_columns(ffn), rows, first_columns(feature, ffn).first),
          apart(second_columns(feature, ffn).first - first_columns(feature, ffn).first) {}

    __device__ __forceinline__ FeaturePieces load(const FeaturesThere& there) const {
        FeaturePieces v;
        v.first = run.load(there.first);
        if constexpr (GATED) v.second = run.load(there.second, apart);
        return v;
    }
    __device__ __forceinline__ void store(const FeaturePieces& v, const FeaturesThere& there) const {
        run.store(v.first, there.first);
        if constexpr (GATED) run.store(v.second, there.second, apart);
    }
    // To the next 32 features.
    __device__ __forceinline__ void advance() { run.first += GATED && LAYOUT != HALVES ? 2 * GROUP_COLS : GROUP_COLS; }
};

DEVICE FeaturePieces load_features(const u16* c, const FragmentRows& rows, u32 feature, u32 ffn) {
    return FeaturePlaces<const u16>(c, rows, feature, ffn).load({rows, ffn > feature ? ffn - feature : 0});
}

// Slabs 0 and 1 have the two runs.
DEVICE void put_pieces(Slabs slabs, const FeaturePieces& v) {
    slabs[0].put(v.first);
    if constexpr (GATED) slabs[1].put(v.second);
}
DEVICE FeaturePieces get_pieces(Slabs slabs) {
    FeaturePieces v;
    v.first = slabs[0].pieces();
    if constexpr (GATED) v.second = slabs[1].pieces();
    return v;
}

// Gates and ups of the lane's features in row g + 8 * half: 8k + 2t and 8k + 2t + 1. Elementwise they are neighbours in
// one of the slabs.
struct GatesUps {
    u32 gate[4], up[4];
};

DEVICE uint2& elementwise_pair(Slabs slabs, u32 half, u32 k) {
    const u32 word = 8 * (k % 2) + 2 * lane_of_quad();
    return *reinterpret_cast<uint2*>(slabs[k / 2].words + (lane_row() + 8 * half) * SLAB_PITCH + word);
}

DEVICE GatesUps get_features(Slabs slabs, u32 half) {
    GatesUps v;
    if constexpr (GATED && LAYOUT == ELEMENTWISE) {
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const uint2 both = elementwise_pair(slabs, half, k);
            v.gate[k] = permute_bytes(both.x, both.y, 0x5410), v.up[k] = permute_bytes(both.x, both.y, 0x7632);
        }
    } else {
        slabs[0].get(half, v.gate);
        if constexpr (GATED) slabs[1].get(half, v.up);
    }
    return v;
}

DEVICE void put_features(Slabs slabs, u32 half, const GatesUps& v) {
    if constexpr (GATED && LAYOUT == ELEMENTWISE) {
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            elementwise_pair(slabs, half, k) =
                make_uint2(permute_bytes(v.gate[k], v.up[k], 0x5410), permute_bytes(v.gate[k], v.up[k], 0x7632));
    } else {
        slabs[0].put(half, v.gate);
        if constexpr (GATED) slabs[1].put(half, v.up);
    }
}

// Zeros in `rows` rows of c, `features` features from `feature` on.
DEVICE void zero_gate_up(u16* c, u64 row, u32 rows, u32 feature, u32 features, u32 ffn) {
    const u64 n1 = fc1_columns(ffn);
    const u32 col = first_columns(feature, ffn).first, cols = GATED && LAYOUT != HALVES ? 2 * features : features;
    store_zeros(c, n1, row, rows, col, col + cols);
    if (GATED && LAYOUT == HALVES) store_zeros(c, n1, row, rows, ffn + feature, ffn + feature + features);
}
