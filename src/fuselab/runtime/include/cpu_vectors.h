// Vectors for the CPU kernels, as wide as the machine's registers: loads, stores, conversions.
//
// Vector<float> and Vector<double> fill one register of the instruction set that the compiler was
// told: 64 bytes with AVX-512, 32 with AVX2, 16 with SSE or NEON. Arithmetic is written in GCC's and
// Clang's vector extensions; intrinsics stand only where a compiler finds no instruction by itself.
// float16 and bfloat16 are storage only: arithmetic is in float or double.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// <immintrin.h> declares thousands of instructions, of which these kernels use those of the class that
// they are compiled for. GCC has a header for each extension, which asks for this macro.
#if defined(__x86_64__)
#if defined(__AVX512F__) || defined(__clang__) || !__has_include(<avx2intrin.h>)
#include <immintrin.h>
#elif defined(__AVX2__)
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#undef _IMMINTRIN_H_INCLUDED
#else
#include <emmintrin.h>
#endif
#endif

#define FUSELAB_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int64_t vector_bytes = 64;
#elif defined(__AVX2__)
constexpr int64_t vector_bytes = 32;
#else
constexpr int64_t vector_bytes = 16;
#endif

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// A vector of `count` elements.
template <class Element, int64_t count>
struct LanesOf {
  typedef Element type __attribute__((vector_size(count * sizeof(Element))));
};
template <class Element, int64_t count>
using Lanes = typename LanesOf<Element, count>::type;

template <class Real>
using Vector = Lanes<Real, vector_bytes / int64_t(sizeof(Real))>;
using Floats = Vector<float>;
using Doubles = Vector<double>;

template <class Vec>
using Scalar = std::remove_reference_t<decltype(Vec{}[0])>;
template <class Vec>
constexpr int64_t lanes = sizeof(Vec) / sizeof(Scalar<Vec>);
template <class Vec>
using Integers =
    Lanes<std::conditional_t<sizeof(Scalar<Vec>) == 4, int32_t, int64_t>, lanes<Vec>>;

// The zero is subtracted, not added, so that -0.0 stays -0.0.
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
// Returns the floor of n / 2. AVX2 and SSE have no arithmetic shift of 64-bit integers. A logical
// shift of n + 2^11, which is positive for every exponent of a double, gives the same result.
template <class Ints>
FUSELAB_INLINE Ints half_of(Ints n) {
  if constexpr (sizeof(Scalar<Ints>) == 4 || vector_bytes == 64) {
    return n >> 1;
  } else {
    using Unsigned = Lanes<uint64_t, lanes<Ints>>;
    return (Ints)((Unsigned)(n + 2048) >> 1) - 1024;
  }
}
// GCC contracts a * b + c across statements. An empty asm is the only barrier that keeps the vector
// whole (GCC 12 splits __builtin_assoc_barrier lane by lane).
template <class Vec>
FUSELAB_INLINE Vec opaque(Vec x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}
template <class Vec>
FUSELAB_INLINE Vec square_error(Vec a, Vec square) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return opaque(a) * a - square;  // opaque, or the compiler reuses its product and returns 0
#else
  // Dekker's product (Numerische Mathematik 18, 1971): the upper half of the digits times itself is
  // exact, and so are the products with the lower half.
  const Scalar<Integers<Vec>> upper_half = sizeof(Scalar<Vec>) == 4 ? -(1 << 12) : -(1 << 27);
  const Vec high = from_bits<Vec>(bits_of(a) & upper_half), low = a - high;
  return ((high * high - square) + (high + high) * low) + low * low;
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

// Returns the maximum or minimum of every lane; `first` is kept if either is NaN.
template <class Vec>
FUSELAB_INLINE Vec larger(Vec first, Vec second) {
  return second > first ? second : first;
}
template <class Vec>
FUSELAB_INLINE Vec smaller(Vec first, Vec second) {
  return second < first ? second : first;
}
// Returns `bound` where x is below it (above it), and x elsewhere, NaN included. Compilers take a
// comparison and a select for this, where x86 has one instruction.
FUSELAB_INLINE Floats no_less(Floats x, Floats bound) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)bound, (__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)bound, (__m256)x);
#else
  return x < bound ? bound : x;
#endif
}
FUSELAB_INLINE Doubles no_less(Doubles x, Doubles bound) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_max_pd((__m512d)bound, (__m512d)x);
#elif defined(__AVX2__)
  return (Doubles)_mm256_max_pd((__m256d)bound, (__m256d)x);
