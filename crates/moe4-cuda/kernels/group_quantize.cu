// Quantization of [T, cols] BF16 with given amaxes, per expert: rowwise, columnwise, or both in one read.
//
//   rowwise      blocks of 16 columns         codes [T, cols/2]    scales [T, cols/16]
//   columnwise   blocks of 16 tokens, RHT     codes [cols, k/2]    scales [cols, k/16]     k: padded token positions
//
// A thread block takes 128 columns and goes down several tiles of rows: so thread blocks that run at the same time read
// whole rows, and each writes its columns piece after piece. The next patch is copied to shared memory while this one is
// worked on, once for each direction: blocks of rows, then 16 tokens of two neighbouring columns at a time. What a block
// needs of the scales, the multiplier for each scale byte, is computed once an expert. Blocks that cannot take the short way
// are noted by their thread, which does them at the end of the patch.
//
// Compile-time choices: ROWWISE, COLUMNWISE; ROW_STOCHASTIC, COL_STOCHASTIC; RHT, SIGN_MASK or MASK_AT_LAUNCH; ROW_SWIZZLED, COL_SWIZZLED
// (scales in the 128x4 layout); ROW_UNPACKED, COL_UNPACKED (also code times block scale in BF16).
#include "encode.cuh"
#include "groups.cuh"
#include "output.cuh"
#include "shared_tile.cuh"

constexpr u32 RESIDENT = 3;  // thread blocks of a multiprocessor, by shared memory
constexpr u32 ROWS_AT_ONCE = ROW_STOCHASTIC ? 1 : 2;

struct Copy {
    const float* amax;  // [E]
    Out out;
    RandomStream random;
};

// v[at..at+8], or a quarter of it, rounded to BF16.
template <bool QUARTER>
DEVICE Interleaved rounded(const float (&v)[16], u32 at) {
    const auto value = [&](u32 i) { return QUARTER ? __fmul_rn(v[at + i], 0.25f) : v[at + i]; };
    const auto pair = [&](u32 a, u32 b) { return to_bf16x2(value(a), value(b)); };
    return {{pair(0, 2), pair(4, 6), pair(1, 3), pair(5, 7)}};
}

// The lower or upper column of a pair, transformed.
template <bool QUARTER>
DEVICE Block<Interleaved> transform(const ColumnPair& pair, u32 half, u32 mask) {
    float v[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i] = half ? upper(pair.tokens[i]) : lower(pair.tokens[i]);
    if constexpr (RHT) hadamard<SIGN_MASK>(v, mask);
    return Block<Interleaved>(rounded<QUARTER>(v, 0), rounded<QUARTER>(v, 8));
}

// What the thread block works on.
struct Context {
    Tile tile;
    u32 first_block, live_blocks;  // its blocks of 16 columns
    u32 cols, blocks;              // of the tensor, and blocks of 16 in a row
    u64 token_blocks;              // blocks of 16 in a line of the columnwise operand
    u32 sign_mask;
};

typedef Cursor<ROW_SWIZZLED, ROW_UNPACKED> RowCursor;
typedef Cursor<COL_SWIZZLED, COL_UNPACKED> ColumnCursor;

// Zeros for the rows and token positions of nobody.
DEVICE void fill_with_zeros(const Context& c, const Out& rowwise, const Out& columnwise) {
    if constexpr (ROWWISE)
        for (u32 i = threadIdx.x; i < c.tile.rows * c.live_blocks; i += THREADS)
            RowCursor(rowwise, c.tile.row + i / c.live_blocks, c.first_block + i % c.live_blocks, c.blocks).store({});
    if constexpr (COLUMNWISE) {
        const u32 positions = c.tile.positions / BLOCK;
        for (u32 i = threadIdx.x; i < positions * c.live_blocks * BLOCK; i += THREADS) {
            const u64 block = c.tile.position / BLOCK + i % positions;
            ColumnCursor(columnwise, c.first_block * BLOCK + i / positions, block, c.token_blocks).store({});
        }
    }
}

