// Hopper's asynchronous instructions: barriers in shared memory, tensor copies, matrix products of a warp group.
//
// Shared memory is named by its 32-bit address. Tiles lie there as tensor copies with a 128-byte swizzle leave them:
// lines of 64 BF16 values, eight of which make one pattern.
#pragma once
#include "numerics.cuh"

// An opaque `CUtensorMap`.
struct alignas(64) TensorMap {
    u64 words[16];
};

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialized barriers visible to the asynchronous proxy and to the cluster.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns when the phase of this parity is complete.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// A box of a 2-D or 3-D tensor to shared memory; its bytes count towards the barrier's phase.
DEVICE void copy_box(u32 to, const TensorMap* map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}
DEVICE void copy_box(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// So many threads meet at barrier `number` of the thread block; 0 is that of __syncthreads.
DEVICE void meet(u32 number, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

template <u32 REGISTERS>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <u32 REGISTERS>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// A tile for the matrix unit. K-major (a line holds 64 values along the contraction): patterns of eight lines follow
// each other. MN-major (a line holds 64 rows of the operand): `step` is the distance of the next 64 rows.
DEVICE u64 matrix_of(u32 address, u32 step = 16) {
    constexpr u64 SWIZZLE_128B = 1ull << 62, PATTERN = 1024;
    return SWIZZLE_128B | (PATTERN >> 4) << 32 | (u64)(step >> 4) << 16 | (address >> 4 & 0x3FFF);
}

// One pattern of zeros over and over.
DEVICE u64 zero_matrix(u32 pattern) { return matrix_of(pattern, 0) & ~(0x3FFFull << 32); }

// What this thread has written to shared memory, for asynchronous instructions behind the next barrier.
DEVICE void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 LEFT>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Operands of the instructions: accumulators, and their numbers in the text.
#define ACC_4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define ACC_16(j) ACC_4(j), ACC_4(j + 1), ACC_4(j + 2), ACC_4(j + 3)
#define ACC_64(j) ACC_16(j), ACC_16(j + 4), ACC_16(j + 8), ACC_16(j + 12)
#define NUMBERS_8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define NUMBERS_64                                                                                           \
    NUMBERS_8(0, 1, 2, 3, 4, 5, 6, 7)                                                                        \
    "," NUMBERS_8(8, 9, 10, 11, 12, 13, 14, 15) "," NUMBERS_8(16, 17, 18, 19, 20, 21, 22, 23) "," NUMBERS_8( \
        24, 25, 26, 27, 28, 29, 30,                                                                          \
        31) "," NUMBERS_8(32, 33, 34, 35, 36, 37, 38,                                                        \
                          39) "," NUMBERS_8(40, 41, 42, 43, 44, 45, 46,                                      \
                                            47) "," NUMBERS_8(48, 49, 50, 51, 52, 53, 54,                    \
                                                              55) "," NUMBERS_8(56, 57, 58, 59, 60, 61, 62, 63)
#define NUMBERS_128                                                                                                  \
    NUMBERS_64                                                                                                       \
    "," NUMBERS_8(64, 65, 66, 67, 68, 69, 70, 71) "," NUMBERS_8(72, 73, 74, 75, 76, 77, 78, 79) "," NUMBERS_8(       \
        80, 81, 82, 83, 84, 85, 86,                                                                                  \
        87) "," NUMBERS_8(88, 89, 90, 91, 92, 93, 94,                                                                \
                          95) "," NUMBERS_8(96, 97, 98, 99, 100, 101, 102,                                           \
                                            103) "," NUMBERS_8(104, 105, 106, 107, 108, 109, 110,                    \
                                                               111) "," NUMBERS_8(112, 113, 114, 115, 116, 117, 118, \
                                                                                  119) "," NUMBERS_8(120, 121, 122,  \
                                                                                                     123, 124, 125,  \
                                                                                                     126, 127)

// d = a * b (+ d): 64 rows of `a`, K-major, COLUMNS rows of `b`, sixteen values of the contraction. Of 128 columns, the
// first half of the accumulators.
template <u32 COLUMNS, bool MN_MAJOR>
DEVICE void product(float (&d)[32][4], u64 a, u64 b, u32 accumulate) {
    static_assert(COLUMNS == 256 || COLUMNS == 128, "widths that are written out");
    if constexpr (COLUMNS == 256)
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %130, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NUMBERS_128
            "}, %128, %129, p, 1, 1, 0, %131;\n"
            "}"
            : ACC_64(0), ACC_64(16)
            : "l"(a), "l"(b), "r"(accumulate), "n"(MN_MAJOR ? 1 : 0));
    else
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NUMBERS_64
            "}, %64, %65, p, 1, 1, 0, %67;\n"
            "}"
            : ACC_64(0)
            : "l"(a), "l"(b), "r"(accumulate), "n"(MN_MAJOR ? 1 : 0));
}

#undef ACC_4
#undef ACC_16
#undef ACC_64
#undef NUMBERS_8
#undef NUMBERS_64
#undef NUMBERS_128
