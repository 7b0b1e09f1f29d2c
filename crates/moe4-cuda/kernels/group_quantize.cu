// Quantization of [T, cols] BF16 with given amaxes, per expert: rowwise, columnwise, or both in one read.
//
//   rowwise      blocks of 16 columns         codes [T, cols/2]    scales [T, cols/16]
//   columnwise   blocks of 16 tokens, RHT     codes [cols, k/2]    scales [cols, k/16]     k: padded token positions
//
// A thread block takes a patch of 128 rows of one expert and 64 columns, copies it to shared memory without a detour
// through registers, and goes over it once for each direction: blocks of rows, then 16 tokens of two neighbouring
// columns at a time. Rowwise alone needs no shared memory: blocks of rows are read as they are used, a few at a time.
// What a block needs of the scales, the multiplier for each scale byte, is computed while the patch is on its way.
// Blocks that cannot take the short way are noted by their thread, which does them at the end.
//
// Compile-time choices: ROWWISE, COLUMNWISE; ROW_STOCHASTIC, COL_STOCHASTIC; RHT, SIGN_MASK or MASK_AT_LAUNCH;
// ROW_PACKED, COL_PACKED (codes and scales), ROW_SWIZZLED, COL_SWIZZLED (scales in the 128x4 layout); ROW_UNPACKED,
// COL_UNPACKED (code times block scale in BF16).
#include "encode.cuh"
#include "groups.cuh"
#include "output.cuh"
#include "shared_tile.cuh"

// Thread blocks of a multiprocessor. More than these take registers that the inner loops need.
constexpr u32 RESIDENT = 6;
constexpr int ROW_FORM = (ROW_PACKED ? PACKED : 0) | (ROW_UNPACKED ? VALUES : 0);
constexpr int COL_FORM = (COL_PACKED ? PACKED : 0) | (COL_UNPACKED ? VALUES : 0);
// Rowwise alone, 128 columns are shared out among the threads, since rows are then read and written in longer pieces.
constexpr u32 LINE_BLOCKS = COLUMNWISE ? COLUMN_BLOCKS : 8;
constexpr u32 ROW_STEP = THREADS / LINE_BLOCKS;                                // rows between two of a thread
constexpr u32 ROWS_AT_ONCE = (COLUMNWISE ? 2 : 4) / (ROW_STOCHASTIC ? 2 : 1);  // of a thread
constexpr u32 PAIR_STEP = THREADS / TOKEN_BLOCKS;  // pairs of columns between two of a thread

struct Copy {
    const float* amax;  // [E]
    Out out;
    RandomStream random;
};

// The order of a column's elements in registers: the one whose signs are gathered fastest, or that of values.
template <bool IN_ORDER>
struct Order {
    typedef Interleaved Eight;
};
template <>
struct Order<true> {
    typedef Neighbours Eight;
};
typedef Order<(COL_FORM & VALUES) != 0>::Eight ColumnEight;

// v[at..at+8], or a quarter of it, rounded to BF16.
template <bool QUARTER>
DEVICE ColumnEight rounded(const float (&v)[16], u32 at) {
    const auto value = [&](u32 i) { return QUARTER ? __fmul_rn(v[at + i], 0.25f) : v[at + i]; };
    const auto pair = [&](u32 a, u32 b) { return to_bf16x2(value(a), value(b)); };
    if constexpr (ColumnEight::IN_ORDER)
        return {{pair(0, 1), pair(2, 3), pair(4, 5), pair(6, 7)}};
    else
        return {{pair(0, 2), pair(4, 6), pair(1, 3), pair(5, 7)}};
}

// The lower or upper column of a pair, transformed.
template <bool QUARTER>
DEVICE Block<ColumnEight> transform(const ColumnPair& pair, u32 half, u32 mask) {
    float v[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i] = half ? upper(pair.tokens[i]) : lower(pair.tokens[i]);
    if constexpr (RHT) hadamard<SIGN_MASK>(v, mask);
    return Block<ColumnEight>(rounded<QUARTER>(v, 0), rounded<QUARTER>(v, 8));
}

