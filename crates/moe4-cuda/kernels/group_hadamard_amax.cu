// Per-expert amax of [T, cols] BF16 before and after the RHT along tokens, in one read.
//
// A thread takes 16 tokens of VECTOR neighbouring columns. Rounding to BF16 keeps the order, so only the largest
// transformed magnitude is divided by four and rounded. Sixteen tokens with an infinity or a NaN among them, or with
// sums that overflow, are looked at again, one by one. The host clears both results before.
//
// Compile-time choices: SIGN_MASK, or MASK_AT_LAUNCH; VECTOR, 4 or 1 columns.
#include "groups.cuh"
#include "reduce.cuh"

constexpr u32 THREADS = 256;
constexpr u32 UNITS = 2;  // column vectors of a thread
constexpr u32 WORDS = (VECTOR + 1) / 2;

struct Amaxes {
    u32 before;   // packed pairs
    float after;  // not yet divided by four
};

// Sixteen tokens of VECTOR columns; zeros past `rows`.
DEVICE void load(const u16* x, u64 cols, u32 rows, u32 (&w)[16][WORDS]) {
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        const u16* const from = x + i * cols;
        if constexpr (VECTOR == 4) {
            const uint2 v = i < rows ? __ldcs(reinterpret_cast<const uint2*>(from)) : make_uint2(0, 0);
            w[i][0] = v.x, w[i][WORDS - 1] = v.y;
        } else {
            w[i][0] = i < rows ? *from : 0;
        }
    }
}

template <bool FINITE_ONLY>
DEVICE Amaxes amaxes(const u32 (&w)[16][WORDS], u32 mask) {
    Amaxes out{0, 0.0f};
#pragma unroll
    for (u32 j = 0; j < WORDS; j++) {
#pragma unroll
        for (u32 i = 0; i < 16; i++)
            out.before = FINITE_ONLY ? max_finite(out.before, w[i][j]) : max_magnitude(out.before, w[i][j]);
#pragma unroll
        for (u32 half = 0; half < min(VECTOR, 2); half++) {
            float v[16];
#pragma unroll
            for (u32 i = 0; i < 16; i++) v[i] = half ? upper(w[i][j]) : lower(w[i][j]);
            hadamard<SIGN_MASK>(v, mask);
#pragma unroll
            for (u32 i = 0; i < 16; i++) {
                const float a = fabsf(v[i]);
                if (!FINITE_ONLY || a < __uint_as_float(0x7F800000u)) out.after = fmaxf(out.after, a);
            }
        }
    }
    return out;
}

static __device__ __noinline__ Amaxes finite_amaxes(const u16* x, u64 cols, u32 rows, u32 mask) {
    u32 w[16][WORDS];
    load(x, cols, rows, w);
    return amaxes<true>(w, mask);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    group_hadamard_amax(const u16* __restrict__ x, u64 cols, const Groups groups, u32 sign_mask, u32* amax,
                        u32* amax_rht) {
    const Tile tile = load_tile(groups, block_in_grid());
    if (tile.expert >= groups.experts) return;
    const u32 vectors = (u32)(cols / VECTOR);
    const u32 token_blocks = (tile.rows + BLOCK - 1) / BLOCK;
    Amaxes all{0, 0.0f};
#pragma unroll 1
    for (u32 i = 0; i < UNITS; i++) {
        // Neighbouring threads take neighbouring columns.
        const u64 unit = ((u64)blockIdx.x * UNITS + i) * THREADS + threadIdx.x;
        const u32 token_block = (u32)(unit / vectors), vector = (u32)(unit % vectors);
        if (token_block >= token_blocks) break;
        const u16* const from = x + (tile.row + token_block * BLOCK) * cols + vector * VECTOR;
        const u32 rows = tile.rows - token_block * BLOCK;
        u32 w[16][WORDS];
        load(from, cols, rows, w);
        Amaxes here = amaxes<false>(w, sign_mask);
        if (has_infinity(here.before) || !(here.after < __uint_as_float(0x7F800000u)))
            here = finite_amaxes(from, cols, rows, sign_mask);
        all.before = max_magnitude(all.before, here.before);
        all.after = fmaxf(all.after, here.after);
    }
    const u32 after = to_bf16x2(0.0f, __fmul_rn(all.after, 0.25f)) & 0xFFFF0000u;
    reduce_max(larger_half(all.before), amax + tile.expert);
    __syncthreads();
    reduce_max(after, amax_rht + tile.expert);
}
