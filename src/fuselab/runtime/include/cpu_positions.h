// Integers that grow regularly from lane to lane, as positions along an axis do.
//
// A Stepped number is two scalars, the first lane's and the step, and so are sums of such numbers and
// products with a number that is the same in all lanes: arithmetic on positions takes no vector. Their
// comparison gives a mask, computed in lanes as wide as the real numbers' where the difference allows
// it. Everything else takes a vector of 64-bit integers, which `integers` makes of them.
#pragma once

#include "cpu_math.h"

namespace math {

template <class V, std::size_t... lane>
FUSELAB_INLINE LongIntegers<V> counted_lanes(int64_t first, std::index_sequence<lane...>) {
  using Half = Lanes<int64_t, lanes<V> / 2>;
  constexpr int64_t half = lanes<V> / 2;
  const Half index = Half{int64_t(lane)...};
  const Half part[2] = {index + first, index + (first + half)};
  return load_as<LongIntegers<V>>(part);
}

template <class V>
struct Stepped {
  int64_t first, step;

  FUSELAB_INLINE Stepped(int64_t number, int64_t growth = 0) : first(number), step(growth) {}

  FUSELAB_INLINE LongIntegers<V> vector() const {
    constexpr auto half = std::make_index_sequence<lanes<V> / 2>{};
    if (step == 1) return counted_lanes<V>(first, half);
    return splat<LongIntegers<V>>(first) + counted_lanes<V>(0, half) * step;
  }

  friend FUSELAB_INLINE Stepped operator-(Stepped a) { return {-a.first, -a.step}; }
  friend FUSELAB_INLINE Stepped operator+(Stepped a, Stepped b) {
    return {a.first + b.first, a.step + b.step};
  }
  friend FUSELAB_INLINE Stepped operator-(Stepped a, Stepped b) {
    return {a.first - b.first, a.step - b.step};
  }
  friend FUSELAB_INLINE Stepped operator*(Stepped a, int64_t by) { return {a.first * by, a.step * by}; }
  friend FUSELAB_INLINE Stepped operator*(int64_t by, Stepped a) { return a * by; }
  friend FUSELAB_INLINE LongIntegers<V> operator*(Stepped a, Stepped b) {
    return a.vector() * b.vector();
  }
  friend FUSELAB_INLINE LongIntegers<V> operator/(Stepped a, Stepped b) {
    if (a.step == 0 && b.step == 0 && b.first != 0) return splat<LongIntegers<V>>(a.first / b.first);
    return a.vector() / b.vector();
  }

  friend FUSELAB_INLINE LongIntegers<V> operator+(Stepped a, LongIntegers<V> b) {
    return a.vector() + b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator+(LongIntegers<V> a, Stepped b) {
    return a + b.vector();
  }
  friend FUSELAB_INLINE LongIntegers<V> operator-(Stepped a, LongIntegers<V> b) {
    return a.vector() - b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator-(LongIntegers<V> a, Stepped b) {
    return a - b.vector();
  }
  friend FUSELAB_INLINE LongIntegers<V> operator*(Stepped a, LongIntegers<V> b) {
    return a.vector() * b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator*(LongIntegers<V> a, Stepped b) {
    return a * b.vector();
  }
  friend FUSELAB_INLINE LongIntegers<V> operator/(Stepped a, LongIntegers<V> b) {
    return a.vector() / b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator/(LongIntegers<V> a, Stepped b) {
    return a / b.vector();
  }
};

// Returns an integer as a vector.
template <class V>
FUSELAB_INLINE LongIntegers<V> integers(LongIntegers<V> value) {
  return value;
}
template <class V>
FUSELAB_INLINE LongIntegers<V> integers(Stepped<V> value) {
  return value.vector();
}

// Converts integers to a type of fewer bits, as C++ does, and back.
template <class V, class Narrow>
FUSELAB_INLINE LongIntegers<V> narrowed(LongIntegers<V> value) {
  using Narrows = Lanes<Narrow, lanes<V>>;
  return __builtin_convertvector(__builtin_convertvector(value, Narrows), LongIntegers<V>);
}

// Whether every lane of such a number has 32 bits.
template <class V>
FUSELAB_INLINE bool is_small(int64_t first, int64_t step) {
  constexpr int64_t most = 1 << 30, furthest = most / lanes<V>;
  return uint64_t(first + most) <= 2 * most && uint64_t(step + furthest) <= 2 * furthest;
}
template <class V, std::size_t... lane>
FUSELAB_INLINE Integers<V> counted(std::index_sequence<lane...>) {
  return Integers<V>{Scalar<Integers<V>>(lane)...};
}
// Returns a number that `is_small`, in lanes as wide as the real ones.
template <class V>
FUSELAB_INLINE Integers<V> small(int64_t first, int64_t step) {
  using Number = Scalar<Integers<V>>;
  const auto lane = counted<V>(std::make_index_sequence<lanes<V>>{});
  return splat<Integers<V>>(Number(first)) + lane * Number(step);
}

template <class V, class Compare>
__attribute__((noinline)) void compare_apart(Integers<V>* result, Stepped<V> a, Stepped<V> b,
                                             Compare compare) {
  *result = compared<V>(a.vector(), b.vector(), compare);
}
template <class V, class A, class B, class Compare>
FUSELAB_INLINE Integers<V> integers_compared(A a, B b, Compare compare) {
  using Vec = LongIntegers<V>;
  if constexpr (std::is_same_v<A, Vec> || std::is_same_v<B, Vec>) {
    return compared<V>(integers<V>(a), integers<V>(b), compare);
  } else {
    const Stepped<V> one(a), other(b);
    if constexpr (sizeof(Scalar<Integers<V>>) == 8) return compare(one.vector(), other.vector());
    const int64_t step = one.step - other.step;
    int64_t first;
    if (__builtin_sub_overflow(one.first, other.first, &first) || !is_small<V>(first, step)) {
      Integers<V> result;
      compare_apart<V>(&result, one, other, compare);
      return result;
    }
    return compare(small<V>(first, step), Integers<V>{});
  }
}
template <class V, class A, class B>
FUSELAB_INLINE Integers<V> equal(A a, B b) {
  return integers_compared<V>(a, b, [](auto x, auto y) { return x == y; });
}
template <class V, class A, class B>
FUSELAB_INLINE Integers<V> unequal(A a, B b) {
  return ~equal<V>(a, b);
}
template <class V, class A, class B>
FUSELAB_INLINE Integers<V> less(A a, B b) {
  return integers_compared<V>(a, b, [](auto x, auto y) { return x < y; });
}
template <class V, class A, class B>
FUSELAB_INLINE Integers<V> at_most(A a, B b) {
  return integers_compared<V>(a, b, [](auto x, auto y) { return x <= y; });
}

template <class V, class From>
FUSELAB_INLINE V real_of_integer(From value) {
  if constexpr (std::is_same_v<From, Stepped<V>>) {
    if (is_small<V>(value.first, value.step))
      return __builtin_convertvector(small<V>(value.first, value.step), V);
    return __builtin_convertvector(value.vector(), V);
  } else {
    return __builtin_convertvector(value, V);
  }
}

}  // namespace math