// What the thread block works on.
struct Context {
    Tile tile;
    u32 first_block, live_blocks;  // its blocks of 16 columns
    u32 cols, blocks;              // of the tensor, and blocks of 16 in a row
    u64 token_blocks;              // blocks of 16 in a line of the columnwise operand
    u32 sign_mask;
};

typedef Cursor<ROW_SWIZZLED, ROW_FORM> RowCursor;
typedef Cursor<COL_SWIZZLED, COL_FORM> ColumnCursor;

// Zeros for the rows and token positions of nobody.
DEVICE void fill_with_zeros(const Context& c, const Out& rowwise, const Out& columnwise) {
    if constexpr (ROWWISE)
        for (u32 i = threadIdx.x; i < c.tile.rows * c.live_blocks; i += THREADS)
            RowCursor(rowwise, c.tile.row + i / c.live_blocks, c.first_block + i % c.live_blocks, c.blocks)
                .store_any({});
    if constexpr (COLUMNWISE) {
        const u32 positions = c.tile.positions / BLOCK;
        for (u32 i = threadIdx.x; i < positions * c.live_blocks * BLOCK; i += THREADS) {
            const u64 block = c.tile.position / BLOCK + i % positions;
            ColumnCursor(columnwise, c.first_block * BLOCK + i / positions, block, c.token_blocks).store_any({});
        }
    }
}

// Block `local` of a row, from shared memory or from the tensor.
struct Chunks {
    uint4 a, b;

    __device__ __forceinline__ Block<Neighbours> block() const {
        return Block<Neighbours>({{a.x, a.y, a.z, a.w}}, {{b.x, b.y, b.z, b.w}});
    }
};

DEVICE Chunks load_row(const uint4* shared, const uint4* x, const Context& c, u32 row, u32 local) {
    if constexpr (COLUMNWISE) {
        return {shared[chunk_index(row, 2 * local)], shared[chunk_index(row, 2 * local + 1)]};
    } else {
        const uint4* const from = x + ((c.tile.row + row) * c.blocks + c.first_block + local) * 2;
        return row < c.tile.rows ? Chunks{__ldcs(from), __ldcs(from + 1)} : Chunks{};
    }
}

// Returns which of the thread's blocks are left, one bit each.
DEVICE u32 quantize_rows(const uint4* shared, const uint4* x, const Context& c, const Copy& copy,
                         const Scaling& scaling) {
    const u32 local = threadIdx.x % LINE_BLOCKS, first_row = threadIdx.x / LINE_BLOCKS, block = c.first_block + local;
    if (local >= c.live_blocks) return 0;
    RowCursor cursor(copy.out, c.tile.row + first_row, block, c.blocks);
    u64 position = (c.tile.token + first_row) * c.blocks + block;
    u32 left = 0, bit = 1;
#pragma unroll 1
    for (u32 row = first_row; row < c.tile.rows; row += ROWS_AT_ONCE * ROW_STEP) {
        Chunks v[ROWS_AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < ROWS_AT_ONCE; i++) v[i] = load_row(shared, x, c, row + i * ROW_STEP, local);
#pragma unroll
        for (u32 i = 0; i < ROWS_AT_ONCE; i++, bit *= 2) {
            bool usual;
            const Quantized q =
                quantize_usual<ROW_STOCHASTIC, ROW_FORM>(v[i].block(), scaling, copy.random, position, usual);
            const bool live = row + i * ROW_STEP < c.tile.rows;
            if (usual && live) cursor.store(q);
            left |= !usual && live ? bit : 0;
            cursor.advance(ROW_STEP);
            position += ROW_STEP * c.blocks;
        }
    }
    return left;
}

DEVICE void quantize_rare_rows(u32 left, const uint4* shared, const uint4* x, const Context& c, const Copy& copy,
                               const Scaling& scaling) {
#pragma unroll 1
    for (u32 i = 0; left >> i != 0; i++) {
        if (!(left >> i & 1)) continue;
        const u32 row = threadIdx.x / LINE_BLOCKS + i * ROW_STEP, local = threadIdx.x % LINE_BLOCKS;
        const u64 position = (c.tile.token + row) * c.blocks + c.first_block + local;
        RowCursor(copy.out, c.tile.row + row, c.first_block + local, c.blocks)
            .store_any(quantize_any<ROW_STOCHASTIC>(load_row(shared, x, c, row, local).block(), scaling, 1.0f,
                                                    copy.random, position));
    }
}

