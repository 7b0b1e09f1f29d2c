// The main loop of the products on Hopper: one thread has tiles copied to shared memory, two warp groups multiply them.
//
//   stages in a ring:  a [128 x 64]   b [256 x 64]   BF16
//   copying thread     for each stage: wait until it is empty, start the copies, which fill it
//   each warp group    for each stage: wait until it is full, acc [64 x 256] += a * b; release the one before
//
// The thread blocks stay on their multiprocessors and take tiles in turn, so that the copies of a tile start while the
// one before is still in its epilogue. A tile of 128 x 256 is what the registers of two warp groups hold; smaller ones
// read shared memory and the L2 cache more often for the same work, and clusters of two that share copies were no
// faster (docs/attempts.md).
#pragma once
#include "wgmma.cuh"

constexpr u32 TILE_M = 128, TILE_N = 256, TILE_K = 64;
constexpr u32 N8 = TILE_N / 8;
constexpr u32 STAGES = 4;
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
                barrier_init(empty + 8 * s, MULTIPLIERS);
            }
            barrier_init_fence();
        }
        __syncthreads();
    }

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
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

// acc = the sum of products over `blocks` > 0 blocks of sixteen of the contraction, by warp group `group`. Stages hold
// four; what lies behind the last block in its stage is zero, or, if the contraction is RAGGED, zeros take its place.
// Of a tile whose columns end early, the first COLUMNS.
template <u32 COLUMNS, bool MN_MAJOR, bool RAGGED>
DEVICE void multiply(Ring& ring, float (&acc)[N8][4], u32 blocks, u32 group) {
    constexpr u32 A_STEP = BLOCK * 2, B_STEP = MN_MAJOR ? BLOCK * LINE : BLOCK * 2;
    const bool leader = threadIdx.x % WARP_GROUP == 0;
    u32 before = 0;
    for (u32 done = 0; done < blocks; done += STAGE_BLOCKS) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        const u64 a = matrix_of(ring.a() + group * (A_BYTES / MULTIPLIERS));
        const u64 b = matrix_of(ring.b(), MN_MAJOR ? TILE_K * LINE : 16);
        products_begin();
#pragma unroll
        for (u32 i = 0; i < STAGE_BLOCKS; i++) {
            // By data and not by a branch, in which the compiler would let products wait for each other.
            const bool live = !RAGGED || done + i < blocks;
            product<COLUMNS, MN_MAJOR>(acc, live ? a + i * (A_STEP >> 4) : ring.nothing,
                                       live ? b + i * (B_STEP >> 4) : ring.nothing, (done | i) != 0);
        }
        products_commit();
        if (done != 0) {
            products_wait<1>();
            if (leader) barrier_arrive(before);
        }
        before = ring.empty + 8 * ring.stage;
        ring.advance();
    }
    products_wait<0>();
    if (leader) barrier_arrive(before);
}

// What a warp group does whose rows of the tile are not there: it lets the other one have the matrix unit. Only its
// first warp follows the stages; the others may neither fall behind, where they would take one turn of the ring for
// another, nor run ahead.
DEVICE void skip(Ring& ring, u32 blocks, u32 group) {
    const bool follows = threadIdx.x % WARP_GROUP < 32, leader = threadIdx.x % WARP_GROUP == 0;
    for (u32 done = 0; done < blocks; done += STAGE_BLOCKS) {
        if (follows) {
            barrier_wait(ring.full + 8 * ring.stage, ring.parity);
            __syncwarp();
            if (leader) barrier_arrive(ring.empty + 8 * ring.stage);
        }
        ring.advance();
    }
    meet(group + 1, WARP_GROUP);
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
