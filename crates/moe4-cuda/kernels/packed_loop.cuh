// The main loop of the products that read weights as packed codes, for experts of few rows: their time is the bytes of
// the weights, of which codes have a quarter of what BF16 values have. Any GPU from compute capability 8.0 on.
//
//   a block    ROWS rows of an expert x 256 columns of its weight; a tile of more rows takes the block several passes
//   a warp     all of the rows x 64 columns, so that a code is decoded once, for all rows
//   a stage    128 steps of k in shared memory, rows in BF16, weights as codes, read 64 bytes of a row at a time; while
//              one is multiplied, the next two are on their way
//
// Codes become operands in registers (packed_decode.cuh). Each product of 16 steps has the operands that it has in
// mma_loop.cuh, so that sums have the same bits as from BF16 weights.
//
//   fprop   w[e] is [cols, k]. Of 16 codes in a row, lane t of a quad takes bytes t and 4 + t.
//   dgrad   w[e] is [k, cols]. A lane's word of a row is eight columns, and operand j of eight takes column j of each
//           lane's: which of the warp's columns share an operand does not matter, if sums are sorted at the end.
//
// A block scale belongs to 16 x 16 elements. It is stored for each of their rows, and read of the first.
//
// Compile-time choice: ROWS, 16, 32 or 64.
#pragma once
#include "packed_decode.cuh"
#include "packed_stage.cuh"

typedef float Accumulators[FRAGMENTS * N8][4];
typedef u32 Operands[N8][2];  // of 16 steps of k, for 64 columns

DEVICE u8* shared_stages() {
    extern __shared__ __align__(256) u8 stages[];
    static_assert(STAGE_ALIGNMENT <= 256 && STAGE_BYTES % STAGE_ALIGNMENT == 0, "places are found by XOR");
    static_assert(SLABS_BYTES * WARPS <= STAGE_BYTES * STAGES, "a warp's slabs");
    return stages;
}

// Where a lane reads within a stage, in bytes. Steps are found by XOR, since rows of chunks lie at multiples of their
// length.
template <bool ACROSS>
struct Reader {
    u32 a, codes, scale;

    __device__ __forceinline__ Reader() {
        const u32 row = lane() % 16, chunk = lane() / 16;
        a = (row * ROW_CHUNKS + (chunk ^ row % 8)) * 16;
        codes = CODES_AT, scale = SCALES_AT;
        // The lane decodes the scale of tile l % 4 of the warp's columns, tile l / 4 of the steps.
        const u32 tile = warp() * 4 + lane() % 4, step = lane() / 4;
        if constexpr (ACROSS) {
            scale += step * TILE_COLS / BLOCK + tile;
            const u32 row = 2 * lane_of_quad(), word = warp() * 8 + lane_row();
            codes += (row * 8 + (word / 4 ^ row)) * 16 + word % 4 * 4;
        } else {
            scale += tile * STEPS / BLOCK + step;
            const u32 column = warp() * WARP_COLS + lane_row();
            codes += (column * 4 + column / 2 % 4) * 16 + lane_of_quad();
        }
    }
};

// Columns 8j .. 8j + 7 of the warp are operand j.
DEVICE void decode_fprop(Operands& right, const u8* bytes, const u32* scales) {
    const uint4 tiles = *reinterpret_cast<const uint4*>(scales);
    const u32 of_tile[4] = {tiles.x, tiles.y, tiles.z, tiles.w};
#pragma unroll
    for (u32 j = 0; j < N8; j++)
#pragma unroll
        for (u32 i = 0; i < 2; i++) right[j][i] = decode_byte(bytes[j * 8 * STEPS / 2 + 4 * i], of_tile[j / 2]);
}

// Columns j, 8 + j, .. 56 + j are operand j.
template <u32 J = 0>
DEVICE void decode_dgrad(Operands& right, const u32 (&rows)[4], u32 scale) {
    right[J][0] = decode_codes<J>(rows[0], rows[1], scale);
    right[J][1] = decode_codes<J>(rows[2], rows[3], scale);
    if constexpr (J + 1 < N8) decode_dgrad<J + 1>(right, rows, scale);
}

// All steps of the stage that lies `at` bytes behind the first. `scales` is the warp's alone.
template <bool ACROSS>
DEVICE void multiply_stage(Accumulators& acc, const Reader<ACROSS>& reader, u32 at, u32* scales, u32 fragments) {
    const u8* const stages = shared_stages();
    const u32 a = (u32)__cvta_generic_to_shared(stages) + at + reader.a;
    scales[lane()] = decode_scale(stages[at + reader.scale]);
    __syncwarp();
#pragma unroll
    for (u32 step = 0; step < STEPS / BLOCK; step++) {
        Operands right;
        if constexpr (ACROSS) {
            constexpr u32 PITCH = TILE_COLS / 8;
            const u32* const words = reinterpret_cast<const u32*>(stages + at + reader.codes) + step * BLOCK * PITCH;
            decode_dgrad(right, {words[0], words[PITCH], words[8 * PITCH], words[9 * PITCH]},
                         scales[4 * step + lane_row() / 2]);
        } else {
            decode_fprop(right, stages + ((at + reader.codes) ^ step / 2 * 16) + step % 2 * 8, scales + 4 * step);
        }
#pragma unroll
        for (u32 m = 0; m < FRAGMENTS; m++) {
            if (m > 0 && m >= fragments) break;
            u32 left[4];
            load_matrices<false>(left, (a ^ step * 32) + m * FRAGMENT_ROWS * ROW_CHUNKS * 16);
#pragma unroll
            for (u32 j = 0; j < N8; j++) multiply_accumulate(acc[m * N8 + j], left, right[j][0], right[j][1]);
        }
    }
}

