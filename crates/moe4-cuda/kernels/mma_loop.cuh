// The main loop of the products by mma.sync, for every GPU from compute capability 8.0 on: a tile of 128 x 128
// accumulators, out[m][n] = sum over k of a[m][k] * b[n][k], of BF16 operands, k ascending.
//
//   a warp     32 x 64 of the tile, as two fragments of 16 x 64 (fragment.cuh); eight warps, 4 x 2
//   a stage    32 steps of k of both operands in shared memory; while one is multiplied, the next two are on their way
//
// An operand lies with k along its rows (K_MAJOR) or across them. In both ways a stage is 512 chunks of 16 bytes,
// permuted so that eight lanes of a matrix load meet in eight different banks:
//
//   K_MAJOR    128 rows of 4 chunks; chunk c of row r lies in place c ^ (r / 2 % 4)
//   else       32 rows of 16 chunks; chunk c of row k lies in place c ^ (k % 8), and matrices are loaded transposed
//
// What is outside of an operand (rows, columns, k) is filled up with zeros and never read.
#pragma once
#include "fragment.cuh"
#include "groups.cuh"
#include "mma.cuh"

constexpr u32 THREADS = 256;
constexpr u32 TILE_COLS = 128;
constexpr u32 STAGES = 3;
constexpr u32 STEPS = 32;                           // of k in a stage
constexpr u32 SIDE_CHUNKS = TILE_COLS * STEPS / 8;  // of an operand in a stage
constexpr u32 CHUNKS_OF_THREAD = SIDE_CHUNKS / THREADS;
constexpr u32 WARP_ROWS = 32, WARP_COLS = 64;
constexpr u32 FRAGMENTS = WARP_ROWS / FRAGMENT_ROWS, N8 = WARP_COLS / 8;
constexpr u32 OUTSIDE = 0xFFFFFFFFu;
static_assert(TILE_ROWS == TILE_COLS, "both operands of a stage have the same size");

typedef float Accumulators[FRAGMENTS][N8][4];

struct Stage {
    uint4 a[SIDE_CHUNKS], b[SIDE_CHUNKS];
};

DEVICE u32 warp_row() { return threadIdx.x / 64 * WARP_ROWS; }
DEVICE u32 warp_slice() { return threadIdx.x / 32 % 2; }  // which 64 columns of the tile

template <bool K_MAJOR>
DEVICE u32 place(u32 row, u32 chunk) {
    return K_MAJOR ? row * 4 + (chunk ^ row / 2 % 4) : row * 16 + (chunk ^ row % 8);
}

// The chunks of an operand that this thread copies.
template <bool K_MAJOR>
struct Side {
    const u16* from[CHUNKS_OF_THREAD];
    u32 to[CHUNKS_OF_THREAD];    // byte within a stage's operand
    int left[CHUNKS_OF_THREAD];  // steps of k from the chunk on; none where it is outside
    u64 advance;                 // elements from a stage to the next

    // `index(i)`: the operand's row (K_MAJOR) or column that is number i of the tile, or OUTSIDE; columns come in
    // eights. `stride`: elements between rows.
    template <typename Index>
    __device__ __forceinline__ Side(const u16* base, u64 stride, u32 length, Index index)
        : advance(K_MAJOR ? STEPS : STEPS * stride) {
#pragma unroll
        for (u32 i = 0; i < CHUNKS_OF_THREAD; i++) {
            const u32 n = threadIdx.x + i * THREADS;
            const u32 row = K_MAJOR ? n / 4 : n / 16, chunk = K_MAJOR ? n % 4 : n % 16;
            const u32 at = index(K_MAJOR ? row : 8 * chunk), k = K_MAJOR ? 8 * chunk : row;
            to[i] = place<K_MAJOR>(row, chunk) * sizeof(uint4);
            left[i] = at == OUTSIDE ? 0 : (int)length - (int)k;
            from[i] = base;
            if (left[i] > 0) from[i] += K_MAJOR ? at * stride + k : k * stride + at;
        }
    }

