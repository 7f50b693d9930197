// Vectors of a tensor's elements as kernels compute with them: from neighbours in memory, from elements
// some steps apart, and from short rows, which are transposed on the way.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu_math.h"

template <class Element>
constexpr bool is_short = std::is_same_v<Element, Half> || std::is_same_v<Element, BFloat16>;
// A vector has bytes in place of bool, and bits in place of 16-bit numbers.
template <class Element>
using Stored = std::conditional_t<
    std::is_same_v<Element, bool>, uint8_t,
    std::conditional_t<is_short<Element>, uint16_t, std::remove_const_t<Element>>>;
template <class V, class Element>
using StoredLanes = Lanes<Stored<Element>, lanes<V>>;

// Returns elements as a kernel computes with them: real numbers, 64-bit integers, or a mask.
template <class V, class Element>
FUSELAB_INLINE auto computed(StoredLanes<V, Element> value) {
  if constexpr (is_short<Element>) {
    return __builtin_convertvector(widened<lanes<V>>(value, Element{}), V);
  } else if constexpr (std::is_floating_point_v<Element>) {
    return __builtin_convertvector(value, V);
  } else if constexpr (std::is_same_v<Element, bool>) {
    return __builtin_convertvector(value != 0, Integers<V>);
  } else {
    return __builtin_convertvector(value, LongIntegers<V>);
  }
}
template <class V, class Element, class Value>
FUSELAB_INLINE StoredLanes<V, Element> stored(Value value) {
  if constexpr (is_short<Element>) {
    return narrowed<lanes<V>>(__builtin_convertvector(value, Lanes<float, lanes<V>>), Element{});
  } else if constexpr (std::is_same_v<Element, bool>) {
    return (StoredLanes<V, Element>)(__builtin_convertvector(value != 0, Lanes<int8_t, lanes<V>>) &
                                     1);
  } else {
    return __builtin_convertvector(value, StoredLanes<V, Element>);
  }
}

template <class V, class Element, std::size_t... lane>
FUSELAB_INLINE StoredLanes<V, Element> gathered(const Stored<Element>* from, int64_t stride,
                                                std::index_sequence<lane...>) {
  return StoredLanes<V, Element>{from[int64_t(lane) * stride]...};
}

// The lanes of a vector from the last to the first.
template <class Elements, std::size_t... lane>
FUSELAB_INLINE Elements backwards(Elements value, std::index_sequence<lane...>) {
  return __builtin_shufflevector(value, value, int(sizeof...(lane) - 1 - lane)...);
}

// Loads every second element from two vectors, of which the second one begins with the last element
// that the first one has: nothing behind the last element is read.
template <class Elements, std::size_t... lane>
FUSELAB_INLINE Elements every_second(const Scalar<Elements>* from, std::index_sequence<lane...>) {
  constexpr int64_t count = sizeof...(lane);
  const Elements low = load_as<Elements>(from), high = load_as<Elements>(from + count - 1);
  return __builtin_shufflevector(low, high, int(lane < count / 2 ? 2 * lane : 2 * lane + 1)...);
}
// Stores to every second element, and touches no other.
#if defined(__AVX2__)
template <bool is_high, class Elements, std::size_t... lane>
FUSELAB_INLINE void store_half_of_second(float* to, Elements value, std::index_sequence<lane...>) {
  constexpr int first = is_high ? sizeof...(lane) / 2 : 0;
  const Elements twice = __builtin_shufflevector(value, value, int(first + lane / 2)...);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, 0x5555, (__m512)twice);
#else
  _mm256_maskstore_ps(to, (__m256i)Lanes<int32_t, 8>{-1, 0, -1, 0, -1, 0, -1, 0}, (__m256)twice);
#endif
}
#endif

// Loads the first `count` lanes; the others are 0.
template <class V, class Element>
FUSELAB_INLINE StoredLanes<V, Element> load_lanes(const Stored<Element>* from, int64_t stride,
                                                  int64_t count) {
  if (count == lanes<V>) {
    if (stride == 1) return load_as<StoredLanes<V, Element>>(from);
    if constexpr (sizeof(StoredLanes<V, Element>) <= vector_bytes) {
      constexpr auto lane = std::make_index_sequence<lanes<V>>{};
      if (stride == -1)
        return backwards(load_as<StoredLanes<V, Element>>(from - (lanes<V> - 1)), lane);
      if (stride == 2) return every_second<StoredLanes<V, Element>>(from, lane);
    }
    return gathered<V, Element>(from, stride, std::make_index_sequence<lanes<V>>{});
  }
  Stored<Element> lane[lanes<V>] = {};
  for (int64_t i = 0; i < count; ++i) lane[i] = from[i * stride];
  return load_as<StoredLanes<V, Element>>(lane);
}
template <class V, class Element>
FUSELAB_INLINE void store_lanes(Stored<Element>* to, StoredLanes<V, Element> value, int64_t stride,
                                int64_t count) {
  if (stride == 1 && count == lanes<V>) {
    std::memcpy(to, &value, sizeof value);
    return;
  }
#if defined(__AVX2__)
  if constexpr (std::is_same_v<Element, float> && sizeof value == vector_bytes) {
    if (stride == 2 && count == lanes<V>) {
      constexpr auto each = std::make_index_sequence<lanes<V>>{};
      store_half_of_second<false>(to, value, each);
      return store_half_of_second<true>(to + lanes<V>, value, each);
    }
  }
#endif
  Stored<Element> lane[lanes<V>];
  std::memcpy(lane, &value, sizeof value);
  for (int64_t i = 0; i < count; ++i) to[i * stride] = lane[i];
}

