// Quantization of [T, cols] BF16 with given amaxes, per expert: rowwise, columnwise, or both in one read.
//
//   rowwise      blocks of 16 columns         codes [T, cols/2]    scales [T, cols/16]
//   columnwise   blocks of 16 tokens, RHT     codes [cols, k/2]    scales [cols, k/16]     k: padded token positions
//
// A thread block takes tiles of 128 rows of one expert and 128 columns, one after the other. The next one is copied to
// shared memory while this one is worked on, once for each direction: blocks of rows, then 16 tokens of two neighbouring
// columns at a time. What a block needs of the scales, the multiplier for each scale byte, is computed beforehand. Blocks
// that cannot take the short way are noted by their thread, which does them at the end of the tile.
//
// Compile-time choices: ROWWISE, COLUMNWISE; ROW_STOCHASTIC, COL_STOCHASTIC; RHT, SIGN_MASK or MASK_AT_LAUNCH; ROW_SWIZZLED, COL_SWIZZLED
// (scales in the 128x4 layout); ROW_UNPACKED, COL_UNPACKED (also code times block scale in BF16).
#include "encode.cuh"
#include "groups.cuh"
#include "output.cuh"
#include "shared_tile.cuh"

constexpr u32 RESIDENT = 3;  // thread blocks of a multiprocessor, by shared memory

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

// What the thread block knows of its rows.
struct Context {
    Tile tile;
    u32 cols, blocks;  // of the tensor, and blocks of 16 in a row
    u64 token_blocks;  // blocks of 16 in a line of the columnwise operand
    u32 sign_mask;
};

typedef Cursor<ROW_SWIZZLED, ROW_UNPACKED> RowCursor;
typedef Cursor<COL_SWIZZLED, COL_UNPACKED> ColumnCursor;

// Zeros for the rows and token positions of nobody.
DEVICE void fill_with_zeros(const Context& c, u32 first_block, u32 live_blocks, const Out& rowwise, const Out& columnwise) {
    if constexpr (ROWWISE)
        for (u32 i = threadIdx.x; i < c.tile.rows * live_blocks; i += THREADS)
            RowCursor(rowwise, c.tile.row + i / live_blocks, first_block + i % live_blocks, c.blocks).store({});
    if constexpr (COLUMNWISE) {
        const u32 positions = c.tile.positions / BLOCK;
        for (u32 i = threadIdx.x; i < positions * live_blocks * BLOCK; i += THREADS) {
            const u64 block = c.tile.position / BLOCK + i % positions;
            ColumnCursor(columnwise, first_block * BLOCK + i / positions, block, c.token_blocks).store({});
        }
    }
}

constexpr u32 ROW_STEP = THREADS / COLUMN_BLOCKS;  // rows between two of a thread
constexpr u32 PAIR_STEP = THREADS / TOKEN_BLOCKS;  // pairs of columns between two of a thread

// Returns which of the thread's blocks are left, one bit each.
DEVICE u32 quantize_rows(const uint4* shared, const Context& c, u32 first_block, u32 live_blocks, const Copy& copy,
                         const Scaling& scaling) {
    const u32 local = threadIdx.x % COLUMN_BLOCKS, first_row = threadIdx.x / COLUMN_BLOCKS, block = first_block + local;
    if (local >= live_blocks) return 0;
    const uint4 *first = shared + chunk_index(first_row, 2 * local), *second = shared + chunk_index(first_row, 2 * local + 1);
    RowCursor cursor(copy.out, c.tile.row + first_row, block, c.blocks);
    u64 position = (c.tile.token + first_row) * c.blocks + block;
    u32 left = 0;
#pragma unroll 1
    for (u32 row = first_row, bit = 1; row < c.tile.rows; row += ROW_STEP, bit *= 2) {
        Quantized q;
        if (quantize_usual<ROW_STOCHASTIC>(load_row_block(first, second), scaling, copy.random, position, q))
            cursor.store(q);
        else
            left |= bit;
        cursor.advance(ROW_STEP);
        position += ROW_STEP * c.blocks;
        first += ROW_STEP * ROW_CHUNKS + ROW_STEP / BLOCK, second += ROW_STEP * ROW_CHUNKS + ROW_STEP / BLOCK;
    }
    return left;
}

DEVICE void quantize_rare_rows(u32 left, const uint4* shared, const Context& c, u32 first_block, const Copy& copy,
                               const Scaling& scaling) {
#pragma unroll 1
    for (u32 i = 0; left >> i != 0; i++) {
        if (!(left >> i & 1)) continue;
        const u32 row = threadIdx.x / COLUMN_BLOCKS + i * ROW_STEP, local = threadIdx.x % COLUMN_BLOCKS;
        const Block<Neighbours> v =
            load_row_block(shared + chunk_index(row, 2 * local), shared + chunk_index(row, 2 * local + 1));
        const u64 position = (c.tile.token + row) * c.blocks + first_block + local;
        RowCursor(copy.out, c.tile.row + row, first_block + local, c.blocks)
            .store(quantize_any<ROW_STOCHASTIC>(v, scaling, 1.0f, copy.random, position));
    }
}