    // Starts copying the next stage.
    __device__ __forceinline__ void copy(u32 stage) {
#pragma unroll
        for (u32 i = 0; i < CHUNKS_OF_THREAD; i++) {
            copy_async(stage + to[i], from[i], left[i] > 0);
            left[i] -= STEPS;
            if (left[i] > 0) from[i] += advance;
        }
    }
};

// Four 8 x 8 matrices, 16 rows of the tile from `row` on and 16 steps of k from `k` on. In `a`, the second matrix has
// the next rows and the third the next steps; in `b` it is the other way round.
template <bool K_MAJOR, bool IS_A>
DEVICE void load_operand(u32 (&w)[4], u32 stage, u32 row, u32 k) {
    const u32 second = lane() / 8 % 2 * 8, third = lane() / 16 * 8;
    const u32 r = row + (IS_A ? second : third), s = k + (IS_A ? third : second), i = lane() % 8;
    const u32 at = K_MAJOR ? place<true>(r + i, s / 8) : place<false>(s + i, r / 8);
    load_matrices<!K_MAJOR>(w, stage + at * sizeof(uint4));
}

// What is on its way, and, once all is multiplied, the slabs of the epilogue.
DEVICE Stage* shared_stages() {
    __shared__ Stage stages[STAGES];
    static_assert(sizeof(stages) >= SLABS_BYTES * (THREADS / 32), "a warp's slabs");
    return stages;
}

// Adds up `length` steps of k. All threads of the block take part, and meet again at the end.
template <bool A_K_MAJOR, bool B_K_MAJOR>
DEVICE void multiply(Accumulators& acc, Side<A_K_MAJOR> a, Side<B_K_MAJOR> b, u32 length) {
    const u32 first = (u32)__cvta_generic_to_shared(shared_stages()), count = (length + STEPS - 1) / STEPS;
    const auto copy = [&](u32 stage) {
        const u32 at = first + stage * sizeof(Stage);
        a.copy(at);
        b.copy(at + SIDE_CHUNKS * sizeof(uint4));
    };
#pragma unroll
    for (u32 i = 0; i < STAGES - 1; i++) {
        if (i < count) copy(i);
        commit_copies();
    }
    u32 stage = 0;
#pragma unroll 1
    for (u32 i = 0; i < count; i++) {
        wait_for_groups<STAGES - 2>();
        // All threads' copies are there, and none reads the stage before any more: it is filled again.
        __syncthreads();
        if (i + STAGES - 1 < count) copy(stage == 0 ? STAGES - 1 : stage - 1);
        commit_copies();
        const u32 at = first + stage * sizeof(Stage);
#pragma unroll
        for (u32 k = 0; k < STEPS; k += 16) {
            u32 left[FRAGMENTS][4];
#pragma unroll
            for (u32 m = 0; m < FRAGMENTS; m++)
                load_operand<A_K_MAJOR, true>(left[m], at, warp_row() + m * FRAGMENT_ROWS, k);
#pragma unroll
            for (u32 j = 0; j < N8; j += 2) {
                u32 right[4];
                load_operand<B_K_MAJOR, false>(right, at + SIDE_CHUNKS * sizeof(uint4),
                                               warp_slice() * WARP_COLS + 8 * j, k);
#pragma unroll
                for (u32 m = 0; m < FRAGMENTS; m++) {
                    multiply_accumulate(acc[m][j], left[m], right[0], right[1]);
                    multiply_accumulate(acc[m][j + 1], left[m], right[2], right[3]);
                }
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wait_for_groups<0>();
    __syncthreads();
}

// Weights of all experts: `stride` elements apart, or at addresses of their own.
struct Weights {
    const u16* base;
    u64 stride;
    const u16* const* table;  // [E], or none

    __device__ __forceinline__ const u16* of(u32 expert) const {
        return table ? table[expert] : base + expert * stride;
    }
};

// The rows of `a` [T, contraction] that a tile has.
DEVICE Side<true> tile_rows(const u16* a, u32 contraction, const Tile& tile) {
    return Side<true>(a + tile.row * contraction, contraction, contraction,
                      [&](u32 i) { return i < tile.rows ? i : OUTSIDE; });
}
