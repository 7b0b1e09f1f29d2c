// Amaxes and codes of experts' weights [n, k] BF16, byte for byte as by `weights_amax` and `quantize_weights`, with one
// read from memory: an expert is read a second time while the L2 cache still holds it.
//
//   ticket t    largest finite magnitude of piece t     to found[t]
//               codes and scales of piece t - ahead     under the largest of all that was found in its expert
//
// Pieces are counted through all experts, and thread blocks take tickets from a counter, so that the two reads of a
// piece are `ahead` tickets apart. Only time depends on the cache: a piece that has left it comes from memory again.
//
// No deadlock, however many thread blocks are resident: they hold tickets only while they run, do theirs in rising
// order, and wait for what lower tickets find, since `ahead` is at least the pieces of an expert. Take the lowest piece
// that is not found. If its ticket is taken, whoever has it waits for lower ones at most, and those are there. If not,
// all tickets that are taken are lower, and what they wait for is there.
//
// A word that is found says itself that it is there. So there is nothing to order, and no fence that would wait for the
// stores of the ticket before: with counters of arrivals and an atomic maximum it would stand in the way of every
// piece.
//
// Pieces are small, since those at work add to what lies between two reads. For the amax a piece is a run of memory;
// for the codes it is eight strips of four tiles, one for each warp. All loads of a ticket are under way before one is
// waited for, and the next ticket is asked for before the codes are made. The host clears `next` and `found` before.
//
// Compile-time choices: UNPACKED (also code times block scale in BF16).
#include "quantize_weights.cuh"
#include "reduce.cuh"

constexpr int FORM = PACKED | (UNPACKED ? VALUES : 0);
constexpr u32 THREADS = 256;
constexpr u32 RESIDENT = 4;  // thread blocks of a multiprocessor
constexpr u32 STRIPS = THREADS / 32;
constexpr u32 PIECE_WORDS = STRIPS * WARP_TILES * BLOCK * BLOCK / 8;
constexpr u32 WORDS = PIECE_WORDS / THREADS;  // of a thread

// A magnitude of BF16 as FP32 leaves its lower half free.
constexpr u32 FOUND = 1;

DEVICE void publish(u32* to, u32 value) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value)); }
DEVICE u32 look(const u32* from) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}

// A ticket as all threads of a block need it. One of them makes it, since its divisions cost as much as an amax: with
// them in every thread, instructions would take as long as memory.
struct Step {
    u32 ticket;
    bool amax_due, codes_due;
    // The piece for the amax: where it begins, and words from there to the end of its expert.
    const uint4* words;
    u32 left;
    // The piece for the codes: its expert, its number there, and its first strip.
    u32 expert, piece, band, strip;
};

// What all tickets have in common. Weights lie `stride` elements apart.
struct Walk {
    const u16* w;
    u64 stride;
    u32 bands, strips;  // of an expert; of a band
    u32 pieces, all;    // of an expert; of all
    u32 words;          // of an expert, 16 bytes each
    u32 ahead;

    __device__ __forceinline__ Step step(u32 ticket) const {
        Step s;
        s.ticket = ticket, s.amax_due = ticket < all, s.codes_due = ticket >= ahead && ticket < all + ahead;
        const u32 first = s.amax_due ? ticket / pieces : 0;
        const u32 begin = s.amax_due ? (ticket - first * pieces) * PIECE_WORDS : words;
        s.words = reinterpret_cast<const uint4*>(w + first * stride) + begin;
        s.left = begin < words ? words - begin : 0;
        const u32 codes = s.codes_due ? ticket - ahead : 0;
        s.expert = codes / pieces, s.piece = codes - s.expert * pieces;
        s.band = s.piece * STRIPS / strips, s.strip = s.piece * STRIPS - s.band * strips;
        return s;
    }
};

// The largest of this thread's share of what is found in an expert's pieces. Waits for it.
DEVICE u32 wait_for_share(const u32* found, u32 pieces) {
    u32 largest = 0;
    for (u32 i = threadIdx.x; i < pieces; i += THREADS) {
        u32 value = look(found + i);
        for (; value == 0; value = look(found + i)) __nanosleep(32);
        largest = max(largest, value);
    }
    return largest;
}

// `next`: the next ticket; `found` [experts, pieces]: magnitudes with FOUND, or 0.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantize_cached_weights(const u16* __restrict__ w, u64 stride, u32 n, u32 k, u32 experts, u32 ahead, u32* next,
                            u32* found, u32* __restrict__ amax, Out out) {
    __shared__ Scaling scaling;
    __shared__ Step step;
    __shared__ u32 of_piece[STRIPS], of_expert[STRIPS];  // maxima of the warps
    const u32 blocks = k / BLOCK, strips = (blocks + WARP_TILES - 1) / WARP_TILES, bands = n / BLOCK;
    const u32 pieces = (bands * strips + STRIPS - 1) / STRIPS, all = pieces * experts;
    const Walk walk{w, stride, bands, strips, pieces, all, n * k / 8, ahead};
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) step = walk.step(atomicAdd(next, 1u));
    __syncthreads();
    while (step.ticket < all + ahead) {
        const bool codes_due = step.codes_due;
        uint4 v[WORDS];
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            const u32 at = i * THREADS + threadIdx.x;
            // To stay in the cache.
            v[i] = at < step.left ? __ldg(step.words + at) : make_uint4(0, 0, 0, 0);
        }
        u32 band = step.band, strip = step.strip + warp;
        for (; strip >= strips; strip -= strips) band++;
        const u32 expert = step.expert, first_block = strip * WARP_TILES;
        TileRows rows(band, first_block, codes_due && band < bands && first_block + lane % WARP_TILES < blocks);
        rows.load(w, expert * stride, k);

        const u32 share = codes_due ? wait_for_share(found + expert * pieces, pieces) : 0;
        const u32 warp_share = __reduce_max_sync(~0u, share), here = __reduce_max_sync(~0u, larger_half(max_finite(v)));
        if (lane == 0) of_piece[warp] = here, of_expert[warp] = warp_share;
        __syncthreads();
        const u32 largest = __reduce_max_sync(~0u, of_expert[lane % STRIPS]) & ~FOUND;
        u32 following = 0;
        if (warp == 0) {
            const u32 value = __reduce_max_sync(~0u, of_piece[lane % STRIPS]);
            if (lane == 0) {
                if (step.amax_due) publish(found + step.ticket, value | FOUND);
                if (codes_due && step.piece == 0) amax[expert] = largest;
                following = atomicAdd(next, 1u);
            }
        }
        if (threadIdx.x < 128) scaling.fill(threadIdx.x, __uint_as_float(largest), false, false);
        const u32 of_tile = rows.amax_bits();
        __syncthreads();
        // Nobody reads this step any more.
        rows.store<FORM, true>(scaling, of_tile, out, (u64)expert * n, blocks);
        if (threadIdx.x == 0) step = walk.step(following);
        __syncthreads();
    }
}
