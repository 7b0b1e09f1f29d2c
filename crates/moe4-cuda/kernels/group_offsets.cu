// Where each expert's rows, token positions and tiles begin, from splits in device memory.
//
// One thread block; see groups.cuh for the arrays. Splits that are negative or need more rows than there are leave
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

// The expert whose tiles hold number `index`: first[e] <= index < first[e + 1], for e in 0..=experts.
DEVICE u32 find_expert(const u32* first, u32 experts, u32 index) {
    u32 low = 0, high = experts;
    while (low < high) {
        const u32 middle = (low + high + 1) / 2;
        if (first[middle] <= index)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    group_offsets(const long long* splits, u32 experts, u64 rows, u64 padded_rows, u64* offsets, u64* padded,
                  u32* first_tiles, Tile* tiles, u32 most_tiles, Fault* faults) {
    __shared__ u64 warp_sums[THREADS / 32];
    __shared__ u32 bad;
    if (threadIdx.x == 0) bad = 0;
    __syncthreads();
    u64 total = 0;
    for (u32 first = 0; first < experts; first += THREADS) {
        const u32 e = first + threadIdx.x;
        const long long split = e < experts ? splits[e] : 0;
        // Each split is compared by itself before the sum is, so that the sum cannot wrap around.
        const bool fits = split >= 0 && (u64)split <= rows;
        if (!fits) {
            report(faults, FAULT_SPLIT, e);
            bad = 1;
        }
        u64 sum;
        prefix_sum(fits ? split : 0, warp_sums, sum);
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
            first_tiles[e] = (u32)(tile_end - count);
        }
        row += rows_here, position += positions_here, tile += tiles_here;
    }
    const u64 rest = max(rows - row, padded_rows - position);
    const u32 end = (u32)(tile + (rest + TILE_ROWS - 1) / TILE_ROWS);
    if (threadIdx.x == 0) {
        offsets[experts] = row, offsets[experts + 1] = rows;
        padded[experts] = position, padded[experts + 1] = padded_rows;
        first_tiles[experts] = (u32)tile;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < most_tiles; i += THREADS) {
        Tile t{0, 0, 0, NO_TILE, 0, 0};
        if (i < end) {
            const u32 e = find_expert(first_tiles, experts, i);
            const u64 token = (u64)(i - first_tiles[e]) * TILE_ROWS;
            const u64 owned = offsets[e + 1] - offsets[e], positions = padded[e + 1] - padded[e];
            const auto left = [token](u64 count) {
                return (u16)(count > token ? min(count - token, (u64)TILE_ROWS) : 0);
            };
            t = {offsets[e] + token, padded[e] + token, token, e, left(owned), left(positions)};
        }
        tiles[i] = t;
    }
}