// Adds up all steps of k. All threads of the block take part, and meet again at the end; those of a warp without
// columns only copy.
template <bool ACROSS>
DEVICE void multiply(Accumulators& acc, Rows a, Codes<ACROSS> b, u32 contraction, u32 fragments, bool has_columns) {
    __shared__ uint4 scales[WARPS][32 / 4];
    const Reader<ACROSS> reader;
    const u32 first = (u32)__cvta_generic_to_shared(shared_stages()), count = (contraction + STEPS - 1) / STEPS;
    const auto copy = [&](u32 stage, u32 i) {
        a.copy(first + stage * STAGE_BYTES, i * STEPS);
        b.copy(first + stage * STAGE_BYTES, i * STEPS);
    };
#pragma unroll
    for (u32 i = 0; i < STAGES - 1; i++) {
        if (i < count) copy(i, i);
        commit_copies();
    }
    u32 stage = 0;
#pragma unroll 1
    for (u32 i = 0; i < count; i++) {
        wait_for_groups<STAGES - 2>();
        // All threads' copies are there, and none reads the stage before any more: it is filled again.
        __syncthreads();
        if (i + STAGES - 1 < count) copy(stage == 0 ? STAGES - 1 : stage - 1, i + STAGES - 1);
        commit_copies();
        if (has_columns)
            multiply_stage(acc, reader, stage * STAGE_BYTES, reinterpret_cast<u32*>(scales[warp()]), fragments);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wait_for_groups<0>();
    __syncthreads();
}

// The lanes of a quad exchange sums: blocks of two operands change places with lanes, in bit STRIDE of both numbers.
template <u32 STRIDE>
DEVICE void exchange(Accumulators& acc) {
    const bool upper = lane_of_quad() & STRIDE;
#pragma unroll
    for (u32 block = 0; block < FRAGMENTS * N8 / 2; block++) {
        if (block & STRIDE) continue;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            float &low = acc[2 * block + i / 4][i % 4], &high = acc[2 * (block | STRIDE) + i / 4][i % 4];
            const float got = __shfl_xor_sync(~0u, upper ? low : high, STRIDE);
            low = upper ? got : low, high = upper ? high : got;
        }
    }
}

// From the order of columns that dgrad's operands have to that of fragment.cuh: column 16t + 8s + j of the warp is sum
// s of operand j in lane t, and is to be sum j % 2 of operand 2t + s in lane j / 2.
DEVICE void sort_columns(Accumulators& acc) {
    exchange<1>(acc);
    exchange<2>(acc);
#pragma unroll
    for (u32 j = 0; j < FRAGMENTS * N8; j += 2)
#pragma unroll
        for (u32 half = 0; half < 4; half += 2) {
            const float first = acc[j][half + 1];
            acc[j][half + 1] = acc[j + 1][half], acc[j + 1][half] = first;
        }
}

// The sums of fragment `m`. Registers have no index, hence the steps.
template <u32 HERE = 0>
DEVICE void take_fragment(float (&v)[N8][4], const Accumulators& acc, u32 m) {
    if (HERE + 1 == FRAGMENTS || m == HERE) {
#pragma unroll
        for (u32 j = 0; j < N8; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) v[j][i] = __fmul_rn(acc[HERE * N8 + j][i], PRODUCT_FACTOR);
    } else if constexpr (HERE + 1 < FRAGMENTS) {
        take_fragment<HERE + 1>(v, acc, m);
    }
}

// The rows of a tile by its expert's weight: `epilogue(sums, rows)` for each fragment of 16 rows. `index` as for
// `Codes`.
template <bool ACROSS, class Index, class Epilogue>
DEVICE void multiply_tile(const u16* a, const PackedWeights& w, const Tile& tile, Index index, Epilogue epilogue) {
    const u32 contraction = ACROSS ? w.n : w.k;
#pragma unroll 1
    for (u32 first = 0; first < tile.rows; first += ROWS) {
        const u32 rows = min(tile.rows - first, (u32)ROWS), fragments = (rows + FRAGMENT_ROWS - 1) / FRAGMENT_ROWS;
        const bool has_columns = index(warp() * WARP_COLS) != OUTSIDE;
        Accumulators acc = {};
        multiply(acc, Rows(a, contraction, tile.row + first, rows), Codes<ACROSS>(w, tile.expert, index), contraction,
                 fragments, has_columns);
        if (has_columns) {
            if constexpr (ACROSS) sort_columns(acc);
#pragma unroll 1
            for (u32 m = 0; m < fragments; m++) {
                float sums[N8][4];
                take_fragment(sums, acc, m);
                epilogue(sums, fragment_rows(tile.row, tile.rows, first + m * FRAGMENT_ROWS));
            }
        }
        // What the epilogue had in shared memory gives way to the next stages.
        __syncthreads();
    }
}
