// The activations between FC1 and FC2 with their derivatives, as in the library's `kernels::activation`. Forward and
// backward call the same function, so that an `h` that is computed again has the same bits.
//
//   SWIGLU          silu(g) * u
//   SRELU           relu(c)^2
//   TANH_SRELU      (s * tanh(relu(c) / s))^2
//   SITU_GLU        b1 * tanh(g / b1) * sigmoid(g) * b2 * tanh(u / b2)
//   CLAMPED_QGEGLU  (clamp(u, -limit, limit) + offset) * m * sigmoid(alpha * m),  m = min(g, limit)
//
// One exponential serves a function and its derivative, without cancellation. ex2.approx is off by 2^-22 of its value;
// what its argument loses by rounding is put back afterwards, or large arguments would be off by more. The exponent is
// never positive, so nothing overflows, and subnormal results are kept: a large factor may bring them back.
//
// Compile-time choice: ACTIVATION.
#pragma once
#include "numerics.cuh"

constexpr u32 SWIGLU = 0, SRELU = 1, TANH_SRELU = 2, SITU_GLU = 3, CLAMPED_QGEGLU = 4;
static_assert(ACTIVATION <= CLAMPED_QGEGLU, "there are five activations");
constexpr bool GATED = ACTIVATION != SRELU && ACTIVATION != TANH_SRELU;

// In the order of the formulas: s; b1, b2; limit, alpha, offset.
struct ActivationParameters {
    float values[3];
    float reciprocals[2];  // of the first two, capped at the largest finite number
};

struct Evaluated {
    float value, dg, du;
};

// A function's value and its derivative.
struct Smooth {
    float value, slope;
};

DEVICE float exp2_approximate(float v) {
    float e;
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(v));
    return e;
}

// The smaller one; NaN stays NaN.
DEVICE float smaller(float a, float b) {
    float out;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

// exp(-a) for a >= 0; NaN stays NaN.
DEVICE float exp_negative(float a) {
    constexpr float LOG2_E = 1.44269502e+0f, LOG2_E_REST = 1.92596299e-8f, LN_2 = 6.93147182e-1f;
    a = smaller(a, 104.0f);
    // As an intrinsic, or the compiler multiplies once more for the other sign.
    const float exponent = __fmul_rn(a, -LOG2_E);
    const float rest = __fmaf_rn(a, -LOG2_E_REST, __fmaf_rn(a, -LOG2_E, -exponent));
    const float e = exp2_approximate(exponent);
    return __fmaf_rn(e, rest * LN_2, e);
}

// 1 / v for v between 1 and 2.
DEVICE float reciprocal(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// The logistic function.
DEVICE Smooth sigmoid(float x) {
    const float e = exp_negative(fabsf(x)), r = reciprocal(1.0f + e);
    return {x < 0.0f ? e * r : r, (e * r) * r};
}

// Cephes' polynomial near zero, where the quotient cancels.
DEVICE Smooth hyperbolic_tangent(float x) {
    const float a = fabsf(x), e = exp_negative(a + a), r = reciprocal(1.0f + e), z = x * x;
    float p = -5.7049887e-3f;
    p = __fmaf_rn(p, z, 2.0639088e-2f);
    p = __fmaf_rn(p, z, -5.3739716e-2f);
    p = __fmaf_rn(p, z, 1.3331442e-1f);
    p = __fmaf_rn(p, z, -0.33333283f);
    const float small = __fmaf_rn(p * z, x, x), large = copysignf((1.0f - e) * r, x);
    return {a < 0.625f ? small : large, (4.0f * e) * (r * r)};
}

// v / divisor, nearly always to the last bit: the slope of a tangent far out multiplies what is lost here.
DEVICE float divide(float v, float divisor, float reciprocal) {
    const float q = v * reciprocal, corrected = __fmaf_rn(__fmaf_rn(-q, divisor, v), reciprocal, q);
    // Far beyond where a tangent is 1, the correction may be infinity minus infinity.
    return fabsf(q) < 1e30f ? corrected : q;
}

// Clamps that NaN passes.
DEVICE float at_most(float v, float limit) { return smaller(v, limit); }
DEVICE float at_least(float v, float limit) { return v < limit ? limit : v; }

// `u` is of no effect without an up projection.
DEVICE Evaluated evaluate(const ActivationParameters& p, float g, float u) {
    if constexpr (ACTIVATION == SWIGLU) {
        const Smooth s = sigmoid(g);
        const float silu = g * s.value;
        return {silu * u, (s.value + g * s.slope) * u, silu};
    } else if constexpr (ACTIVATION == SRELU) {
        const float r = at_least(g, 0.0f);
        return {r * r, r + r, 0.0f};
    } else if constexpr (ACTIVATION == TANH_SRELU) {
        const Smooth t = hyperbolic_tangent(divide(at_least(g, 0.0f), p.values[0], p.reciprocals[0]));
        const float v = p.values[0] * t.value;
        return {v * v, (v + v) * t.slope, 0.0f};
    } else if constexpr (ACTIVATION == SITU_GLU) {
        const Smooth t = hyperbolic_tangent(divide(g, p.values[0], p.reciprocals[0])), s = sigmoid(g);
        const Smooth v = hyperbolic_tangent(divide(u, p.values[1], p.reciprocals[1]));
        const float bounded = p.values[0] * t.value, gate = bounded * s.value, up = p.values[1] * v.value;
        return {gate * up, (t.slope * s.value + bounded * s.slope) * up, gate * v.slope};
    } else {
        // Strictly beyond a clamp the gradient is zero; at the limit it passes.
        const float limit = p.values[0], m = at_most(g, limit), scaled = p.values[1] * m;
        const float up = at_least(at_most(u, limit), -limit) + p.values[2];
        const Smooth s = sigmoid(scaled);
        const float gate = m * s.value, slope = s.value + scaled * s.slope;
        return {up * gate, g > limit ? 0.0f : up * slope, u > limit || u < -limit ? 0.0f : gate};
    }
}