// Whether cpu_vectors.h loads and stores a part of a vector of these elements by a mask.
template <class V, class Element>
constexpr bool has_masked_tail =
    sizeof(Scalar<V>) == 4 && (std::is_same_v<Element, float> || is_short<Element>);

// --- short rows -----------------------------------------------------------------------------------

// Every second element of two vectors, from `first` on; and the elements of two vectors in turn, of
// which this is one half.
template <int64_t first, class V, std::size_t... lane>
FUSELAB_INLINE V alternate(V a, V b, std::index_sequence<lane...>) {
  return __builtin_shufflevector(a, b, int(2 * lane + first)...);
}
template <int64_t half, class V, std::size_t... lane>
FUSELAB_INLINE V interleaved(V a, V b, std::index_sequence<lane...>) {
  constexpr int64_t count = sizeof...(lane), first = half * count / 2;
  return __builtin_shufflevector(a, b, int(first + lane / 2 + lane % 2 * count)...);
}

// Makes columns of `columns` vectors (a power of two) in which rows of so many elements lie one after
// the other, and the reverse.
template <int64_t columns, class V>
FUSELAB_INLINE void split_rows(V* square) {
  constexpr auto lane = std::make_index_sequence<lanes<V>>{};
  for (int64_t stage = 1; stage < columns; stage *= 2) {
    V next[columns];
    for (int64_t i = 0; i < columns / 2; ++i) {
      next[i] = alternate<0>(square[2 * i], square[2 * i + 1], lane);
      next[i + columns / 2] = alternate<1>(square[2 * i], square[2 * i + 1], lane);
    }
    for (int64_t i = 0; i < columns; ++i) square[i] = next[i];
  }
}
template <int64_t columns, class V>
FUSELAB_INLINE void join_rows(V* square) {
  constexpr auto lane = std::make_index_sequence<lanes<V>>{};
  for (int64_t stage = 1; stage < columns; stage *= 2) {
    V next[columns];
    for (int64_t i = 0; i < columns / 2; ++i) {
      next[2 * i] = interleaved<0>(square[i], square[i + columns / 2], lane);
      next[2 * i + 1] = interleaved<1>(square[i], square[i + columns / 2], lane);
    }
    for (int64_t i = 0; i < columns; ++i) square[i] = next[i];
  }
}

// Calls body(columns) with the number as a constant and returns true, if it is a small power of two
// below that of the lanes.
template <class V, class Body>
FUSELAB_INLINE bool with_power_of_two(int64_t columns, Body body) {
  if constexpr (lanes<V> > 2)
    if (columns == 2) return body(std::integral_constant<int64_t, 2>{}), true;
  if constexpr (lanes<V> > 4)
    if (columns == 4) return body(std::integral_constant<int64_t, 4>{}), true;
  if constexpr (lanes<V> > 8)
    if (columns == 8) return body(std::integral_constant<int64_t, 8>{}), true;
  return false;
}

// How many of a vector's rows, which are shorter and lie one after the other, can be read and written
// with what is behind them as whole vectors that end in the last row.
template <class V>
FUSELAB_INLINE int64_t rows_in_whole_vectors(int64_t stride, int64_t rows, int64_t columns) {
  if (columns == lanes<V>) return rows;
  const int64_t spare = rows * columns - lanes<V>;
  return stride != columns || spare < 0 ? 0 : smaller(rows, spare / columns + 1);
}

template <class V, class Element>
FUSELAB_INLINE V load_first(const Stored<Element>* from, int64_t count) {
  if constexpr (has_masked_tail<V, Element>) {
    return load<V>(reinterpret_cast<const Element*>(from), First{count});
  } else {
    return computed<V, Element>(load_lanes<V, Element>(from, 1, count));
  }
}
template <class V, class Element>
FUSELAB_INLINE void store_first(Stored<Element>* to, V value, int64_t count) {
  if constexpr (has_masked_tail<V, Element>) {
    store<false>(reinterpret_cast<Element*>(to), value, First{count});
  } else {
    store_lanes<V, Element>(to, stored<V, Element>(value), 1, count);
  }
}

