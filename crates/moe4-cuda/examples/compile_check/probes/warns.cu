// Must be reported: a variable that nothing reads.
extern "C" __global__ void warns(float *y) {
    int unused = 3;
    y[threadIdx.x] = 1.0f;
}
