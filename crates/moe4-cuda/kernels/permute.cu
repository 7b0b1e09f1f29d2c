// Rows gathered into another order: out[s] = x[source[s]], zeros where the source is no row.
//
// A warp takes a row. An index beyond the tensor leaves a fault and a zero row.
//
// Compile-time choices: VECTOR, BF16 elements of one access: 8 or 1.
#include "fault.cuh"

constexpr u32 THREADS = 256;
constexpr u32 NO_ROW = 0xFFFFFFFFu;

#if VECTOR == 8
typedef uint4 Word;
#else
typedef u16 Word;
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    permute(const Word* __restrict__ x, u64 rows, u64 words, const u32* __restrict__ source, u64 slots,
            Word* __restrict__ out, Fault* faults) {
    const u32 lane = threadIdx.x % 32;
    for (u64 slot = (u64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; slot < slots;
         slot += (u64)gridDim.x * (THREADS / 32)) {
        const u32 row = source[slot];
        const bool live = row < rows;
        if (!live && row != NO_ROW && lane == 0) report(faults, FAULT_PERMUTE_INDEX, slot);
#pragma unroll 4
        for (u64 i = lane; i < words; i += 32) out[slot * words + i] = live ? __ldcs(x + row * words + i) : Word{};
    }
}