constexpr u32 ROW_STEP = THREADS / COLUMN_BLOCKS;  // rows between two of a thread
constexpr u32 PAIR_STEP = THREADS / TOKEN_BLOCKS;  // pairs of columns between two of a thread

// Returns which of the thread's blocks are left, one bit each.
DEVICE u32 quantize_rows(const uint4* shared, const Context& c, const Copy& copy,
                         const Scaling& scaling) {
    const u32 local = threadIdx.x % COLUMN_BLOCKS, first_row = threadIdx.x / COLUMN_BLOCKS, block = c.first_block + local;
    if (local >= c.live_blocks) return 0;
    const uint4 *first = shared + chunk_index(first_row, 2 * local), *second = shared + chunk_index(first_row, 2 * local + 1);
    RowCursor cursor(copy.out, c.tile.row + first_row, block, c.blocks);
    u64 position = (c.tile.token + first_row) * c.blocks + block;
    u32 left = 0;
#pragma unroll ROWS_AT_ONCE
    for (u32 row = first_row, bit = 1; row < c.tile.rows; row += ROW_STEP, bit *= 2) {
        bool usual;
        const Block<Neighbours> block = load_row_block(first, second);
        const Quantized q = quantize_usual<ROW_STOCHASTIC>(block, scaling, copy.random, position, usual);
        if (usual) cursor.store(q);
        left |= usual ? 0 : bit;
        cursor.advance(ROW_STEP);
        position += ROW_STEP * c.blocks;
        first += chunk_index(ROW_STEP, 0), second += chunk_index(ROW_STEP, 0);
    }
    return left;
}

DEVICE void quantize_rare_rows(u32 left, const uint4* shared, const Context& c, const Copy& copy,
                               const Scaling& scaling) {
#pragma unroll 1
    for (u32 i = 0; left >> i != 0; i++) {
        if (!(left >> i & 1)) continue;
        const u32 row = threadIdx.x / COLUMN_BLOCKS + i * ROW_STEP, local = threadIdx.x % COLUMN_BLOCKS;
        const Block<Neighbours> v =
            load_row_block(shared + chunk_index(row, 2 * local), shared + chunk_index(row, 2 * local + 1));
        const u64 position = (c.tile.token + row) * c.blocks + c.first_block + local;
        RowCursor(copy.out, c.tile.row + row, c.first_block + local, c.blocks)
            .store(quantize_any<ROW_STOCHASTIC>(v, scaling, 1.0f, copy.random, position));
    }
}

// Returns which of the thread's blocks are left, one bit each.
DEVICE u32 quantize_columns(const uint4* shared, const Context& c, const Copy& copy,
                            const Scaling& scaling) {
    const u32 token_block = threadIdx.x % TOKEN_BLOCKS, first_pair = threadIdx.x / TOKEN_BLOCKS;
    if (token_block * BLOCK >= c.tile.positions) return 0;
    const u32 first_column = c.first_block * BLOCK + 2 * first_pair;
    ColumnCursor cursor(copy.out, first_column, c.tile.position / BLOCK + token_block, c.token_blocks);
    u64 position = (c.tile.token / BLOCK + token_block) * c.cols + first_column;
    u32 left = 0;
#pragma unroll 1
    for (u32 pair = first_pair, bit = 1; pair < c.live_blocks * (BLOCK / 2); pair += PAIR_STEP, bit *= 4) {
        const ColumnPair loaded = load_columns(reinterpret_cast<const u32*>(shared) + column_index(token_block, pair));
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            bool usual;
            const Block<Interleaved> block = transform<false>(loaded, half, c.sign_mask);
            const Quantized q = quantize_usual<COL_STOCHASTIC>(block, scaling, copy.random, position + half, usual);
            if (usual) cursor.store(q);
            left |= usual ? 0 : bit << half;
            cursor.advance(half ? 2 * PAIR_STEP - 1 : 1);
        }
        position += 2 * PAIR_STEP;
    }
    return left;
}

