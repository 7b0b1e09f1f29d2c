// Tensors into pages of a pool, or out of them; a page may lie in device memory or in pinned host memory.
//
//   a part (tensor) takes the bytes [at, at + stored) of a store, which is a list of pages; at is a multiple of 16
//   a line of a part is `line` bytes, of which the first `alive` belong to experts:
//     all; `count` rows of `per` bytes in a tensor [T, cols]; or `count` token positions, 1 << shift of them in a byte
//
// A launch copies one window of the store, words of 16 bytes, a thread a word. Into pages, words without a live byte
// are left out. Out of pages, dead bytes become zero, whatever the page holds there.
//
// Compile-time choices: RESTORE (out of pages).
#include "numerics.cuh"

constexpr u32 THREADS = 256;
constexpr u32 MOST_PARTS = 8, MOST_PAGES = 256;

struct Part {
    u8* tensor;
    u64 bytes, line;
    u64 at;
    const u64* count;  // null: all of a line is alive
    u32 per, shift;
};

struct Window {
    u8* pool;
    u64 first;  // first byte, where a page begins
    u32 words;  // of 16 bytes
    u32 words_per_page;
    u32 parts, unused;
    Part part[MOST_PARTS];  // in the order of `at`
    u32 page[MOST_PAGES];
};

// Bit b: byte `inner + b` of the part is inside its tensor and alive.
DEVICE u32 live_bits(const Part& part, u64 inner, u32 left) {
    const u32 inside = (1u << left) - 1;
    const u64 alive = part.count ? min(*part.count * part.per >> part.shift, part.line) : part.line;
    if (alive == part.line) return inside;
    u64 position = part.line == part.bytes ? inner : inner % part.line;
    if (position + 16 <= part.line) {
        const u32 live = alive > position ? (u32)min(alive - position, (u64)16) : 0;
        return ((1u << live) - 1) & inside;
    }
    u32 bits = 0;
    for (u32 b = 0; b < left; b++) {
        bits |= (position < alive ? 1u : 0u) << b;
        if (++position == part.line) position = 0;
    }
    return bits;
}

// 0xFF in each byte whose bit is set.
DEVICE u32 byte_mask(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) * 0xFFu; }

extern "C" __global__ void __launch_bounds__(THREADS) copy_pages(const __grid_constant__ Window window) {
    for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < window.words; at += (u64)gridDim.x * THREADS) {
        const u32 word = (u32)at;
        const u64 offset = window.first + at * 16;
        u32 p = window.parts - 1;
        while (window.part[p].at > offset) p--;
        const Part& part = window.part[p];
        const u64 inner = offset - part.at;
        const u32 left = inner < part.bytes ? (u32)min(part.bytes - inner, (u64)16) : 0;
        if (left == 0) continue;
        const u32 bits = live_bits(part, inner, left);
        const u64 page = window.page[word / window.words_per_page];
        const u64 place = page * window.words_per_page + word % window.words_per_page;
        uint4* const paged = reinterpret_cast<uint4*>(window.pool) + place;
        u8* const tensor = part.tensor + inner;
        u32 value[4] = {};
        if (RESTORE) {
            if (bits) {
                const uint4 stored = *paged;
                value[0] = stored.x & byte_mask(bits), value[1] = stored.y & byte_mask(bits >> 4);
                value[2] = stored.z & byte_mask(bits >> 8), value[3] = stored.w & byte_mask(bits >> 12);
            }
            if (left == 16) {
                *reinterpret_cast<uint4*>(tensor) = make_uint4(value[0], value[1], value[2], value[3]);
            } else {
#pragma unroll
                for (u32 b = 0; b < 16; b++)
                    if (b < left) tensor[b] = (u8)(value[b / 4] >> 8 * (b % 4));
            }
        } else if (bits) {
            if (left == 16) {
                *paged = *reinterpret_cast<const uint4*>(tensor);
            } else {
#pragma unroll
                for (u32 b = 0; b < 16; b++)
                    if (b < left) value[b / 4] |= (u32)tensor[b] << 8 * (b % 4);
                *paged = make_uint4(value[0], value[1], value[2], value[3]);
            }
        }
    }
}
