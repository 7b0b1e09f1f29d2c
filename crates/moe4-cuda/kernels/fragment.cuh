// A warp's share of a tile of accumulators, as mma.m16n8 and wgmma leave it, and how it meets rows in memory.
//
//   float acc[N8][4]    16 rows x 8 * N8 columns; with g = lane / 4 and t = lane % 4:
//                       acc[j] = (g, 8j + 2t), (g, 8j + 2t + 1), (g + 8, 8j + 2t), (g + 8, 8j + 2t + 1)
//   Slab                16 rows x 32 columns of BF16 in shared memory that belongs to the warp alone
//   Panel               the same of 64 columns
//
// Rows are read and written in pieces of 16 bytes, four lanes a row, which go through a slab: there each lane finds the
// pairs of columns that it has accumulators of, and each column is found by one lane (fragment_amax.cuh). Rows of a
// slab are 80 bytes apart, so that no two lanes of a pass over pairs or over columns meet in a bank. Epilogues that
// look at pairs alone take panels, eight lanes a row. Tensors have rows of a multiple of 16 bytes, at such addresses.
#pragma once
#include "mma.cuh"

constexpr u32 FRAGMENT_ROWS = 16;
constexpr u32 GROUP_COLS = 32;  // columns of a slab

typedef u32 Words[2][4];  // [half][k]: columns 8k + 2t and 8k + 2t + 1 of row g + 8 * half

DEVICE u32 lane() { return threadIdx.x % 32; }
DEVICE u32 lane_row() { return lane() / 4; }      // g
DEVICE u32 lane_of_quad() { return lane() % 4; }  // t

// Calls `each(group)`, of COUNT groups, with a constant. Epilogues that do much with an element take a group of 32
// columns at a time in a loop that is not unrolled: written out for all columns of a tile they outgrow the instruction
// cache. But registers have no index: what picks accumulators is written out for each group, and this finds it.
template <u32 COUNT, u32 FIRST = 0, class Each>
DEVICE void with_group(u32 group, Each each) {
    constexpr u32 HALF = COUNT / 2;
    if constexpr (COUNT == 1)
        each(FIRST);
    else if (group < FIRST + HALF)
        with_group<HALF, FIRST>(group, each);
    else
        with_group<COUNT - HALF, FIRST + HALF>(group, each);
}

