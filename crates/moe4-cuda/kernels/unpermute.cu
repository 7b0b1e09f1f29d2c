// Rows summed back to their tokens: out[t] = sum_j weight[t, j] * y[slot[t, j]], in FP32, j ascending, rounded once.
//
// A warp takes a token. An index beyond the tensor leaves a fault and adds nothing.
//
// Compile-time choices: VECTOR, BF16 elements of one access: 8 or 1.
#include "fault.cuh"

constexpr u32 THREADS = 256;
constexpr u32 NO_ROW = 0xFFFFFFFFu;

extern "C" __global__ void __launch_bounds__(THREADS)
    unpermute(const u16* __restrict__ y, u64 rows, u64 cols, const u32* __restrict__ slot, u32 top_k,
              const float* __restrict__ weights, u64 tokens, u16* __restrict__ out, Fault* faults) {
    const u32 lane = threadIdx.x % 32;
    for (u64 t = (u64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; t < tokens;
         t += (u64)gridDim.x * (THREADS / 32)) {
        if (lane == 0)
            for (u32 j = 0; j < top_k; j++) {
                const u32 row = slot[t * top_k + j];
                if (row >= rows && row != NO_ROW) report(faults, FAULT_UNPERMUTE_INDEX, t * top_k + j);
            }
        for (u64 i = (u64)lane * VECTOR; i < cols; i += 32 * VECTOR) {
            float sum[VECTOR] = {};
#pragma unroll 1
            for (u32 j = 0; j < top_k; j++) {
                const u32 row = slot[t * top_k + j];
                if (row >= rows) continue;
                const float weight = weights ? weights[t * top_k + j] : 1.0f;
                const u16* const from = y + row * cols + i;
#if VECTOR == 8
                const uint4 v = *reinterpret_cast<const uint4*>(from);
                const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (u32 p = 0; p < 4; p++) {
                    sum[2 * p] = __fadd_rn(sum[2 * p], __fmul_rn(weight, lower(w[p])));
                    sum[2 * p + 1] = __fadd_rn(sum[2 * p + 1], __fmul_rn(weight, upper(w[p])));
                }
#else
                sum[0] = __fadd_rn(sum[0], __fmul_rn(weight, lower(*from)));
#endif
            }
#if VECTOR == 8
            *reinterpret_cast<uint4*>(out + t * cols + i) =
                make_uint4(to_bf16x2(sum[0], sum[1]), to_bf16x2(sum[2], sum[3]), to_bf16x2(sum[4], sum[5]),
                           to_bf16x2(sum[6], sum[7]));
#else
            out[t * cols + i] = (u16)to_bf16x2(sum[0], 0.0f);
#endif
        }
    }
}
