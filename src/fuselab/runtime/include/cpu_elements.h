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
  transpose<lanes<V> / 2>(square);
  const int64_t whole = rows_in_whole_vectors<V>(stride, rows, columns);
  for (int64_t row = 0; row < whole; ++row)
    store_whole<false>(to + row * stride, stored<V, Element>(square[row]));
  for (int64_t row = whole; row < rows; ++row)
    store_first<V, Element>(to + row * stride, square[row], columns);
}