// Group `group` of accumulators times alpha: no more work than to copy them.
template <u32 N8>
DEVICE void scale_group(float (&v)[4][4], const float (&acc)[N8][4], u32 group, float alpha) {
#pragma unroll
    for (u32 k = 0; k < 4; k++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[k][i] = __fmul_rn(alpha, acc[4 * group + k][i]);
}

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

// The lane's pieces of 32 columns: eight columns from 8t on of rows g and g + 8.
struct RowPieces {
    uint4 of[2];
};

// Where they lie in a tensor [., cols], of columns from `col` on. Epilogues that go from a group to the next add to one
// address; to compute all of them from rows and columns takes six instructions each.
template <class T>
struct RowPlaces {
    T* first;
    u64 apart;  // elements from row g to row g + 8

    __device__ __forceinline__ RowPlaces(T* tensor, u64 cols, const FragmentRows& rows, u32 col)
        : first(tensor + rows.row(0) * cols + col + 8 * lane_of_quad()), apart(FRAGMENT_ROWS / 2 * cols) {}

    // Zeros for pieces that are not `there`.
    __device__ __forceinline__ RowPieces load(const bool (&there)[2], u32 further = 0) const {
        RowPieces v;
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            v.of[half] =
                there[half] ? *reinterpret_cast<const uint4*>(first + further + half * apart) : make_uint4(0, 0, 0, 0);
        return v;
    }
    __device__ __forceinline__ void store(const RowPieces& v, const bool (&there)[2], u32 further = 0) const {
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            if (there[half]) *reinterpret_cast<uint4*>(first + further + half * apart) = v.of[half];
    }
};

constexpr u32 SLAB_PITCH = 20;                               // words from a row to the next
constexpr u32 SLAB_WORDS = FRAGMENT_ROWS * SLAB_PITCH + 16;  // neighbours are half of the banks apart
constexpr u32 PANEL_COLS = 64, PANEL_N8 = PANEL_COLS / 8, PANEL_WORDS = FRAGMENT_ROWS * PANEL_COLS / 2;
// Of a warp: three slabs or two panels.
constexpr u32 SLABS_WORDS = 1024, SLABS_BYTES = SLABS_WORDS * 4;
static_assert(3 * SLAB_WORDS <= SLABS_WORDS && 2 * PANEL_WORDS <= SLABS_WORDS, "room for either");

// Between writing and reading by other lanes, and before writing again, the warp must meet (`__syncwarp`).
struct Slab {
    u32* words;

    __device__ __forceinline__ u32& pair(u32 half, u32 k) const {
        return words[(lane_row() + 8 * half) * SLAB_PITCH + 4 * k + lane_of_quad()];
    }
    __device__ __forceinline__ uint4& piece(u32 half) const {
        return *reinterpret_cast<uint4*>(words + (lane_row() + 8 * half) * SLAB_PITCH + 4 * lane_of_quad());
    }
    // Matrix k of an instruction that moves four: pieces k of rows 8 * half .. 8 * half + 7.
    __device__ __forceinline__ u32 matrices(u32 half) const {
        const u32* const row = words + (lane() % 8 + 8 * half) * SLAB_PITCH;
        return (u32)__cvta_generic_to_shared(row + lane() / 8 * 4);
    }
    __device__ __forceinline__ void get(u32 half, u32 (&w)[4]) const { load_matrices<false>(w, matrices(half)); }
    __device__ __forceinline__ void put(u32 half, const u32 (&w)[4]) const {
#if __CUDA_ARCH__ >= 900
        store_matrices(matrices(half), w);
#else
#pragma unroll
        for (u32 k = 0; k < 4; k++) pair(half, k) = w[k];
#endif
    }
    __device__ __forceinline__ void put(const Words& w) const { put(0, w[0]), put(1, w[1]); }
    __device__ __forceinline__ RowPieces pieces() const { return {{piece(0), piece(1)}}; }
    __device__ __forceinline__ void put(const RowPieces& v) const { piece(0) = v.of[0], piece(1) = v.of[1]; }
};

// Of sixteen rows, word 4 * (g % 4) + t of the slab, or of another one for the lanes with g >= 4.
DEVICE void get_columns(u32 (&w)[FRAGMENT_ROWS], Slab first, Slab second) {
    const u32* const row = (lane() % 8 < 4 ? first : second).words + lane() / 8 * SLAB_PITCH + lane() % 4 * 4;
#pragma unroll
    for (u32 i = 0; i < FRAGMENT_ROWS; i += 4) {
        u32 four[4];
        load_matrices<false>(four, (u32)__cvta_generic_to_shared(row + i * SLAB_PITCH));
#pragma unroll
        for (u32 j = 0; j < 4; j++) w[i + j] = four[j];
    }
}

// 16 rows x 64 columns, eight pieces a row, each at its own number XOR that of the row: neither pairs nor pieces meet
// in a bank. To be met at as a slab is.
struct Panel {
    u32* words;

    __device__ __forceinline__ u32& pair(u32 half, u32 k) const {
        return words[(lane_row() + 8 * half) * (PANEL_COLS / 2) + 4 * (k ^ lane_row()) + lane_of_quad()];
    }
    // Piece lane % 8 of row lane / 8 + 4 * i.
    __device__ __forceinline__ uint4& piece(u32 i) const {
        const u32 row = lane() / 8 + 4 * i;
        return *reinterpret_cast<uint4*>(words + row * (PANEL_COLS / 2) + 4 * (lane() % 8 ^ row % 8));
    }
};
constexpr u32 PANEL_PIECES = 4;  // of a lane

// The lane's pieces of panels side by side in a tensor [., cols], whose columns begin at `col`.
struct PanelPieces {
    u16* first;
    u64 apart;  // elements from a piece to the next
    u32 left;   // rows from the first piece's on
    u32 cols;   // columns from it on

    __device__ __forceinline__ PanelPieces(u16* to, u64 cols, const FragmentRows& rows, u32 col)
        : first(to + (rows.first + lane() / 8) * cols + col + 8 * (lane() % 8)),
          apart(FRAGMENT_ROWS / PANEL_PIECES * cols),
          left(rows.count > lane() / 8 ? rows.count - lane() / 8 : 0),
          cols((u32)cols > col + 8 * (lane() % 8) ? (u32)cols - col - 8 * (lane() % 8) : 0) {}

    // Those of panel `p` that are there: `each(i, place)`.
    template <class Each>
    __device__ __forceinline__ void of_panel(u32 p, Each each) const {
        if (PANEL_COLS * p >= cols) return;
#pragma unroll
        for (u32 i = 0; i < PANEL_PIECES; i++)
            if (FRAGMENT_ROWS / PANEL_PIECES * i < left)
                each(i, reinterpret_cast<uint4*>(first + i * apart + PANEL_COLS * p));
    }
};

struct Slabs {
    u32* first;

    __device__ __forceinline__ Slab operator[](u32 i) const { return {first + i * SLAB_WORDS}; }
    __device__ __forceinline__ Panel panel(u32 i) const { return {first + i * PANEL_WORDS}; }
};

// Those of this warp; `memory` has SLABS_BYTES for each warp.
DEVICE Slabs slabs_of_warp(void* memory) { return {reinterpret_cast<u32*>(memory) + threadIdx.x / 32 * SLABS_WORDS}; }

// The two columns of a word whose first is `col`; zeros past `end`.
DEVICE float2 load_columns(const float* from, u32 col, u32 end) {
    return col < end ? __ldg(reinterpret_cast<const float2*>(from + col)) : make_float2(0.0f, 0.0f);
}
