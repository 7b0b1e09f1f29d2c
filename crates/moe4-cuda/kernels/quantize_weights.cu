// One expert's weight [n, k] BF16 in tiles of 16 x 16, nearest, under an amax that `weights_amax` left.
//
//   codes [n, k/2], scales [n, k/16]: a tile's scale repeated over its 16 rows
//
// Eight threads take a tile, two of its rows each; four tiles that follow each other in a row lie in one warp, so that
// each row is read in 128 bytes and its codes are written in 32. blockIdx.z is the expert, of those whose weights lie
// `stride` elements apart.
//
// Compile-time choices: UNPACKED (also code times block scale in BF16).
#include "encode.cuh"
#include "output.cuh"

constexpr int FORM = PACKED | (UNPACKED ? VALUES : 0);
constexpr u32 THREADS = 256;
constexpr u32 TILES = THREADS / 8;  // of a thread block, side by side

// With the saturation that the short way leaves out.
static __device__ __noinline__ Codes encode_rare(Neighbours low, Neighbours high, float m) {
    return encode_nearest<PACKED, true>(Block<Neighbours>(low, high), m, 0).codes;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_weights(const u16* __restrict__ w, u64 stride, u32 n, u32 k, const float* __restrict__ amax, Out out) {
    const u32 expert = blockIdx.z, blocks = k / BLOCK;
    __shared__ Scaling scaling;
    if (threadIdx.x < 128) scaling.fill(threadIdx.x, amax[expert], false, false);
    __syncthreads();
    const u32 lane = threadIdx.x % 32, block = blockIdx.x * TILES + threadIdx.x / 32 * 4 + lane % 4;
    const u32 first_row = blockIdx.y * BLOCK + lane / 4 * 2;
    const bool live = block < blocks;
    Neighbours low[2], high[2];
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const uint4* const from =
            reinterpret_cast<const uint4*>(w + expert * stride + (u64)(first_row + i) * k + block * BLOCK);
        const uint4 a = live ? __ldcs(from) : make_uint4(0, 0, 0, 0),
                    b = live ? __ldcs(from + 1) : make_uint4(0, 0, 0, 0);
        low[i] = {{a.x, a.y, a.z, a.w}}, high[i] = {{b.x, b.y, b.z, b.w}};
        largest = max(largest, Block<Neighbours>(low[i], high[i]).amax_bits());
    }
    // Over the eight threads of a tile, which are four lanes apart.
#pragma unroll
    for (u32 step = 4; step < 32; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    if (!live) return;
    const float relative = __fmul_rn(__uint_as_float(largest), scaling.block);
    const bool finite = largest < 0x7F800000u, usual = is_usual(relative);
    const u32 scale = finite ? float_to_e4m3(relative) : E4M3_NAN;
    const float m = scaling.multipliers[scale];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        Codes codes{0, 0};
        if (usual)
            codes = encode_nearest<PACKED, false>(Block<Neighbours>(low[i], high[i]), m, scale).codes;
        else if (finite)
            codes = encode_rare(low[i], high[i], m);
        Cursor<false, FORM>(out, (u64)expert * n + first_row + i, block, blocks).store_any({codes, scale});
    }
}
