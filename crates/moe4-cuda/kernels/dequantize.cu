// The values of a quantized operand in FP32: ((scale * amax) * fl(1/2688)) * code, in this order.
//
//   rowwise      [T, cols]   row r is scaled by the amax of the expert that owns it
//   columnwise   [cols, k]   token position p likewise
//
// Rows and positions of nobody give zero. A thread takes a block of 16.
//
// Compile-time choices: COLUMNWISE, SWIZZLED (scales in the 128x4 layout).
#include "groups.cuh"
#include "output.cuh"

constexpr u32 THREADS = 256;

DEVICE float e2m1_to_float(u32 code) {
    // The magnitudes' BF16 bits, bytes picked by a selector.
    const u32 m = code & 7;
    const u32 bits =
        permute_bytes(0x3F3F3F00u, 0x40404040u, m) << 24 | (permute_bytes(0xC0800000u, 0xC0804000u, m) & 0xFF) << 16;
    return __uint_as_float(bits | (code & 8) << 28);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize(const uint2* __restrict__ codes, const u8* __restrict__ scales, const float* __restrict__ amax, u32 cols,
               u64 k, const Groups groups, float* __restrict__ out) {
    const Tile tile = load_tile(groups, block_in_grid());
    if (tile.expert == NO_TILE) return;
    const u64 blocks = COLUMNWISE ? k / BLOCK : cols / BLOCK;
    const u32 per_line = COLUMNWISE ? tile.positions / BLOCK : cols / BLOCK, lines = COLUMNWISE ? cols : tile.rows;
    const float of_tensor = tile.expert < groups.experts ? amax[tile.expert] : 0.0f;
    const u64 count = (u64)per_line * lines;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        const u64 line = COLUMNWISE ? i / per_line : tile.row + i / per_line;
        const u64 block = COLUMNWISE ? tile.position / BLOCK + i % per_line : i % per_line;
        const u64 number = line * blocks + block;
        const bool live = tile.expert < groups.experts;
        const uint2 c = codes[number];
        const float s = e4m3_to_float(scales[scale_index<SWIZZLED>(line, block, blocks)]);
        const float factor = __fmul_rn(__fmul_rn(s, of_tensor), 1.0f / 2688.0f);
        float v[16];
#pragma unroll
        for (u32 j = 0; j < 16; j++) {
            const u32 code = (j < 8 ? c.x : c.y) >> (4 * (j % 8));
            v[j] = live ? __fmul_rn(factor, e2m1_to_float(code)) : 0.0f;
            // The hardware's NaN has other bits than the contract's.
            if (v[j] != v[j]) v[j] = __uint_as_float(0x7FC00000u);
        }
        float4* const to = reinterpret_cast<float4*>(out) + number * 4;
#pragma unroll
        for (u32 j = 0; j < 4; j++) to[j] = make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
    }
}
