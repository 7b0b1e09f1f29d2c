// What the main loop of packed_loop.cuh has in shared memory, and how it gets there.
//
// Compile-time choice: ROWS.
#pragma once
#include "fragment.cuh"
#include "groups.cuh"
#include "mma.cuh"

constexpr u32 WARPS = 4, THREADS = 32 * WARPS;
constexpr u32 WARP_COLS = 64, N8 = WARP_COLS / 8;
constexpr u32 TILE_COLS = WARPS * WARP_COLS;
constexpr u32 FRAGMENTS = ROWS / FRAGMENT_ROWS;
constexpr u32 STAGES = 3;
constexpr u32 STEPS = 128;  // of k in a stage
// What shared memory allows, and registers: sums take 32 for each fragment of rows.
constexpr u32 BLOCKS_OF_SM = ROWS == 64 ? 2 : 3;
constexpr u32 OUTSIDE = 0xFFFFFFFFu;

constexpr u32 ROW_CHUNKS = STEPS / 8;  // of 16 bytes
constexpr u32 SCALES = STEPS / BLOCK * TILE_COLS / BLOCK;
static_assert(SCALES == 32 * WARPS, "a lane decodes one");

// A stage, in bytes: rows, whose chunk c of row r lies in place c ^ (r % 8); codes; scales.
constexpr u32 CODES_AT = ROWS * STEPS * 2, SCALES_AT = CODES_AT + TILE_COLS * STEPS / 2;
constexpr u32 STAGE_ALIGNMENT = STEPS * 2;  // of a row
constexpr u32 STAGE_BYTES = SCALES_AT + STAGE_ALIGNMENT;
static_assert(SCALES <= STAGE_ALIGNMENT, "scales are padded to that");

// Quantized weights of all experts.
struct PackedWeights {
    const u8* codes;   // [E, n, k / 2]
    const u8* scales;  // [E, n, k / 16]
    u32 n, k;          // as stored
};

DEVICE u32 warp() { return threadIdx.x / 32; }

// What follows are the chunks that a thread copies in the stage that begins at `k`. What is outside is filled up with
// zeros and never read. The host sees to it that offsets fit 32 bits.

// The rows of `a` [T, contraction] from `row` on, `rows` of them.
struct Rows {
    static constexpr u32 CHUNKS = ROWS * ROW_CHUNKS / THREADS, APART = THREADS / ROW_CHUNKS;  // rows, eights of them
    const u16* base;
    u32 from[CHUNKS];
    u32 end[CHUNKS];  // of k, as a thread's chunk sees it; 0 where it is outside
    u32 to;

    __device__ __forceinline__ Rows(const u16* a, u32 contraction, u64 row, u32 rows) : base(a + row * contraction) {
        const u32 r = threadIdx.x / ROW_CHUNKS, chunk = threadIdx.x % ROW_CHUNKS;
        to = (r * ROW_CHUNKS + (chunk ^ r % 8)) * 16;
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            from[i] = (r + i * APART) * contraction + 8 * chunk;
            end[i] = r + i * APART < rows && 8 * chunk < contraction ? contraction - 8 * chunk : 0;
        }
    }

    __device__ __forceinline__ void copy(u32 stage, u32 k) const {
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++)
            copy_async(stage + to + i * APART * ROW_CHUNKS * 16, base + k + from[i], k < end[i]);
    }
};

// What `index` says: a row or column of the weight, the first one instead of none, so that addresses are aligned.
struct Place {
    u32 at;
    bool exists;

    __device__ __forceinline__ Place(u32 index) : at(index == OUTSIDE ? 0 : index), exists(index != OUTSIDE) {}
};

// An expert's codes and block scales. Chunks of 16 bytes lie so that lanes of a warp meet in different banks:
//
//   fprop   256 columns of 4 chunks; chunk c of column n lies in place c ^ (n / 2 % 4)
//   dgrad   128 steps of k of 8 chunks; chunk c of step s lies in place c ^ (s / 2 % 4 * 2)
//
// Scales lie as in memory: fprop, eight of each of 16 tiles of columns; dgrad, 16 of each of eight tiles of steps.
template <bool ACROSS>
struct Codes {
    static constexpr u32 CHUNKS = TILE_COLS * STEPS / 32 / THREADS, ROW = ACROSS ? 8 : 4, APART = THREADS / ROW;
    static constexpr u32 RUN = ACROSS ? TILE_COLS / BLOCK : STEPS / BLOCK;  // of scales
    const u8 *codes, *scales;
    u32 pitch;  // codes' bytes from a stage to the next
    // Of fprop for each chunk, since rows of gates and ups lie apart; of dgrad for the first.
    u32 from[ACROSS ? 1 : CHUNKS], end[ACROSS ? 1 : CHUNKS];
    u32 scales_from, scales_end;
    u32 columns_left;  // of dgrad, from the tile's first on
    u32 to;

    // `index(i)`: the weight's row (fprop) or column (dgrad) that is column i of the tile, or OUTSIDE.
    template <class Index>
    __device__ __forceinline__ Codes(const PackedWeights& w, u32 expert, Index index) {
        const u32 contraction = ACROSS ? w.n : w.k, row_bytes = w.k / 2, row_scales = w.k / BLOCK;
        const u32 row = threadIdx.x / ROW, chunk = threadIdx.x % ROW;
        codes = w.codes + (u64)expert * w.n * row_bytes, scales = w.scales + (u64)expert * w.n * row_scales;
        pitch = ACROSS ? STEPS * row_bytes : STEPS / 2;
        to = CODES_AT + 16 * (row * ROW + (chunk ^ row / 2 % 4 * (ROW / 4)));
#pragma unroll
        for (u32 i = 0; i < (ACROSS ? 1 : CHUNKS); i++) {
            const u32 r = row + i * APART, k = ACROSS ? r : 32 * chunk;
            const Place place(index(ACROSS ? 32 * chunk : r));
            from[i] = ACROSS ? k * row_bytes + place.at / 2 : place.at * row_bytes + k / 2;
            end[i] = place.exists && k < contraction ? contraction - k : 0;
        }
        const u32 k = ACROSS ? threadIdx.x * BLOCK : 0;
        const Place place(index(ACROSS ? 0 : threadIdx.x * BLOCK));
        const u32 at = place.at;
        scales_from = ACROSS ? k * row_scales + at / BLOCK : at * row_scales;
        scales_end = place.exists && k < contraction ? contraction - k : 0;
        columns_left = w.k - at;
    }

    __device__ __forceinline__ void copy(u32 stage, u32 k) const {
        const u32 step = k / STEPS * pitch;
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            const u32 at = step + (ACROSS ? from[0] + i * (pitch / CHUNKS) : from[i]);
            const bool live = ACROSS ? k + i * APART < end[0] : k < end[i];
            copy_async(stage + to + i * THREADS * 16, codes + at, live);
        }
        if (threadIdx.x < SCALES / RUN) {
            const u32 there = min((ACROSS ? columns_left : scales_end - k) / BLOCK, RUN);
            copy_part_async<RUN>(stage + SCALES_AT + threadIdx.x * RUN, scales + (step / 8 + scales_from),
                                 k < scales_end ? there : 0);
        }
    }
};