#else
  return x < bound ? bound : x;
#endif
}
FUSELAB_INLINE Floats no_more(Floats x, Floats bound) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)bound, (__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)bound, (__m256)x);
#else
  return x > bound ? bound : x;
#endif
}
FUSELAB_INLINE Doubles no_more(Doubles x, Doubles bound) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_min_pd((__m512d)bound, (__m512d)x);
#elif defined(__AVX2__)
  return (Doubles)_mm256_min_pd((__m256d)bound, (__m256d)x);
#else
  return x > bound ? bound : x;
#endif
}

// Reduces a vector to one number by a function of two vectors, combining lanes in pairs.
template <int64_t by, class Vec, std::size_t... lane>
FUSELAB_INLINE Vec rotated(Vec x, std::index_sequence<lane...>) {
  return __builtin_shufflevector(x, x, int((lane + by) % sizeof...(lane))...);
}
template <int64_t by, class Vec, class Combine>
FUSELAB_INLINE Scalar<Vec> reduced(Vec x, Combine combine) {
  if constexpr (by == 0) {
    return x[0];
  } else {
    const Vec other = rotated<by>(x, std::make_index_sequence<lanes<Vec>>{});
    return reduced<by / 2>(combine(x, other), combine);
  }
}
template <class Vec>
FUSELAB_INLINE Scalar<Vec> sum_of(Vec x) {
  return reduced<lanes<Vec> / 2>(x, [](Vec a, Vec b) { return a + b; });
}
template <class Vec>
FUSELAB_INLINE Scalar<Vec> maximum_of(Vec x) {
  return reduced<lanes<Vec> / 2>(x, [](Vec a, Vec b) { return larger(a, b); });
}
template <class Vec>
FUSELAB_INLINE Scalar<Vec> minimum_of(Vec x) {
  return reduced<lanes<Vec> / 2>(x, [](Vec a, Vec b) { return smaller(a, b); });
}
// Transposes a square of vectors: its halves are exchanged across the diagonal, then the halves of
// these, and so on.
template <int64_t half, bool lower, class V, std::size_t... lane>
FUSELAB_INLINE V exchanged(V a, V b, std::index_sequence<lane...>) {
  constexpr int64_t count = sizeof...(lane);
  if constexpr (lower) {
    return __builtin_shufflevector(a, b, int(lane & half ? lane + count : lane + half)...);
  } else {
    return __builtin_shufflevector(a, b, int(lane & half ? lane + count - half : lane)...);
  }
}
template <int64_t half, class V>
FUSELAB_INLINE void transpose(V* square) {
  if constexpr (half > 0) {
    constexpr auto lane = std::make_index_sequence<lanes<V>>{};
#pragma GCC unroll 16
    for (int64_t i = 0; i < lanes<V>; ++i) {
      if (i & half) continue;
      const V a = square[i], b = square[i + half];
      square[i] = exchanged<half, false>(a, b, lane);
      square[i + half] = exchanged<half, true>(a, b, lane);
    }
    transpose<half / 2>(square);
  }
}

// True in the first `count` lanes.
template <class Ints>
FUSELAB_INLINE Ints first_lanes(int64_t count) {
  Ints lane;
  for (int64_t i = 0; i < lanes<Ints>; ++i) lane[i] = i;
  return lane < (Scalar<Ints>)count;
}

// 16-bit numbers and float, lane by lane. Conversions to 16 bits round to nearest, ties to even.

template <int64_t count>
FUSELAB_INLINE Lanes<float, count> widened(Lanes<uint16_t, count> bits, BFloat16) {
  return (Lanes<float, count>)(__builtin_convertvector(bits, Lanes<uint32_t, count>) << 16);
}