// Loads `rows` rows of `columns` neighbouring elements, at most a vector of each, as columns.
template <class V, class Element>
__attribute__((noinline)) void load_transposed(V* square, const Stored<Element>* from,
                                               int64_t stride, int64_t rows, int64_t columns) {
  using Elements = StoredLanes<V, Element>;
  if (rows == lanes<V> && stride == columns) {
    const auto load_split = [&](auto count) {
      for (int64_t i = 0; i < count; ++i)
        square[i] = computed<V, Element>(load_as<Elements>(from + i * lanes<V>));
      split_rows<count.value>(square);
    };
    if (with_power_of_two<V>(columns, load_split)) return;
  }
  const int64_t whole = rows_in_whole_vectors<V>(stride, rows, columns);
  if (whole == lanes<V>) {  // a number of rows that is known leaves them in registers
    V row_of[lanes<V>];
#pragma GCC unroll 16
    for (int64_t row = 0; row < lanes<V>; ++row)
      row_of[row] = computed<V, Element>(load_as<Elements>(from + row * stride));
    transpose<lanes<V> / 2>(row_of);
#pragma GCC unroll 16
    for (int64_t column = 0; column < lanes<V>; ++column) square[column] = row_of[column];
    return;
  }
  for (int64_t row = 0; row < whole; ++row)
    square[row] = computed<V, Element>(load_as<Elements>(from + row * stride));
  for (int64_t row = whole; row < rows; ++row)
    square[row] = load_first<V, Element>(from + row * stride, columns);
  transpose<lanes<V> / 2>(square);
}
// Stores `columns` columns of `rows` elements as rows.
template <class V, class Element>
__attribute__((noinline)) void store_transposed(V* square, Stored<Element>* to, int64_t stride,
                                                int64_t rows, int64_t columns) {
  if (rows == lanes<V> && stride == columns) {
    const auto store_joined = [&](auto count) {
      join_rows<count.value>(square);
      for (int64_t i = 0; i < count; ++i)
        store_whole<false>(to + i * lanes<V>, stored<V, Element>(square[i]));
    };
    if (with_power_of_two<V>(columns, store_joined)) return;
  }
  const int64_t whole = rows_in_whole_vectors<V>(stride, rows, columns);
  if (whole == lanes<V>) {
    V row_of[lanes<V>];
#pragma GCC unroll 16
    for (int64_t column = 0; column < lanes<V>; ++column) row_of[column] = square[column];
    transpose<lanes<V> / 2>(row_of);
#pragma GCC unroll 16
    for (int64_t row = 0; row < lanes<V>; ++row)
      store_whole<false>(to + row * stride, stored<V, Element>(row_of[row]));
    return;
  }
  transpose<lanes<V> / 2>(square);
  for (int64_t row = 0; row < whole; ++row)
    store_whole<false>(to + row * stride, stored<V, Element>(square[row]));
  for (int64_t row = whole; row < rows; ++row)
    store_first<V, Element>(to + row * stride, square[row], columns);
}

// --- elements at places of their own --------------------------------------------------------------

// Loads the elements from `first` on in the lanes where a mask is true. Others are 0, and nothing is
// read for them.
template <class V, class Element>
constexpr bool has_masked_load =
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    sizeof(StoredLanes<V, Element>) == 64 || (lanes<V> == 16 && sizeof(Stored<Element>) == 2);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    sizeof(StoredLanes<V, Element>) == 32 && sizeof(Stored<Element>) >= 4;
#else
    false;
#endif
#if defined(__AVX2__)
template <class V, class Element>
FUSELAB_INLINE StoredLanes<V, Element> load_where(const Stored<Element>* first, Integers<V> mask) {
  using Elements = StoredLanes<V, Element>;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (lanes<V> == 8) {
    return (Elements)_mm512_maskz_loadu_epi64(_mm512_movepi64_mask((__m512i)mask), first);
  } else {
    const __mmask16 taken = _mm512_movepi32_mask((__m512i)mask);
    if constexpr (sizeof(Stored<Element>) == 2) {
      return (Elements)_mm256_maskz_loadu_epi16(taken, first);
    } else {
      return (Elements)_mm512_maskz_loadu_epi32(taken, first);
    }
  }
#elif !defined(__AVX512F__)
  if constexpr (lanes<V> == 4) {
    return (Elements)_mm256_maskload_epi64((const long long*)first, (__m256i)mask);
  } else {
    return (Elements)_mm256_maskload_epi32((const int*)first, (__m256i)mask);
  }
#endif
}
#endif

