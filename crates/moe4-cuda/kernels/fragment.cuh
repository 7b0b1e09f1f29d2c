// A warp's share of a tile of accumulators, as mma.m16n8 and wgmma leave it, and how it meets rows in memory.
//
//   float acc[N8][4]    16 rows x 8 * N8 columns; with g = lane / 4 and t = lane % 4:
//                       acc[j] = (g, 8j + 2t), (g, 8j + 2t + 1), (g + 8, 8j + 2t), (g + 8, 8j + 2t + 1)
//
// BF16 values of 32 columns are `Words`: word [half][k] is the pair of columns 8k + 2t of row g + 8 * half. The four
// lanes of a quad hold 64 bytes of a row; transposed among them, each has 16 bytes that follow each other, and a row is
// read and written in whole pieces of 64 bytes. Tensors have rows of a multiple of 16 bytes, at such addresses.
#pragma once
#include "numerics.cuh"

constexpr u32 FRAGMENT_ROWS = 16;
constexpr u32 GROUP_COLS = 32;  // columns of Words

typedef u32 Words[2][4];

DEVICE u32 lane() { return threadIdx.x % 32; }
DEVICE u32 lane_row() { return lane() / 4; }      // g
DEVICE u32 lane_of_quad() { return lane() % 4; }  // t

// Rows of a tensor that a fragment stands for. Those past the end of the expert are neither read nor written.
struct FragmentRows {
    u64 first;
    u32 count;  // at most 16

    __device__ __forceinline__ bool has(u32 half) const { return lane_row() + 8 * half < count; }
    __device__ __forceinline__ u64 row(u32 half) const { return first + lane_row() + 8 * half; }
};

// Of the tile's `rows` rows from `row` on, those of the fragment that begins `at` rows further.
DEVICE FragmentRows fragment_rows(u64 row, u32 rows, u32 at) {
    const u32 left = rows > at ? rows - at : 0;
    return {row + at, left < FRAGMENT_ROWS ? left : FRAGMENT_ROWS};
}

// A row's value for each of the lane's two rows; zero past the end.
struct RowValues {
    float of[2];
};

DEVICE RowValues load_row_values(const float* values, const FragmentRows& rows) {
    return {{rows.has(0) ? __ldg(values + rows.row(0)) : 0.0f, rows.has(1) ? __ldg(values + rows.row(1)) : 0.0f}};
}

// Word k of lane t becomes word t of lane k.
DEVICE void transpose_quad(u32 (&w)[4]) {
#pragma unroll
    for (u32 step = 1; step < 4; step *= 2) {
        const bool upper = lane_of_quad() & step;
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            if (!(k & step)) {
                const u32 got = __shfl_xor_sync(~0u, upper ? w[k] : w[k + step], step);
                if (upper)
                    w[k] = got;
                else
                    w[k + step] = got;
            }
    }
}

// 32 columns from `col` on of a tensor [., cols]; zeros from column `end` on and past the rows' end.
DEVICE void load_words(Words& w, const u16* from, u64 cols, const FragmentRows& rows, u32 col, u32 end) {
    const u32 chunk = col + 8 * lane_of_quad();
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (rows.has(half) && chunk < end) v = *reinterpret_cast<const uint4*>(from + rows.row(half) * cols + chunk);
        w[half][0] = v.x, w[half][1] = v.y, w[half][2] = v.z, w[half][3] = v.w;
        transpose_quad(w[half]);
    }
}

DEVICE void store_words(const Words& w, u16* to, u64 cols, const FragmentRows& rows, u32 col, u32 end) {
    const u32 chunk = col + 8 * lane_of_quad();
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 v[4] = {w[half][0], w[half][1], w[half][2], w[half][3]};
        transpose_quad(v);
        if (rows.has(half) && chunk < end)
            *reinterpret_cast<uint4*>(to + rows.row(half) * cols + chunk) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

// The two columns of a word whose first is `col`; zeros past `end`.
DEVICE float2 load_columns(const float* from, u32 col, u32 end) {
    return col < end ? __ldg(reinterpret_cast<const float2*>(from + col)) : make_float2(0.0f, 0.0f);
}
