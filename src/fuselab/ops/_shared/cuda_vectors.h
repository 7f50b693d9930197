// Loads, stores and conversions for the CUDA kernels of pointwise operators, as activations.h
// needs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#define FUSELAB_INLINE __device__ __forceinline__

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

template <class Real>
FUSELAB_INLINE Real widened(float value) {
  return static_cast<Real>(value);
}
template <class Real>
FUSELAB_INLINE Real widened(double value) {
  return static_cast<Real>(value);
}
template <class Real>
FUSELAB_INLINE Real widened(__half value) {
  return static_cast<Real>(__half2float(value));
}
template <class Real>
FUSELAB_INLINE Real widened(__nv_bfloat16 value) {
  return static_cast<Real>(__bfloat162float(value));
}

FUSELAB_INLINE void assign(float& to, double value) { to = static_cast<float>(value); }
FUSELAB_INLINE void assign(double& to, double value) { to = value; }
FUSELAB_INLINE void assign(__half& to, float value) { to = __float2half_rn(value); }
FUSELAB_INLINE void assign(__half& to, double value) { to = __double2half(value); }
FUSELAB_INLINE void assign(__nv_bfloat16& to, float value) { to = __float2bfloat16_rn(value); }
FUSELAB_INLINE void assign(__nv_bfloat16& to, double value) { to = __double2bfloat16(value); }

// `width` consecutive elements of a thread. aligned: the address is a multiple of their size, or of
// 16 bytes if they are larger, and they are moved by 16-byte instructions. Accesses have no cache
// hints: evict-first loads and stores cost 7 % at 403 MB (H200, 103.9 us against 97.5).
template <class Element, int width>
struct alignas(16) Pack {
  Element element[width];
};

template <bool aligned, int width, class Element>
FUSELAB_INLINE Pack<Element, width> load(const Element* pointer) {
  constexpr int bytes = width * sizeof(Element);
  Pack<Element, width> pack;
  if constexpr (aligned && bytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < bytes / 16; ++i) {
      const uint4* source = reinterpret_cast<const uint4*>(pointer) + i;
      reinterpret_cast<uint4*>(pack.element)[i] = __ldg(source);
    }
  } else if constexpr (aligned && bytes == 8) {
    const uint2* source = reinterpret_cast<const uint2*>(pointer);
    *reinterpret_cast<uint2*>(pack.element) = __ldg(source);
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) pack.element[i] = pointer[i];
  }
  return pack;
}

template <bool aligned, int width, class Element>
FUSELAB_INLINE void store(Element* pointer, const Pack<Element, width>& pack) {
  constexpr int bytes = width * sizeof(Element);
  if constexpr (aligned && bytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < bytes / 16; ++i) {
      reinterpret_cast<uint4*>(pointer)[i] = reinterpret_cast<const uint4*>(pack.element)[i];
    }
  } else if constexpr (aligned && bytes == 8) {
    *reinterpret_cast<uint2*>(pointer) = *reinterpret_cast<const uint2*>(pack.element);
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) pointer[i] = pack.element[i];
  }
}

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