// Returns which of the thread's blocks are left, one bit each.
DEVICE u32 quantize_columns(const uint4* shared, const Context& c, u32 first_block, u32 live_blocks, const Copy& copy,
                            const Scaling& scaling) {
    const u32 token_block = threadIdx.x % TOKEN_BLOCKS, first_pair = threadIdx.x / TOKEN_BLOCKS;
    if (token_block * BLOCK >= c.tile.positions) return 0;
    const u32 first_column = first_block * BLOCK + 2 * first_pair;
    ColumnCursor cursor(copy.out, first_column, c.tile.position / BLOCK + token_block, c.token_blocks);
    u64 position = (c.tile.token / BLOCK + token_block) * c.cols + first_column;
    u32 left = 0;
#pragma unroll 1
    for (u32 pair = first_pair, bit = 1; pair < live_blocks * (BLOCK / 2); pair += PAIR_STEP, bit *= 4) {
        const ColumnPair loaded = load_columns(reinterpret_cast<const u32*>(shared) + column_index(token_block, pair));
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            Quantized q;
            const Block<Interleaved> block = transform<false>(loaded, half, c.sign_mask);
            if (quantize_usual<COL_STOCHASTIC>(block, scaling, copy.random, position + half, q))
                cursor.store(q);
            else
                left |= bit << half;
            cursor.advance(half ? 2 * PAIR_STEP - 1 : 1);
        }
        position += 2 * PAIR_STEP;
    }
    return left;
}

DEVICE void quantize_rare_columns(u32 left, const uint4* shared, const Context& c, u32 first_block, const Copy& copy,
                                  const Scaling& scaling) {
    const u32 token_block = threadIdx.x % TOKEN_BLOCKS;
#pragma unroll 1
    for (u32 i = 0; left >> i != 0; i++) {
        if (!(left >> i & 1)) continue;
        const u32 pair = threadIdx.x / TOKEN_BLOCKS + i / 2 * PAIR_STEP, col = first_block * BLOCK + 2 * pair + i % 2;
        const ColumnPair loaded = load_columns(reinterpret_cast<const u32*>(shared) + column_index(token_block, pair));
        const Block<Interleaved> v = transform<RHT>(loaded, i % 2, c.sign_mask);
        const u64 position = (c.tile.token / BLOCK + token_block) * c.cols + col;
        ColumnCursor(copy.out, col, c.tile.position / BLOCK + token_block, c.token_blocks)
            .store(quantize_any<COL_STOCHASTIC>(v, scaling, RHT ? 4.0f : 1.0f, copy.random, position));
    }
}

// blockIdx.x: which of `gridDim.x` shares of the columns.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
group_quantize(const uint4* __restrict__ x, u32 cols, u64 k, const Groups groups, u32 sign_mask,
               const __grid_constant__ Copy rowwise, const __grid_constant__ Copy columnwise) {
    const Context c{load_tile(groups), cols, cols / BLOCK, k / BLOCK, sign_mask};
    if (c.tile.expert == NO_TILE) return;
    const u32 stride = gridDim.x * COLUMN_BLOCKS;
    u32 first = blockIdx.x * COLUMN_BLOCKS;
    const auto live_blocks = [&](u32 first) { return min(c.blocks - first, COLUMN_BLOCKS); };
    if (c.tile.expert == groups.experts) {
        for (; first < c.blocks; first += stride) fill_with_zeros(c, first, live_blocks(first), rowwise.out, columnwise.out);
        return;
    }

    extern __shared__ uint4 buffers[];  // two tiles
    __shared__ Scaling row_scaling, col_scaling;
    const auto start_copy = [&](uint4* shared, u32 first) {
        const uint4* const from = x + (c.tile.row * c.blocks + first) * 2;
        copy_tile(shared, from, (u64)c.blocks * 2, c.tile.rows, live_blocks(first) * 2);
    };
    if (first < c.blocks) start_copy(buffers, first);
    static_assert(THREADS == 256, "one half of the threads for each direction's scaling");
    if (ROWWISE && threadIdx.x < 128) row_scaling.fill(threadIdx.x, rowwise.amax[c.tile.expert], false);
    if (COLUMNWISE && threadIdx.x >= 128) col_scaling.fill(threadIdx.x - 128, columnwise.amax[c.tile.expert], RHT);

    uint4 *here = buffers, *next = buffers + SHARED_CHUNKS;
    for (; first < c.blocks; first += stride) {
        wait_for_copies();
        // Everybody's copies of this tile are there, and nobody reads the one before any more.
        __syncthreads();
        if (first + stride < c.blocks) start_copy(next, first + stride);
        u32 rows_left = 0, columns_left = 0;
        if constexpr (ROWWISE) rows_left = quantize_rows(here, c, first, live_blocks(first), rowwise, row_scaling);
        if constexpr (COLUMNWISE) columns_left = quantize_columns(here, c, first, live_blocks(first), columnwise, col_scaling);
        if (ROWWISE && rows_left) quantize_rare_rows(rows_left, here, c, first, rowwise, row_scaling);
        if (COLUMNWISE && columns_left) quantize_rare_columns(columns_left, here, c, first, columnwise, col_scaling);
        uint4* const done = here;
        here = next, next = done;
    }
}
