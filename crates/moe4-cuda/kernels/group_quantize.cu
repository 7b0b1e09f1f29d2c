// Quantization of [T, cols] BF16 with given amaxes, per expert: rowwise, columnwise, or both in one read.
//
//   rowwise      blocks of 16 columns         codes [T, cols/2]    scales [T, cols/16]
//   columnwise   blocks of 16 tokens, RHT     codes [cols, k/2]    scales [cols, k/16]     k: padded token positions
//
// A thread block takes a tile of 128 rows of one expert and 128 columns, copies it to shared memory without a detour
// through registers, and goes over it once for each direction: blocks of rows, then 16 tokens of two neighbouring columns
// at a time. What a block needs of the scales, the multiplier for each of the 127 scale bytes, is computed once a tile.
//
// Compile-time choices: ROWWISE, COLUMNWISE; ROW_STOCHASTIC, COL_STOCHASTIC; RHT, SIGN_MASK or MASK_AT_LAUNCH; ROW_SWIZZLED, COL_SWIZZLED
// (scales in the 128x4 layout); ROW_UNPACKED, COL_UNPACKED (also code times block scale in BF16).
#include "encode.cuh"
#include "groups.cuh"
#include "output.cuh"
#include "shared_tile.cuh"

// Registers: random numbers need more of them than a fourth resident thread block leaves.
constexpr bool RANDOM = ROW_STOCHASTIC || COL_STOCHASTIC;
constexpr u32 RESIDENT = !RANDOM ? 4 : ROW_UNPACKED || COL_UNPACKED ? 2 : 3;

struct Copy {
    const float* amax;  // [E]
    Out out;
    RandomStream random;
};

static __device__ __noinline__ Quantized quantize_rare_row(Neighbours low, Neighbours high, Scaling scaling) {
    return quantize_any<false>(low, high, scaling, 1.0f, RandomStream{}, 0);
}

// v[at..at+8] times `factor`, rounded to BF16.
DEVICE Interleaved rounded(const float (&v)[16], u32 at, float factor) {
    const auto pair = [&](u32 a, u32 b) { return to_bf16x2(__fmul_rn(v[at + a], factor), __fmul_rn(v[at + b], factor)); };
    return {{pair(0, 2), pair(4, 6), pair(1, 3), pair(5, 7)}};
}

// The lower or upper column of a pair, transformed and times `factor`.
DEVICE void transform(const ColumnPair& pair, u32 half, u32 mask, float factor, Interleaved& low, Interleaved& high) {
    float v[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i] = half ? upper(pair.tokens[i]) : lower(pair.tokens[i]);
    if constexpr (RHT) hadamard<SIGN_MASK>(v, mask);
    low = rounded(v, 0, factor), high = rounded(v, 8, factor);
}

static __device__ __noinline__ Quantized quantize_rare_column(const u32* columns, u32 half, u32 mask, Scaling scaling,
                                                              const RandomStream& random, u64 position) {
    Interleaved low, high;
    transform(load_columns(columns), half, mask, RHT ? 0.25f : 1.0f, low, high);
    return quantize_any<COL_STOCHASTIC>(low, high, scaling, RHT ? 4.0f : 1.0f, random, position);
}

// A row of tiles: what its thread block knows of it.
struct Context {
    Tile tile;
    u32 cols, blocks;  // of the tensor, and blocks of 16 in a row
    u64 token_blocks;  // blocks of 16 in a line of the columnwise operand
    u32 sign_mask;
};

// Zeros for the rows and token positions of nobody.
DEVICE void fill_with_zeros(const Context& c, u32 first_block, u32 live_blocks, const Out& rowwise, const Out& columnwise) {
    if constexpr (ROWWISE)
        for (u32 i = threadIdx.x; i < c.tile.rows * live_blocks; i += THREADS)
            store<ROW_SWIZZLED, ROW_UNPACKED>(rowwise, c.tile.row + i / live_blocks, first_block + i % live_blocks, c.blocks, {});
    if constexpr (COLUMNWISE) {
        const u32 positions = c.tile.positions / BLOCK;
        for (u32 i = threadIdx.x; i < positions * live_blocks * BLOCK; i += THREADS)
            store<COL_SWIZZLED, COL_UNPACKED>(columnwise, first_block * BLOCK + i / positions,
                                              c.tile.position / BLOCK + i % positions, c.token_blocks, {});
    }
}

