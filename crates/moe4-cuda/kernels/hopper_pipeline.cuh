// The main loop of the products on Hopper: one thread has tiles copied to shared memory, two warp groups multiply them by
// turns.
//
//   stages in a ring:  a [128 x 64]   b [192 x 64]   BF16
//   copying thread     for each tile, for each stage: wait until it is empty, start the copies, which fill it
//   a warp group       takes every other tile: wait for the turn; for each stage: wait until it is full, acc [128 x 192] +=
//                      a * b, release the one before; pass the turn on; epilogue, while the other one multiplies
//
// The thread blocks stay on their multiprocessors and take tiles in turn. A tile of 128 x 192 is what the registers of a warp
// group hold beside its epilogue. With larger ones that two warp groups share (128 x 256), shared memory and the L2 cache are read
// less often for the same work, but both end at the same time and the matrix unit waits for their epilogues; clusters of
// two that share copies were no faster (docs/attempts.md).
#pragma once
#include "wgmma.cuh"

// An epilogue that needs many registers chooses a narrower tile.
#ifndef TILE_COLUMNS
#define TILE_COLUMNS 192
#endif
constexpr u32 TILE_M = 128, TILE_N = TILE_COLUMNS, TILE_K = 64;
constexpr u32 N8 = TILE_N / 8, FRAGMENTS = 2;  // of a warp: rows 16w.. and 64 + 16w.. of the tile
constexpr u32 STAGES = TILE_N == 192 ? 4 : 5;
constexpr u32 STAGE_BLOCKS = TILE_K / BLOCK;
constexpr u32 LINE = 128;        // bytes of a line of a tile in shared memory
constexpr u32 LINE_VALUES = 64;  // BF16 values
constexpr u32 A_BYTES = TILE_M * LINE, B_BYTES = TILE_N * LINE, STAGE_BYTES = A_BYTES + B_BYTES;

constexpr u32 WARP_GROUP = 128, MULTIPLIERS = 2;
constexpr u32 THREADS = WARP_GROUP * (MULTIPLIERS + 1);
// Of 65536 registers, in steps of 8.
constexpr u32 COPY_REGISTERS = 24, MULTIPLY_REGISTERS = 240;

struct alignas(1024) RingState {
    u32 zeros[LINE * 8 / 4];  // one pattern
    u64 full[STAGES], empty[STAGES];
};

struct Ring {
    u32 tiles, full, empty;  // addresses: stages, and a barrier for each
    u64 nothing;             // a matrix of zeros
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ Ring(const void* tiles, const RingState& state)
        : tiles(shared_address(tiles)),
          full(shared_address(state.full)),
          empty(shared_address(state.empty)),
          nothing(zero_matrix(shared_address(state.zeros))) {}

    // By all threads.
    __device__ __forceinline__ void init(RingState& state) const {
        for (u32 i = threadIdx.x; i < sizeof(state.zeros) / 4; i += THREADS) state.zeros[i] = 0;
        async_fence();
        if (threadIdx.x == 0) {
            for (u32 s = 0; s < STAGES; s++) {
                barrier_init(full + 8 * s, 1);
                barrier_init(empty + 8 * s, 1);
            }
            barrier_init_fence();
        }
        __syncthreads();
    }

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    // Past a tile of the other warp group.
    __device__ __forceinline__ void advance(u32 stages) {
        stage += stages;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
    }
    __device__ __forceinline__ u32 a() const { return tiles + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 b() const { return a() + A_BYTES; }

    // The next stage for copies; returns the barrier that they fill. All stages are empty at first.
    __device__ __forceinline__ u32 begin_copies() const {
        barrier_wait(empty + 8 * stage, parity ^ 1);
        barrier_arrive_expecting(full + 8 * stage, STAGE_BYTES);
        return full + 8 * stage;
    }
};

typedef float Accumulators[FRAGMENTS * N8][4];

// Rows of the tile that fragment `m` of this warp begins at.
DEVICE u32 fragment_at(u32 m) { return m * 64 + threadIdx.x % WARP_GROUP / 32 * FRAGMENT_ROWS; }

// Tiles that are multiplied, by turns: a warp group takes those whose number is its own modulo 2. A turn begins when the
// products of the tile before have been started. So a warp group is never more than one turn of the ring away from the
// barriers that it waits for.
struct Turns {
    u32 group, number = 0;

