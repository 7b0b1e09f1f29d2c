// A patch of 128 rows and 128 columns of BF16 in shared memory, laid out so that both directions read it without bank
// conflicts.
//
// A row is 64 words, sixteen chunks of 16 bytes. Rowwise, eight threads read chunks 0, 2, .. 14 of a row and then 1, 3, ..
// 15: the two halves of a row would meet in the same banks, so in the upper half neighbouring chunks change places.
// Columnwise, a warp reads one word each of eight groups of 16 rows and four neighbouring words: each group is shifted by
// four words.
#pragma once
#include "encode.cuh"
#include "groups.cuh"

constexpr u32 THREADS = 256;
constexpr u32 PATCH_ROWS = TILE_ROWS;
constexpr u32 PATCH_COLS = 128;
constexpr u32 TOKEN_BLOCKS = PATCH_ROWS / BLOCK;
constexpr u32 COLUMN_BLOCKS = PATCH_COLS / BLOCK;
constexpr u32 ROW_WORDS = PATCH_COLS / 2;
constexpr u32 ROW_CHUNKS = ROW_WORDS / 4;
constexpr u32 SHIFT = 32 / 4 / TOKEN_BLOCKS;  // chunks between groups of 16 rows, beyond the rows themselves
constexpr u32 SHARED_CHUNKS = PATCH_ROWS * ROW_CHUNKS + TOKEN_BLOCKS * SHIFT;

// In chunks.
DEVICE u32 chunk_index(u32 row, u32 chunk) {
    return row * ROW_CHUNKS + row / BLOCK * SHIFT + (chunk ^ chunk / (ROW_CHUNKS / 2));
}

// In words: the first token of a group of 16, for a pair of columns.
DEVICE u32 column_index(u32 token_block, u32 pair) { return chunk_index(token_block * BLOCK, pair / 4) * 4 + pair % 4; }

// A policy for what is read once: it leaves the cache first, so that what is written stays until its lines are full. A line
// of a columnwise operand holds the tokens of several thread blocks.
DEVICE u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void copy_chunk(u32 to, const uint4* from, u32 bytes, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes), "l"(policy)
                 : "memory");
}

// Starts copying `rows` rows of `chunks` chunks that lie `stride` chunks apart; zeros fill up the last 16 rows.
DEVICE void copy_patch(uint4* shared, const uint4* from, u64 stride, u32 rows, u32 chunks) {
    const u64 policy = read_once();
    // A thread copies the same chunk of every 16th row.
    constexpr u32 STEP = THREADS / ROW_CHUNKS;
    static_assert(BLOCK % STEP == 0, "the steps below cross groups of 16 rows evenly");
    const u32 chunk = threadIdx.x % ROW_CHUNKS, row = threadIdx.x / ROW_CHUNKS;
    const u32 to = (u32)__cvta_generic_to_shared(shared + chunk_index(row, chunk));
    const auto offset = [](u32 i) { return (i * STEP * ROW_CHUNKS + i * STEP / BLOCK * SHIFT) * (u32)sizeof(uint4); };
    const uint4* at = from + row * stride + chunk;
    if (rows == PATCH_ROWS && chunks == ROW_CHUNKS) {
#pragma unroll
        for (u32 i = 0; i < PATCH_ROWS / STEP; i++, at += STEP * stride) copy_chunk(to + offset(i), at, sizeof(uint4), policy);
    } else if (chunk < chunks) {
        const u32 filled = (rows + BLOCK - 1) / BLOCK * BLOCK;
#pragma unroll 1
        for (u32 i = 0; row + i * STEP < filled; i++, at += STEP * stride) {
            // Nothing is read of a row past the end, whose address may not exist.
            const bool live = row + i * STEP < rows;
            copy_chunk(to + offset(i), live ? at : from, live ? sizeof(uint4) : 0, policy);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Copies that this thread started so far belong together.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All copies that this thread started are done. Other threads see them behind a barrier.
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// A block of a row, in two chunks.
DEVICE Block<Neighbours> load_row_block(const uint4* first, const uint4* second) {
    const uint4 a = *first, b = *second;
    return Block<Neighbours>({{a.x, a.y, a.z, a.w}}, {{b.x, b.y, b.z, b.w}});
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