DEVICE void quantize_rows(const uint4* shared, const Context& c, u32 first_block, u32 live_blocks, const Copy& copy,
                          const Scaling& scaling) {
    const u32 local = threadIdx.x % COLUMN_BLOCKS, block = first_block + local;
    if (local >= live_blocks) return;
#pragma unroll 1
    for (u32 row = threadIdx.x / COLUMN_BLOCKS; row < c.tile.rows; row += THREADS / COLUMN_BLOCKS) {
        const uint4 v = shared[chunk_index(row, 2 * local)], w = shared[chunk_index(row, 2 * local + 1)];
        const Neighbours low{{v.x, v.y, v.z, v.w}}, high{{w.x, w.y, w.z, w.w}};
        const u64 position = (c.tile.token + row) * c.blocks + block;
        const Quantized q = quantize<ROW_STOCHASTIC, false>(low, high, scaling, copy.random, position,
                                                            [&] { return quantize_rare_row(low, high, scaling); });
        store<ROW_SWIZZLED, ROW_UNPACKED>(copy.out, c.tile.row + row, block, c.blocks, q);
    }
}

DEVICE void quantize_columns(const uint4* shared, const Context& c, u32 first_block, u32 live_blocks, const Copy& copy,
                             const Scaling& scaling) {
    const u32 token_block = threadIdx.x % TOKEN_BLOCKS;
    if (token_block * BLOCK >= c.tile.positions) return;
#pragma unroll 1
    for (u32 pair = threadIdx.x / TOKEN_BLOCKS; pair < live_blocks * (BLOCK / 2); pair += THREADS / TOKEN_BLOCKS) {
        const u32* const columns = reinterpret_cast<const u32*>(shared) + column_index(token_block, pair);
        const ColumnPair loaded = load_columns(columns);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 col = first_block * BLOCK + 2 * pair + half;
            const u64 position = (c.tile.token / BLOCK + token_block) * c.cols + col;
            Interleaved low, high;
            transform(loaded, half, c.sign_mask, 1.0f, low, high);
            const Quantized q = quantize<COL_STOCHASTIC, RHT>(low, high, scaling, copy.random, position, [&] {
                return quantize_rare_column(columns, half, c.sign_mask, scaling, copy.random, position);
            });
            store<COL_SWIZZLED, COL_UNPACKED>(copy.out, col, c.tile.position / BLOCK + token_block, c.token_blocks, q);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
group_quantize(const uint4* __restrict__ x, u32 cols, u64 k, const Groups groups, u32 sign_mask,
               const __grid_constant__ Copy rowwise, const __grid_constant__ Copy columnwise) {
    Context c{{}, cols, cols / BLOCK, k / BLOCK, sign_mask};
    if (!find_tile(groups, blockIdx.x, c.tile)) return;
    const bool live = c.tile.expert < groups.experts;

    __shared__ uint4 shared[SHARED_WORDS / 4];
    __shared__ Multipliers row_multipliers, col_multipliers;
    const u32 expert = live ? c.tile.expert : 0;
    const Scaling row_scaling = ROWWISE ? row_multipliers.fill(rowwise.amax[expert], false) : Scaling{};
    const Scaling col_scaling = COLUMNWISE ? col_multipliers.fill(columnwise.amax[expert], RHT) : Scaling{};

    // All tiles of this thread block lie in the same rows.
    for (u32 first = blockIdx.y * COLUMN_BLOCKS; first < c.blocks; first += gridDim.y * COLUMN_BLOCKS) {
        const u32 live_blocks = min(c.blocks - first, COLUMN_BLOCKS);
        if (!live) {
            fill_with_zeros(c, first, live_blocks, rowwise.out, columnwise.out);
            continue;
        }
        __syncthreads();
        copy_tile(shared, x + (c.tile.row * c.blocks + first) * 2, (u64)c.blocks * 2, c.tile.rows, live_blocks * 2);
        wait_for_tile();
        if constexpr (ROWWISE) quantize_rows(shared, c, first, live_blocks, rowwise, row_scaling);
        if constexpr (COLUMNWISE) quantize_columns(shared, c, first, live_blocks, columnwise, col_scaling);
    }
}
