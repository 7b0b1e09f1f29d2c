#pragma once

__device__ inline float twice(float value) {
    return value + value;
}
