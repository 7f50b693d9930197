// 64-byte vectors for the CPU kernels of pointwise operators: loads, stores and conversions.
//
// Vector<float> has 16 lanes, Vector<double> 8; GCC and Clang map them to AVX-512, AVX, SSE or NEON.
// float16 and bfloat16 are storage only: arithmetic is in float or double.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FUSELAB_INLINE inline __attribute__((always_inline))

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

typedef float Floats __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int32_t Int32s __attribute__((vector_size(64)));
typedef int64_t Int64s __attribute__((vector_size(64)));
typedef uint32_t UInt32s __attribute__((vector_size(64)));
typedef float EightFloats __attribute__((vector_size(32)));
typedef uint16_t SixteenHalves __attribute__((vector_size(32)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));
typedef uint32_t EightWords __attribute__((vector_size(32)));

template <class Real>
struct VectorOf;
template <>
struct VectorOf<float> {
  using type = Floats;
  using integers = Int32s;
};
template <>
struct VectorOf<double> {
  using type = Doubles;
  using integers = Int64s;
};

template <class Real>
using Vector = typename VectorOf<Real>::type;
template <class Vec>
using Scalar = std::remove_reference_t<decltype(Vec{}[0])>;
template <class Vec>
using Integers = typename VectorOf<Scalar<Vec>>::integers;
template <class Vec>
constexpr int64_t lanes = sizeof(Vec) / sizeof(Scalar<Vec>);

// Minus a zero, not plus: -0.0 must stay -0.0.
template <class Vec>
FUSELAB_INLINE Vec constant(double value) {
  return static_cast<Scalar<Vec>>(value) - Vec{};
}
template <class Vec>
FUSELAB_INLINE Integers<Vec> bits_of(Vec x) {
  return (Integers<Vec>)x;
}
template <class Vec>
FUSELAB_INLINE Vec from_bits(Integers<Vec> bits) {
  return (Vec)bits;
}
template <class Vec>
FUSELAB_INLINE Vec choose(Integers<Vec> condition, Vec a, Vec b) {
  return condition ? a : b;
}
template <class Vec>
FUSELAB_INLINE Vec quotient(Vec a, Vec b) {
  return a / b;
}
// GCC contracts a * b + c over statements; an empty asm is the one barrier that keeps the vector
// whole (__builtin_assoc_barrier takes it apart lane by lane in GCC 12).
template <class Vec>
FUSELAB_INLINE Vec opaque(Vec x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}
template <class Vec>
FUSELAB_INLINE Vec square_error(Vec a, Vec square) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return opaque(a) * a - square;  // not the product that the compiler has already, for 0
#else
  return Vec{};
#endif
}

#if defined(__AVX512F__)
FUSELAB_INLINE Floats scaled(Floats x, Floats n) {
  return (Floats)_mm512_scalef_ps((__m512)x, (__m512)n);
}
FUSELAB_INLINE Doubles scaled(Doubles x, Doubles n) {
  return (Doubles)_mm512_scalef_pd((__m512d)x, (__m512d)n);
}
#endif

// Unaligned loads of one vector of lanes, converted to the arithmetic type.

template <class Vec>
FUSELAB_INLINE Vec load_as(const void* pointer) {
  Vec value;
  std::memcpy(&value, pointer, sizeof value);
  return value;
}

FUSELAB_INLINE float to_float(Half value) {
  _Float16 half;
  std::memcpy(&half, &value, sizeof half);
  return static_cast<float>(half);
}

template <class Vec>
FUSELAB_INLINE Vec load(const float* pointer) {
  if constexpr (lanes<Vec> == 16) {
    return load_as<Vec>(pointer);
  } else {
    return __builtin_convertvector(load_as<EightFloats>(pointer), Vec);
  }
}

template <class Vec>
FUSELAB_INLINE Vec load(const double* pointer) {
  static_assert(lanes<Vec> == 8, "a double operand makes the arithmetic double");
  return load_as<Vec>(pointer);
}

template <class Vec>
FUSELAB_INLINE Vec load(const BFloat16* pointer) {
  if constexpr (lanes<Vec> == 16) {
    return (Vec)(__builtin_convertvector(load_as<SixteenHalves>(pointer), UInt32s) << 16);
  } else {
    const auto words = __builtin_convertvector(load_as<EightHalves>(pointer), EightWords) << 16;
    return __builtin_convertvector((EightFloats)words, Vec);
  }
}

template <class Vec>
FUSELAB_INLINE Vec load(const Half* pointer) {
  if constexpr (lanes<Vec> == 16) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(load_as<__m256i>(pointer));
#else
    Vec value;
    for (int lane = 0; lane < 16; ++lane) value[lane] = to_float(pointer[lane]);
    return value;
#endif
  } else {
#if defined(__F16C__)
    return __builtin_convertvector((EightFloats)_mm256_cvtph_ps(load_as<__m128i>(pointer)), Vec);
#else
    Vec value;
    for (int lane = 0; lane < 8; ++lane) value[lane] = to_float(pointer[lane]);
    return value;
#endif
  }
}

