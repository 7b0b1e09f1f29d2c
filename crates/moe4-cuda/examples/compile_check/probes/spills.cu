// Must be reported: 100 values are alive at the barrier, and a block of 1024 threads leaves each 64 registers.
extern "C" __global__ void __launch_bounds__(1024) spills(float *y, const float *x, int stride) {
    float values[100];
#pragma unroll
    for (int i = 0; i < 100; ++i) values[i] = x[i * stride];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 100; ++i) y[i * stride] += values[i];
}
