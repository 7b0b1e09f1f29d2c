// A patch of 128 rows and 64 columns of BF16 in shared memory, laid out so that both directions read it without bank
// conflicts.
//
// A row is eight chunks of 16 bytes. Rowwise, eight threads read chunks 0, 2, 4, 6 of two rows and then 1, 3, 5, 7: in
// every other row neighbouring chunks change places, or both rows would meet in the same banks. Columnwise, a warp
// reads one word each of eight groups of 16 rows and four neighbouring words: each group is shifted by one chunk.
#pragma once
#include "encode.cuh"
#include "groups.cuh"

constexpr u32 THREADS = 128;
constexpr u32 PATCH_ROWS = TILE_ROWS;
constexpr u32 PATCH_COLS = 64;
constexpr u32 TOKEN_BLOCKS = PATCH_ROWS / BLOCK;
constexpr u32 COLUMN_BLOCKS = PATCH_COLS / BLOCK;
constexpr u32 ROW_CHUNKS = PATCH_COLS / 8;
constexpr u32 SHARED_CHUNKS = PATCH_ROWS * ROW_CHUNKS + TOKEN_BLOCKS;

DEVICE u32 chunk_index(u32 row, u32 chunk) { return row * ROW_CHUNKS + row / BLOCK + (chunk ^ row % 2); }

// A policy for what is read once: it leaves the cache first, so that what is written stays until its lines are full. A
// line of a columnwise operand holds the tokens of several thread blocks.
DEVICE u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void copy_chunk(u32 to, const uint4* from, u32 bytes, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
                 "l"(policy)
                 : "memory");
}

// Starts copying `rows` rows of `chunks` chunks that lie `stride` chunks apart; zeros fill up the last 16 rows.
DEVICE void copy_patch(uint4* shared, const uint4* from, u64 stride, u32 rows, u32 chunks) {
    const u64 policy = read_once();
    static_assert(THREADS == BLOCK * ROW_CHUNKS, "a thread copies the same chunk of one row of each group of 16");
    constexpr u32 STEP = (BLOCK * ROW_CHUNKS + 1) * sizeof(uint4);  // 16 rows further in shared memory
    const u32 chunk = threadIdx.x % ROW_CHUNKS, row = threadIdx.x / ROW_CHUNKS;
    const u32 to = (u32)__cvta_generic_to_shared(shared + chunk_index(row, chunk));
    const uint4* at = from + row * stride + chunk;
    if (rows == PATCH_ROWS && chunks == ROW_CHUNKS) {
#pragma unroll
        for (u32 i = 0; i < TOKEN_BLOCKS; i++, at += BLOCK * stride)
            copy_chunk(to + i * STEP, at, sizeof(uint4), policy);
    } else if (chunk < chunks) {
#pragma unroll 1
        for (u32 i = 0; i * BLOCK < rows; i++, at += BLOCK * stride) {
            // Nothing is read of a row past the end, whose address may not exist.
            const bool live = row + i * BLOCK < rows;
            copy_chunk(to + i * STEP, live ? at : from, live ? sizeof(uint4) : 0, policy);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// All copies that this thread started are done. Other threads see them behind a barrier.
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Sixteen tokens of two neighbouring columns.
struct ColumnPair {
    u32 tokens[BLOCK];
};

// Pair `pair` of columns, token block `token_block`.
DEVICE ColumnPair load_columns(const uint4* shared, u32 token_block, u32 pair) {
    const u32* const words = reinterpret_cast<const u32*>(shared);
    const u32 even = chunk_index(token_block * BLOCK, pair / 4) * 4 + pair % 4;
    const u32 odd = chunk_index(token_block * BLOCK + 1, pair / 4) * 4 + pair % 4;
    ColumnPair loaded;
#pragma unroll
    for (u32 i = 0; i < BLOCK; i += 2) {
        loaded.tokens[i] = words[even + i * ROW_CHUNKS * 4];
        loaded.tokens[i + 1] = words[odd + i * ROW_CHUNKS * 4];
    }
    return loaded;
}
