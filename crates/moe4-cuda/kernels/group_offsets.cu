// Where each expert's rows, token positions and tiles begin, from splits in device memory.
//
// One thread block; see groups.cuh for the three arrays. Splits that are negative or need more rows than there are leave
// a fault and count as zero rows for every expert, so that nothing behind them reads out of bounds.
#include "fault.cuh"
#include "groups.cuh"

constexpr u32 THREADS = 1024;

// Inclusive prefix sums over the thread block; `total` is the last.
DEVICE u64 prefix_sum(u64 value, u64* warp_sums, u64& total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u64 other = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += other;
    }
    __syncthreads();
    if (lane == 31) warp_sums[warp] = value;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (u32 w = 0; w < THREADS / 32; w++) {
        if (w < warp) before += warp_sums[w];
        total += warp_sums[w];
    }
    return before + value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
group_offsets(const long long* splits, u32 experts, u64 rows, u64 padded_rows, u64* offsets, u64* padded, u32* tiles,
              Fault* faults) {
    __shared__ u64 warp_sums[THREADS / 32];
    __shared__ u32 bad;
    if (threadIdx.x == 0) bad = 0;
    __syncthreads();
    u64 total = 0;
    for (u32 first = 0; first < experts; first += THREADS) {
        const u32 e = first + threadIdx.x;
        const long long split = e < experts ? splits[e] : 0;
        // Each split is compared by itself before the sum is, so that the sum cannot wrap around.
        if (split < 0 || (u64)split > rows) {
            report(faults, FAULT_SPLIT, e);
            bad = 1;
        }
        u64 sum;
        prefix_sum(split < 0 || (u64)split > rows ? 0 : split, warp_sums, sum);
        total += sum;
    }
    if (threadIdx.x == 0 && total > rows) {
        report(faults, FAULT_SPLIT_SUM, total);
        bad = 1;
    }
    __syncthreads();
    u64 row = 0, position = 0, tile = 0;
    for (u32 first = 0; first < experts; first += THREADS) {
        const u32 e = first + threadIdx.x;
        const u64 split = e < experts && !bad ? (u64)splits[e] : 0;
        const u64 positions = (split + BLOCK - 1) / BLOCK * BLOCK, count = (split + TILE_ROWS - 1) / TILE_ROWS;
        u64 rows_here, positions_here, tiles_here;
        const u64 row_end = row + prefix_sum(split, warp_sums, rows_here);
        const u64 position_end = position + prefix_sum(positions, warp_sums, positions_here);
        const u64 tile_end = tile + prefix_sum(count, warp_sums, tiles_here);
        if (e < experts) {
            offsets[e] = row_end - split;
            padded[e] = position_end - positions;
            tiles[e] = (u32)(tile_end - count);
        }
        row += rows_here, position += positions_here, tile += tiles_here;
    }
    if (threadIdx.x == 0) {
        const u64 rest = max(rows - row, padded_rows - position);
        offsets[experts] = row, offsets[experts + 1] = rows;
        padded[experts] = position, padded[experts + 1] = padded_rows;
        tiles[experts] = (u32)tile, tiles[experts + 1] = (u32)(tile + (rest + TILE_ROWS - 1) / TILE_ROWS);
    }
}