    __device__ __forceinline__ bool mine() const { return number % MULTIPLIERS == group; }
    __device__ __forceinline__ void begin() const {
        if (number > 0) meet(1 + group, WARP_GROUP * MULTIPLIERS);
    }
    __device__ __forceinline__ void end() const { pass_on(2 - group, WARP_GROUP * MULTIPLIERS); }
};

DEVICE u32 stages_of(u32 blocks) { return (blocks + STAGE_BLOCKS - 1) / STAGE_BLOCKS; }

// acc = the sum of products over `blocks` > 0 blocks of sixteen of the contraction. Stages hold four; what lies behind
// the last block in its stage is zero, or, if the contraction is RAGGED, zeros take its place. Of a tile whose columns or
// rows end early, the first COLUMNS and the first 64 * ROW_HALVES.
template <u32 COLUMNS, u32 ROW_HALVES, bool MN_MAJOR, bool RAGGED>
DEVICE void multiply(Ring& ring, Accumulators& acc, u32 blocks, const Turns& turns) {
    constexpr u32 A_STEP = BLOCK * 2, B_STEP = MN_MAJOR ? BLOCK * LINE : BLOCK * 2;
    const bool leader = threadIdx.x % WARP_GROUP == 0;
    u32 before = 0;
    for (u32 done = 0; done < blocks; done += STAGE_BLOCKS) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        const u64 a = matrix_of(ring.a()), b = matrix_of(ring.b(), MN_MAJOR ? TILE_K * LINE : 16);
        products_begin();
#pragma unroll
        for (u32 i = 0; i < STAGE_BLOCKS; i++) {
            // By data and not by a branch, in which the compiler would let products wait for each other.
            const bool live = !RAGGED || done + i < blocks;
            const u64 rows = live ? a + i * (A_STEP >> 4) : ring.nothing;
            const u64 columns = live ? b + i * (B_STEP >> 4) : ring.nothing;
            product<COLUMNS, MN_MAJOR, 0>(acc, rows, columns, (done | i) != 0);
            if constexpr (ROW_HALVES == 2)
                product<COLUMNS, MN_MAJOR, N8>(acc, live ? rows + (64 * LINE >> 4) : ring.nothing, columns,
                                               (done | i) != 0);
        }
        products_commit();
        if (done != 0) {
            products_wait<1>();
            if (leader) barrier_arrive(before);
        }
        before = ring.empty + 8 * ring.stage;
        ring.advance();
    }
    turns.end();
    products_wait<0>();
    if (leader) barrier_arrive(before);
}

// With what the tile has of rows and columns.
template <bool MN_MAJOR, bool RAGGED>
DEVICE void multiply(Ring& ring, Accumulators& acc, u32 blocks, u32 rows, u32 columns, const Turns& turns) {
    turns.begin();
    if (columns > TILE_N / 2) {
        if (rows > TILE_M / 2)
            multiply<TILE_N, 2, MN_MAJOR, RAGGED>(ring, acc, blocks, turns);
        else
            multiply<TILE_N, 1, MN_MAJOR, RAGGED>(ring, acc, blocks, turns);
    } else {
        if (rows > TILE_M / 2)
            multiply<TILE_N / 2, 2, MN_MAJOR, RAGGED>(ring, acc, blocks, turns);
        else
            multiply<TILE_N / 2, 1, MN_MAJOR, RAGGED>(ring, acc, blocks, turns);
    }
}

// Where tile `index` of a grid of `rows` x `columns` tiles lies: a band of rows at a time, down its columns, so that
// what runs at the same time shares operands in the L2 cache.
struct Place {
    u32 row, column;
};

template <u32 BAND>
DEVICE Place place_of(u32 index, u32 rows, u32 columns) {
    const u32 first = index / (BAND * columns) * BAND, height = min(BAND, rows - first);
    const u32 within = index - first * columns;
    return {first + within % height, within / height};
}