// Returns which of the thread's blocks are left, one bit each.
DEVICE u32 quantize_columns(const uint4* shared, const Context& c, const Copy& copy, const Scaling& scaling) {
    const u32 token_block = threadIdx.x % TOKEN_BLOCKS, first_pair = threadIdx.x / TOKEN_BLOCKS;
    if (token_block * BLOCK >= c.tile.positions) return 0;
    const u32 first_column = c.first_block * BLOCK + 2 * first_pair;
    ColumnCursor cursor(copy.out, first_column, c.tile.position / BLOCK + token_block, c.token_blocks);
    u64 position = (c.tile.token / BLOCK + token_block) * c.cols + first_column;
    u32 left = 0;
#pragma unroll 1
    for (u32 pair = first_pair, bit = 1; pair < c.live_blocks * (BLOCK / 2); pair += PAIR_STEP, bit *= 4) {
        const ColumnPair loaded = load_columns(shared, token_block, pair);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            bool usual;
            const Block<ColumnEight> block = transform<false>(loaded, half, c.sign_mask);
            const Quantized q =
                quantize_usual<COL_STOCHASTIC, COL_FORM>(block, scaling, copy.random, position + half, usual);
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
        const ColumnPair loaded = load_columns(shared, token_block, pair);
        const Block<ColumnEight> v = transform<RHT>(loaded, i % 2, c.sign_mask);
        const u64 position = (c.tile.token / BLOCK + token_block) * c.cols + col;
        ColumnCursor(copy.out, col, c.tile.position / BLOCK + token_block, c.token_blocks)
            .store_any(quantize_any<COL_STOCHASTIC>(v, scaling, RHT ? 4.0f : 1.0f, copy.random, position));
    }
}

// blockIdx.x: which columns; the other dimensions: which tile.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    group_quantize(const uint4* __restrict__ x, u32 cols, u64 k, const Groups groups, u32 sign_mask,
                   const __grid_constant__ Copy rowwise, const __grid_constant__ Copy columnwise) {
    const u32 first_block = blockIdx.x * LINE_BLOCKS, blocks = cols / BLOCK;
    const Context c{load_tile(groups, block_in_grid()),
                    first_block,
                    min(blocks - first_block, LINE_BLOCKS),
                    cols,
                    blocks,
                    k / BLOCK,
                    sign_mask};
    if (c.tile.expert == NO_TILE) return;
    if (c.tile.expert == groups.experts) return fill_with_zeros(c, rowwise.out, columnwise.out);

    __shared__ uint4 patch[COLUMNWISE ? SHARED_CHUNKS : 1];
    __shared__ Scaling row_scaling, col_scaling;
    if constexpr (COLUMNWISE)
        copy_patch(patch, x + (c.tile.row * blocks + first_block) * 2, (u64)blocks * 2, c.tile.rows, c.live_blocks * 2);
    static_assert(THREADS == 128, "a thread for each entry of a scaling");
    if (ROWWISE) row_scaling.fill(threadIdx.x, rowwise.amax[c.tile.expert], false, ROW_STOCHASTIC);
    if (COLUMNWISE) col_scaling.fill(threadIdx.x, columnwise.amax[c.tile.expert], RHT, COL_STOCHASTIC);
    if (ROW_STOCHASTIC && threadIdx.x == 0) row_scaling.stream = rowwise.random.shifted();
    if (COL_STOCHASTIC && threadIdx.x == 0) col_scaling.stream = columnwise.random.shifted();
    if constexpr (COLUMNWISE) wait_for_copies();
    __syncthreads();

    u32 rows_left = 0, columns_left = 0;
    if constexpr (ROWWISE) rows_left = quantize_rows(patch, x, c, rowwise, row_scaling);
    if constexpr (COLUMNWISE) columns_left = quantize_columns(patch, c, columnwise, col_scaling);
    if (ROWWISE && rows_left) quantize_rare_rows(rows_left, patch, x, c, rowwise, row_scaling);
    if (COLUMNWISE && columns_left) quantize_rare_columns(columns_left, patch, c, columnwise, col_scaling);
}