// Loads every second element in the lanes where a mask is true, from the two vectors that they are
// spread over. Others are 0, and nothing is read for them.
template <int64_t first, class Ints, std::size_t... lane>
FUSELAB_INLINE Ints spread_mask(Ints mask, std::index_sequence<lane...>) {
  return __builtin_shufflevector(mask, Ints{},
                                 int(lane % 2 == 0 ? first + lane / 2 : sizeof...(lane))...);
}
template <class V, class Element>
FUSELAB_INLINE StoredLanes<V, Element> load_second_where(const Stored<Element>* first,
                                                         Integers<V> mask) {
  constexpr auto lane = std::make_index_sequence<lanes<V>>{};
  constexpr int64_t half = lanes<V> / 2;
  const auto low = load_where<V, Element>(first, spread_mask<0>(mask, lane));
  const auto high = load_where<V, Element>(first + lanes<V>, spread_mask<half>(mask, lane));
  return alternate<0>(low, high, lane);
}

// Whether elements as wide as the lanes are gathered by vector instructions.
template <class V>
constexpr bool has_gathers =
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    true;
#elif defined(__AVX2__) && !defined(__AVX512F__)
    lanes<V> == 8;
#else
    false;
#endif
// Loads the element at each lane's place behind `first` where a mask is true. Others are 0, and nothing
// is read for them. Places that lie within a vector, as those of windows that share an element do, are
// read as one vector and distributed.
template <class V, class Element>
FUSELAB_INLINE StoredLanes<V, Element> gathered_where(const Stored<Element>* first,
                                                      Integers<V> places, Integers<V> mask) {
  using Elements = StoredLanes<V, Element>;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (lanes<V> == 16 && has_masked_load<V, Element>) {
    const __mmask16 taken = _mm512_movepi32_mask((__m512i)mask);
    if (taken == 0) return Elements{};
    const int64_t least = places[__builtin_ctz(taken)];
    const __m512i beyond = (__m512i)(places - int(least));
    if (_mm512_mask_cmpge_epu32_mask(taken, beyond, _mm512_set1_epi32(16)) == 0) {
      const auto read = __mmask16((2u << _mm512_mask_reduce_max_epu32(taken, beyond)) - 1);
      if constexpr (sizeof(Stored<Element>) == 2) {
        const __m256i line = _mm256_maskz_loadu_epi16(read, first + least);
        return (Elements)_mm256_maskz_permutexvar_epi16(taken, _mm512_cvtepi32_epi16(beyond), line);
      } else {
        const __m512i line = _mm512_maskz_loadu_epi32(read, first + least);
        return (Elements)_mm512_maskz_permutexvar_epi32(taken, beyond, line);
      }
    }
    if constexpr (sizeof(Stored<Element>) == 4)
      return (Elements)_mm512_mask_i32gather_epi32(__m512i{}, taken, (__m512i)places, first, 4);
  }
  if constexpr (lanes<V> == 8 && has_masked_load<V, Element>) {
    const __mmask8 taken = _mm512_movepi64_mask((__m512i)mask);
    if (taken == 0) return Elements{};
    const int64_t least = places[__builtin_ctz(taken)];
    const __m512i beyond = (__m512i)(places - least);
    if (_mm512_mask_cmpge_epu64_mask(taken, beyond, _mm512_set1_epi64(8)) == 0) {
      const auto read = __mmask8((2u << _mm512_mask_reduce_max_epu64(taken, beyond)) - 1);
      const __m512i line = _mm512_maskz_loadu_epi64(read, first + least);
      return (Elements)_mm512_maskz_permutexvar_epi64(taken, beyond, line);
    }
    return (Elements)_mm512_mask_i64gather_epi64(__m512i{}, taken, (__m512i)places, first, 8);
  }
#elif defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (lanes<V> == 8 && has_masked_load<V, Element>) {
    const int taken = _mm256_movemask_ps((__m256)mask);
    if (taken == 0) return Elements{};
    const int64_t least = places[__builtin_ctz(taken)];
    const Integers<V> beyond = mask & (places - int(least));
    if (_mm256_movemask_ps((__m256)((beyond < 0) | (beyond > 7))) == 0) {
      const auto read = first_lanes<Integers<V>>(maximum_of(beyond) + 1);
      const auto line = (__m256i)load_where<V, Element>(first + least, read);
      const __m256i found = _mm256_permutevar8x32_epi32(line, (__m256i)beyond);
      return (Elements)_mm256_and_si256(found, (__m256i)mask);
    }
    return (Elements)_mm256_mask_i32gather_epi32(__m256i{}, (const int*)first, (__m256i)places,
                                                 (__m256i)mask, 4);
  }
#endif
  Stored<Element> found[lanes<V>] = {};
  for (int64_t i = 0; i < lanes<V>; ++i)
    if (mask[i]) found[i] = first[places[i]];
  return load_as<Elements>(found);
}