DEVICE void quantize_rare_columns(u32 left, const uint4* shared, const Context& c, const Copy& copy,
                                  const Scaling& scaling) {
    const u32 token_block = threadIdx.x % TOKEN_BLOCKS;
#pragma unroll 1
    for (u32 i = 0; left >> i != 0; i++) {
        if (!(left >> i & 1)) continue;
        const u32 pair = threadIdx.x / TOKEN_BLOCKS + i / 2 * PAIR_STEP, col = c.first_block * BLOCK + 2 * pair + i % 2;
        const ColumnPair loaded = load_columns(reinterpret_cast<const u32*>(shared) + column_index(token_block, pair));
        const Block<Interleaved> v = transform<RHT>(loaded, i % 2, c.sign_mask);
        const u64 position = (c.tile.token / BLOCK + token_block) * c.cols + col;
        ColumnCursor(copy.out, col, c.tile.position / BLOCK + token_block, c.token_blocks)
            .store(quantize_any<COL_STOCHASTIC>(v, scaling, RHT ? 4.0f : 1.0f, copy.random, position));
    }
}

constexpr u32 MOST_TILES = 8;  // of a thread block

// blockIdx.x: which 128 columns; the other dimensions: which `count` tiles.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
group_quantize(const uint4* __restrict__ x, u32 cols, u64 k, u32 count, const Groups groups, u32 sign_mask,
               const __grid_constant__ Copy rowwise, const __grid_constant__ Copy columnwise) {
    extern __shared__ uint4 buffers[];  // two patches
    __shared__ Tile tiles[MOST_TILES];
    __shared__ Scaling row_scaling, col_scaling;
    if (threadIdx.x < count) tiles[threadIdx.x] = load_tile(groups, block_in_grid() * count + threadIdx.x);
    __syncthreads();

    const u32 first_block = blockIdx.x * COLUMN_BLOCKS, blocks = cols / BLOCK;
    Context c{{}, first_block, min(blocks - first_block, COLUMN_BLOCKS), cols, blocks, k / BLOCK, sign_mask};
    const auto start_copy = [&](u32 i) {
        const Tile& tile = tiles[i];
        if (tile.expert >= groups.experts) return;
        const uint4* const from = x + (tile.row * blocks + first_block) * 2;
        copy_patch(buffers + i % 2 * SHARED_CHUNKS, from, (u64)blocks * 2, tile.rows, c.live_blocks * 2);
    };
    start_copy(0);
    u32 scaled = NO_TILE;  // the expert that the scalings are of
#pragma unroll 1
    for (u32 i = 0; i < count; i++) {
        c.tile = tiles[i];
        if (c.tile.expert == NO_TILE) return;
        wait_for_copies();
        // Everybody's copies of this patch are there, and nobody works on the one before any more.
        __syncthreads();
        if (i + 1 < count) start_copy(i + 1);
        if (c.tile.expert == groups.experts) {
            fill_with_zeros(c, rowwise.out, columnwise.out);
            continue;
        }
        if (c.tile.expert != scaled) {
            scaled = c.tile.expert;
            static_assert(THREADS == 256, "one half of the threads for each direction's scaling");
            const u32 entry = threadIdx.x % 128;
            if (ROWWISE && threadIdx.x < 128) row_scaling.fill(entry, rowwise.amax[scaled], false, ROW_STOCHASTIC);
            if (COLUMNWISE && threadIdx.x >= 128) col_scaling.fill(entry, columnwise.amax[scaled], RHT, COL_STOCHASTIC);
            __syncthreads();
        }
        const uint4* const patch = buffers + i % 2 * SHARED_CHUNKS;
        u32 rows_left = 0, columns_left = 0;
        if constexpr (ROWWISE) rows_left = quantize_rows(patch, c, rowwise, row_scaling);
        if constexpr (COLUMNWISE) columns_left = quantize_columns(patch, c, columnwise, col_scaling);
        if (ROWWISE && rows_left) quantize_rare_rows(rows_left, patch, c, rowwise, row_scaling);
        if (COLUMNWISE && columns_left) quantize_rare_columns(columns_left, patch, c, columnwise, col_scaling);
    }
}
