// A tile of 128 rows and 128 columns of BF16 in shared memory, laid out so that both directions read it without bank
// conflicts.
//
// A row is 64 words, sixteen chunks of 16 bytes. Rowwise, eight threads read chunks 0, 2, .. 14 of a row and then 1, 3, ..
// 15: the two halves of a row would meet in the same banks, so in the upper half neighbouring chunks change places.
// Columnwise, a warp reads one word each of eight groups of 16 rows and four neighbouring words: each group is shifted by
// four words.
#pragma once
#include "groups.cuh"

constexpr u32 THREADS = 256;
constexpr u32 TILE_COLS = 128;
constexpr u32 TOKEN_BLOCKS = TILE_ROWS / BLOCK;
constexpr u32 COLUMN_BLOCKS = TILE_COLS / BLOCK;
constexpr u32 ROW_WORDS = TILE_COLS / 2;
constexpr u32 ROW_CHUNKS = ROW_WORDS / 4;
constexpr u32 SHARED_WORDS = TILE_ROWS * ROW_WORDS + TOKEN_BLOCKS * 4;

// In chunks.
DEVICE u32 chunk_index(u32 row, u32 chunk) { return row * ROW_CHUNKS + row / BLOCK + (chunk ^ chunk / (ROW_CHUNKS / 2)); }

// In words: the first token of a group of 16, for a pair of columns.
DEVICE u32 column_index(u32 token_block, u32 pair) { return chunk_index(token_block * BLOCK, pair / 4) * 4 + pair % 4; }

// Starts copying `rows` rows of `chunks` chunks that lie `stride` chunks apart; zeros fill up the last 16 rows.
DEVICE void copy_tile(uint4* shared, const uint4* from, u64 stride, u32 rows, u32 chunks) {
    static_assert(THREADS == BLOCK * ROW_CHUNKS, "a thread copies the same chunk of one row of each group of 16");
    const u32 chunk = threadIdx.x % ROW_CHUNKS, row = threadIdx.x / ROW_CHUNKS;
    u32 to = (u32)__cvta_generic_to_shared(shared + chunk_index(row, chunk));
    const uint4* at = from + row * stride + chunk;
#pragma unroll
    for (u32 i = 0; i < TOKEN_BLOCKS; i++) {
        // Nothing is read of a row past the end, whose address may not exist.
        const bool live = row + i * BLOCK < rows;
        if (chunk < chunks && i * BLOCK < rows)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(live ? at : from), "r"(live ? 16 : 0)
                         : "memory");
        to += (chunk_index(BLOCK, 0) - chunk_index(0, 0)) * sizeof(uint4);
        at += BLOCK * stride;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// The tile is there for all threads, and so is what they wrote to shared memory before.
DEVICE void wait_for_tile() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
}

// Sixteen tokens of two neighbouring columns.
struct ColumnPair {
    u32 tokens[BLOCK];
};

DEVICE ColumnPair load_columns(const u32* columns) {
    ColumnPair pair;
#pragma unroll
    for (u32 i = 0; i < BLOCK; i++) pair.tokens[i] = columns[i * ROW_WORDS];
    return pair;
}
