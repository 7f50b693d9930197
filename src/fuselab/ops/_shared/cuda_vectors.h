// What activations.h needs, in CUDA C++.
#pragma once

#include "../../runtime/include/cuda_packs.h"

template <class Real>
using Scalar = Real;
template <class Real>
struct IntegersOf;
template <>
struct IntegersOf<float> {
  using type = int;
};
template <>
struct IntegersOf<double> {
  using type = long long;
};
template <class Real>
using Integers = typename IntegersOf<Real>::type;

template <class Real>
FUSELAB_INLINE Real constant(double value) {
  return static_cast<Real>(value);
}
FUSELAB_INLINE int bits_of(float x) { return __float_as_int(x); }
FUSELAB_INLINE long long bits_of(double x) { return __double_as_longlong(x); }
template <class Real>
FUSELAB_INLINE Real from_bits(Integers<Real> bits) {
  if constexpr (sizeof(Real) == 4) {
    return __int_as_float(bits);
  } else {
    return __longlong_as_double(bits);
  }
}
template <class Real>
FUSELAB_INLINE Real choose(bool condition, Real a, Real b) {
  return condition ? a : b;
}
FUSELAB_INLINE int half_of(int n) { return n >> 1; }
FUSELAB_INLINE long long half_of(long long n) { return n >> 1; }
// One Newton step on the approximate quotient: 1 ulp in 4 instructions, where IEEE division takes 8
// and a branch.
FUSELAB_INLINE float quotient(float a, float b) {
  const float inverse = __fdividef(1.0f, b);
  const float q = a * inverse;
  return __fmaf_rn(__fmaf_rn(-b, q, a), inverse, q);
}
FUSELAB_INLINE double quotient(double a, double b) { return a / b; }
template <class Real>
FUSELAB_INLINE Real opaque(Real x) {
  return x;
}
FUSELAB_INLINE float square_error(float a, float square) { return __fmaf_rn(a, a, -square); }
FUSELAB_INLINE double square_error(double a, double square) { return __fma_rn(a, a, -square); }
// Products that the compiler does not fuse into FMAs: they are rounded as eager rounds them.
FUSELAB_INLINE float product(float a, float b) { return __fmul_rn(a, b); }
FUSELAB_INLINE double product(double a, double b) { return __dmul_rn(a, b); }

// A float argument is passed by value, or as a pointer under torch.compile.
template <class Real>
FUSELAB_INLINE Real scale_of(float scale) {
  return static_cast<Real>(scale);
}
template <class Real>
FUSELAB_INLINE Real scale_of(double scale) {
  return static_cast<Real>(scale);
}
template <class Real, class Stored>
FUSELAB_INLINE Real scale_of(const Stored* scale) {
  return static_cast<Real>(*scale);
}
