// What a kernel finds wrong with data that the host never sees: kept until somebody asks.
#pragma once
#include "numerics.cuh"

constexpr u32 FAULT_SPLIT = 0;            // a split that is negative or larger than the tensor; detail: the expert
constexpr u32 FAULT_SPLIT_SUM = 1;        // more rows than the tensor has; detail: the sum
constexpr u32 FAULT_PERMUTE_INDEX = 2;    // an index of no row; detail: its position
constexpr u32 FAULT_UNPERMUTE_INDEX = 3;  // likewise

// Behind the kinds: the address of a word of host memory that any fault sets.
constexpr u32 FAULT_NOTICE = 4;

// The smallest detail of each kind; all ones where nothing happened.
struct Fault {
    u64 detail;
};

// A call, since faults are rare: inlined it would take registers from the loops around it.
static __device__ __noinline__ void report(Fault* faults, u32 kind, u64 detail) {
    atomicMin(&faults[kind].detail, detail);
    __threadfence_system();  // who sees the notice finds the detail
    *reinterpret_cast<volatile u64*>(faults[FAULT_NOTICE].detail) = 1;
}