template <int64_t count>
FUSELAB_INLINE Lanes<uint16_t, count> narrowed(Lanes<float, count> value, BFloat16) {
  using Words = Lanes<uint32_t, count>;
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words result = value == value ? rounded : Words{} + 0x7fc0u;  // else a carry turns NaN to -0
#if defined(__AVX2__)
  if constexpr (count == 8) {  // GCC 12 takes four instructions more for __builtin_convertvector
    const __m256i packed = _mm256_packus_epi32((__m256i)result, (__m256i)result);
    return (Lanes<uint16_t, count>)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
#endif
  return __builtin_convertvector(result, Lanes<uint16_t, count>);
}

// Converts float16 by integers, after the layout of IEEE 754, for machines without an instruction
// for it. A subnormal number is made normal by adding and subtracting a power of two.
template <int64_t count>
FUSELAB_INLINE Lanes<float, count> widened(Lanes<uint16_t, count> bits, Half) {
#if defined(__AVX512F__)
  if constexpr (count == 16) return (Lanes<float, count>)_mm512_cvtph_ps((__m256i)bits);
#endif
#if defined(__F16C__)
  if constexpr (count == 8) return (Lanes<float, count>)_mm256_cvtph_ps((__m128i)bits);
#endif
#if defined(__aarch64__)
  return __builtin_convertvector((Lanes<__fp16, count>)bits, Lanes<float, count>);
#else
  using Words = Lanes<uint32_t, count>;
  using Reals = Lanes<float, count>;
  const Words wide = __builtin_convertvector(bits, Words);
  const Words magnitude = (wide & 0x7fffu) << 13, exponent = magnitude & 0x0f800000u;
  const Words normal = magnitude + (112u << 23);
  const Words infinite = normal + (112u << 23);
  const Reals subnormal = (Reals)(magnitude + (113u << 23)) - (Reals)(Words{} + (113u << 23));
  const Words finite = exponent == 0u ? (Words)subnormal : normal;
  return (Reals)((exponent == 0x0f800000u ? infinite : finite) | ((wide & 0x8000u) << 16));
#endif
}

template <int64_t count>
FUSELAB_INLINE Lanes<uint16_t, count> narrowed(Lanes<float, count> value, Half) {
  using Shorts = Lanes<uint16_t, count>;
#if defined(__AVX512F__)
  if constexpr (count == 16) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return (Shorts)_mm512_cvtps_ph((__m512)value, nearest);
  }
#endif
#if defined(__F16C__)
  if constexpr (count == 8) {
    return (Shorts)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  }
#endif
#if defined(__aarch64__)
  return (Shorts)__builtin_convertvector(value, Lanes<__fp16, count>);
#else
  using Words = Lanes<uint32_t, count>;
  using Reals = Lanes<float, count>;
  const Words bits = (Words)value, magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Words half = Words{} + (126u << 23);  // 0.5: its last bit is float16's smallest number
  const Words subnormal = (Words)((Reals)magnitude + (Reals)half) - half;
  const Words special = magnitude > 0x7f800000u ? Words{} + 0x7e00u : Words{} + 0x7c00u;
  const Words finite = magnitude < (113u << 23) ? subnormal : normal;
  const Words result = magnitude >= (143u << 23) ? special : finite;
  return __builtin_convertvector(result | ((bits >> 16) & 0x8000u), Shorts);
#endif
}

// Unaligned loads of one vector of lanes, converted to the arithmetic type.

template <class Vec>
FUSELAB_INLINE Vec load_as(const void* pointer) {
  Vec value;
  std::memcpy(&value, pointer, sizeof value);
  return value;
}

template <class Vec, class Element>
FUSELAB_INLINE Vec load(const Element* pointer) {
  if constexpr (std::is_same_v<Element, Scalar<Vec>>) {
    return load_as<Vec>(pointer);
  } else if constexpr (std::is_same_v<Element, float>) {
    return __builtin_convertvector(load_as<Lanes<float, lanes<Vec>>>(pointer), Vec);
  } else {
    static_assert(sizeof(Element) == 2, "a double operand makes the arithmetic double");
    const auto wide =
        widened<lanes<Vec>>(load_as<Lanes<uint16_t, lanes<Vec>>>(pointer), Element{});
    return __builtin_convertvector(wide, Vec);
  }
}

// Stores. A streaming store writes past the caches and needs an address that is a multiple of the
// vector's size.

template <bool stream, class Value>
FUSELAB_INLINE void store_whole(void* pointer, Value value) {
  if constexpr (stream) {
#if defined(__AVX512F__)
    if constexpr (sizeof(Value) == 64) {
      return _mm512_stream_si512(static_cast<__m512i*>(pointer), (__m512i)value);
    }
#endif
#if defined(__AVX__)
    if constexpr (sizeof(Value) == 32) {
      return _mm256_stream_si256(static_cast<__m256i*>(pointer), (__m256i)value);
    }
#endif
#if defined(__x86_64__)
    if constexpr (sizeof(Value) == 16) {
      return _mm_stream_si128(static_cast<__m128i*>(pointer), (__m128i)value);
    }
#endif
  }
  std::memcpy(pointer, &value, sizeof value);
}

