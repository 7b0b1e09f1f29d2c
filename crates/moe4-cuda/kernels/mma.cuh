// Instructions of the matrix units from compute capability 8.0 on: copies to shared memory that bypass registers, loads
// of 8 x 8 matrices, and products of BF16 that are summed in FP32.
#pragma once
#include "numerics.cuh"

// Sixteen bytes, or zeros; `from` is an address that exists in any case.
DEVICE void copy_async(u32 to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}

// The first `bytes` of SIZE bytes, and zeros.
template <u32 SIZE>
DEVICE void copy_part_async(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(SIZE), "r"(bytes)
                 : "memory");
}

// What this thread has started since the last call is one group.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last `LEFT` groups of this thread are done. Other threads see them behind a barrier.
template <u32 LEFT>
DEVICE void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four matrices of 8 rows of 16 bytes; lanes 8i .. 8i + 7 give the addresses of matrix i. Word i of lane 4g + t is the
// pair 2t, 2t + 1 of row g of matrix i, or, transposed, rows 2t and 2t + 1 of column g.
template <bool TRANSPOSED>
DEVICE void load_matrices(u32 (&w)[4], u32 from) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(from)
                     : "memory");
}

// The same the other way round, from compute capability 9.0 on.
DEVICE void store_matrices(u32 to, const u32 (&w)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
}

// acc (16 x 8) += a (16 x 16) * b (16 x 8).
DEVICE void multiply_accumulate(float (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
