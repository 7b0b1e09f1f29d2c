// Must compile without a message on every architecture: a header, a definition, static shared memory.
#include "probe.cuh"

extern "C" __global__ void clean(float *y, const float *x) {
    __shared__ float tile[256];
    const unsigned i = threadIdx.x;
    tile[i] = twice(x[i]);
    __syncthreads();
    y[i] = __fmaf_rn(tile[255 - i], 2.0f, float(BIAS));
}