// Rounding a double twice (to float, then to 16 bits) errs on one value in 2^29.
template <bool stream, class Vec, class Element>
FUSELAB_INLINE void store(Element* pointer, Vec value) {
  if constexpr (std::is_same_v<Element, Scalar<Vec>>) {
    store_whole<stream>(pointer, value);
  } else {
    const auto single = __builtin_convertvector(value, Lanes<float, lanes<Vec>>);
    if constexpr (std::is_same_v<Element, float>) {
      store_whole<stream>(pointer, single);
    } else {
      store_whole<stream>(pointer, narrowed<lanes<Vec>>(single, Element{}));
    }
  }
}

// The lanes of a vector that take part: all, or the first `count`. Others are not touched.
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
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Element, float> && lanes<Vec> == 16) {
    if (part.count == 8) return (Vec)_mm512_zextps256_ps512(_mm256_loadu_ps(pointer));
    return (Vec)_mm512_maskz_loadu_ps((1u << part.count) - 1, pointer);
  }
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(Element) == 2 && lanes<Vec> == 16) {
    const __m256i bits = _mm256_maskz_loadu_epi16((1u << part.count) - 1, pointer);
    return widened<16>((Lanes<uint16_t, 16>)bits, Element{});
  }
#endif
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<Element, float> && lanes<Vec> == 8) {
    const auto mask = first_lanes<Lanes<int32_t, 8>>(part.count);
    return (Vec)_mm256_maskload_ps(pointer, (__m256i)mask);
  }
#endif
  Element lane[lanes<Vec>] = {};
  for (int64_t i = 0; i < part.count; ++i) lane[i] = pointer[i];
  return load<Vec>(lane);
}

#if defined(__AVX2__)
// Loads the lanes where a mask is true from `places` behind a pointer. Others are 0, and nothing is read
// for them.
FUSELAB_INLINE Floats gather_where(const float* pointer, Integers<Floats> places,
                                   Integers<Floats> mask) {
#if defined(__AVX512F__)
  const __m512i bits = (__m512i)mask;
  const __mmask16 taken = _mm512_test_epi32_mask(bits, bits);
  return (Floats)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), taken, (__m512i)places, pointer, 4);
#else
  const __m256 taken = (__m256)mask;
  return (Floats)_mm256_mask_i32gather_ps(_mm256_setzero_ps(), pointer, (__m256i)places, taken, 4);
#endif
}
#endif

template <bool stream, class Vec, class Element>
FUSELAB_INLINE void store(Element* pointer, Vec value, Whole) {
  store<stream>(pointer, value);
}
template <bool stream, class Vec, class Element>
FUSELAB_INLINE void store(Element* pointer, Vec value, First part) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Element, float> && lanes<Vec> == 16) {
    if (part.count == 8) return _mm256_storeu_ps(pointer, _mm512_castps512_ps256((__m512)value));
    return _mm512_mask_storeu_ps(pointer, (1u << part.count) - 1, (__m512)value);
  }
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(Element) == 2 && lanes<Vec> == 16) {
    const auto bits = (__m256i)narrowed<16>(value, Element{});
    return _mm256_mask_storeu_epi16(pointer, (1u << part.count) - 1, bits);
  }
#endif
#elif defined(__AVX2__)
  // A masked store takes AMD's processors a hundred cycles and more.
  if constexpr (std::is_same_v<Element, float> && lanes<Vec> == 8) {
    if (part.count == 8) return store<false>(pointer, value);
    __m128 rest = _mm256_castps256_ps128((__m256)value);
    if (part.count & 4) {
      _mm_storeu_ps(pointer, rest);
      rest = _mm256_extractf128_ps((__m256)value, 1), pointer += 4;
    }
    if (part.count & 2) {
      _mm_storel_pi(reinterpret_cast<__m64*>(pointer), rest);
      rest = _mm_movehl_ps(rest, rest), pointer += 2;
    }
    if (part.count & 1) _mm_store_ss(pointer, rest);
    return;
  }
#endif
  Element lane[lanes<Vec>];
  store<false>(lane, value);
  for (int64_t i = 0; i < part.count; ++i) pointer[i] = lane[i];
}

// Adds values[lane] to sums[lane] for all lanes, including those that take no part, for which the
// caller has room.
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