// Stores round to nearest, ties to even. A streaming store writes past the caches and needs an
// address that is a multiple of the vector's size.

template <bool stream, class Value>
FUSELAB_INLINE void store_whole(void* pointer, Value value) {
#if defined(__AVX512F__)
  if constexpr (stream && sizeof(Value) == 64) {
    _mm512_stream_si512(static_cast<__m512i*>(pointer), (__m512i)value);
    return;
  }
  if constexpr (stream && sizeof(Value) == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(pointer), (__m256i)value);
    return;
  }
#endif
  std::memcpy(pointer, &value, sizeof value);
}

template <bool stream, class Vec>
FUSELAB_INLINE void store(float* pointer, Vec value) {
  if constexpr (lanes<Vec> == 16) {
    store_whole<stream>(pointer, value);
  } else {
    store_whole<stream>(pointer, __builtin_convertvector(value, EightFloats));
  }
}

template <bool stream, class Vec>
FUSELAB_INLINE void store(double* pointer, Vec value) {
  store_whole<stream>(pointer, value);
}

template <bool stream, class Vec>
FUSELAB_INLINE void store(BFloat16* pointer, Vec value) {
  if constexpr (lanes<Vec> == 16) {
    const UInt32s bits = (UInt32s)value;
    const UInt32s rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const UInt32s quiet_nan = UInt32s{} + 0x7fc0u;
    const UInt32s result = (UInt32s)(value != value) ? quiet_nan : rounded;
    store_whole<stream>(pointer, __builtin_convertvector(result, SixteenHalves));
  } else {
    // Rounding a double twice (to float, then to bfloat16) errs on one value in 2^29.
    for (int lane = 0; lane < 8; ++lane) {
      const float single = static_cast<float>(value[lane]);
      uint32_t bits;
      std::memcpy(&bits, &single, sizeof bits);
      bits = single != single ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      pointer[lane].bits = static_cast<uint16_t>(bits);
    }
  }
}

template <bool stream, class Vec>
FUSELAB_INLINE void store(Half* pointer, Vec value) {
#if defined(__AVX512F__)
  if constexpr (lanes<Vec> == 16) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    store_whole<stream>(pointer, _mm512_cvtps_ph((__m512)value, nearest));
    return;
  }
#endif
  for (int lane = 0; lane < lanes<Vec>; ++lane) {
    const _Float16 half = static_cast<_Float16>(value[lane]);
    std::memcpy(pointer + lane, &half, sizeof half);
  }
}

// Which lanes of a vector take part: all, or the first `count`; nothing past them is touched.
struct Whole {};
struct First {
  int64_t count;
};

template <class Vec, class Element>
FUSELAB_INLINE Vec load(const Element* pointer, Whole) {
  return load<Vec>(pointer);
}
template <class Vec, class Element>
FUSELAB_INLINE Vec load(const Element* pointer, First part) {
  Element lane[lanes<Vec>] = {};
  std::memcpy(lane, pointer, part.count * sizeof(Element));
  return load<Vec>(lane);
}

template <bool stream, class Vec, class Element>
FUSELAB_INLINE void store(Element* pointer, Vec value, Whole) {
  store<stream>(pointer, value);
}
template <bool stream, class Vec, class Element>
FUSELAB_INLINE void store(Element* pointer, Vec value, First part) {
  Element lane[lanes<Vec>];
  store<false>(lane, value);
  std::memcpy(pointer, lane, part.count * sizeof(Element));
}

// sums[lane] += values[lane] for all lanes, also those that take no part: the caller has room.
FUSELAB_INLINE void accumulate(double* sums, Doubles values) {
  store<false>(sums, load<Doubles>(sums) + values);
}
FUSELAB_INLINE void accumulate(double* sums, Floats values) {
  float lane[lanes<Floats>];
  std::memcpy(lane, &values, sizeof lane);
  accumulate(sums, load<Doubles>(lane));
  accumulate(sums + lanes<Doubles>, load<Doubles>(lane + lanes<Doubles>));
}

// Calls body(index, part) for every vector of a run of `count` elements.
template <class Vec, class Body>
FUSELAB_INLINE void for_each_vector(int64_t count, Body body) {
  int64_t index = 0;
  for (; index + lanes<Vec> <= count; index += lanes<Vec>) body(index, Whole{});
  if (index < count) body(index, First{count - index});
}

// Makes streaming stores visible to the threads that read next.
FUSELAB_INLINE void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}
