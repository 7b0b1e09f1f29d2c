// Must not compile: an identifier that is declared nowhere.
extern "C" __global__ void broken(float *y) {
    y[threadIdx.x] = undeclared;
}
