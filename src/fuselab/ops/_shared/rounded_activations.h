// Activations of 16-bit results in CUDA C++: the arithmetic is as exact as the result can hold.
//
// `Coarse` is a float whose elementary functions are the GPU's approximations of 2^x and 1 / x, and
// short polynomials. Their relative error is below 1e-5, also in the tails, where a float16 rounds
// by 2.4e-4 and a bfloat16 by 2e-3. The exact functions of elementary.h take two to four times as
// many instructions, which made 16-bit kernels wait for arithmetic instead of memory.
#pragma once

#include "activations.h"

struct Coarse {
  float value;
  FUSELAB_INLINE Coarse(double number) : value(static_cast<float>(number)) {}
  FUSELAB_INLINE Coarse(float number) : value(number) {}
};
FUSELAB_INLINE Coarse operator+(Coarse a, Coarse b) { return a.value + b.value; }
FUSELAB_INLINE Coarse operator-(Coarse a, Coarse b) { return a.value - b.value; }
FUSELAB_INLINE Coarse operator*(Coarse a, Coarse b) { return a.value * b.value; }
FUSELAB_INLINE bool operator<(Coarse a, Coarse b) { return a.value < b.value; }
FUSELAB_INLINE bool operator<=(Coarse a, Coarse b) { return a.value <= b.value; }
FUSELAB_INLINE bool operator>(Coarse a, Coarse b) { return a.value > b.value; }

// Returns 2^x, subnormal results included, which a bfloat16 can hold.
FUSELAB_INLINE float approximate_power_of_two(float x) {
  float result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Returns 1 / x for x >= 1; 0 above 2^126.
FUSELAB_INLINE float approximate_inverse(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

template <>
FUSELAB_INLINE Logistic<Coarse> logistic<Coarse>(Coarse x) {
  const float small = approximate_power_of_two(fabsf(x.value) * -1.44269504f);
  const float above = approximate_inverse(1.0f + small), below = small * above;
  return {x.value < 0.0f ? below : above, x.value < 0.0f ? above : below};
}

// The polynomial is a minimax approximation of exp(a^2 / 2) P(X < -a) in (a - 3.9) / (a + 3.9) for
// a in [0, 14.5], to a relative error of 4e-7: gelu's derivative has a zero, near which an error of
// 1e-5 would show.
template <>
FUSELAB_INLINE Normal<Coarse> normal<Coarse>(Coarse x) {
  const float a = fminf(fabsf(x.value), 14.5f);
  const float density = approximate_power_of_two(a * a * -0.72134752f);
  const float t = (a - 3.9f) * approximate_inverse(a + 3.9f);
  const float tail =
      density * horner(t, 0.09658767854, -0.1735534231, 0.1248924043, -0.07005863202, 0.02868656509,
                       -0.007003281696, -0.0001320101425, 0.0006498358175);
  return {x.value < 0.0f ? tail : 1.0f - tail, density * 0.39894228f};
}

// The polynomial is a minimax approximation for |x| < 0.5, to a relative error of 6e-7.
FUSELAB_INLINE Coarse hyperbolic_tangent(Coarse x) {
  const float size = fabsf(x.value), square = x.value * x.value;
  const float series = horner(square, 0.99999946, -0.33326318, 0.13190296, -0.04440221) * x.value;
  const float doubled = approximate_power_of_two(size * 2.88539008f);
  const float saturating = 1.0f - 2.0f * approximate_inverse(1.0f + doubled);
  return size < 0.5f ? series : copysignf(saturating, x.value);
}

// Returns the activation of `x`, to be rounded to Output.
template <class Activation, class Output, class Real>
FUSELAB_INLINE Real activated(Real x) {
  if constexpr (sizeof(Output) == 2) {
    return Activation::forward(Coarse(x)).value;
  } else {
    return Activation::forward(x);
  }
}

// Returns the gradient of the pre-activation, to be rounded to Output.
template <class Activation, class Output, class Real>
FUSELAB_INLINE Real pulled_through(Real grad, Real saved) {
  if constexpr (sizeof(Output) == 2) {
    return Activation::pullback(Coarse(grad), Coarse(saved)).value;
  } else {
    return Activation::pullback(grad, saved);
  }
}
