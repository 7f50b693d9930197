// Integers that grow regularly from lane to lane, as positions along an axis do.
//
// A Stepped number is two scalars, the first lane's and the step, and so are sums of such numbers and
// products with a number that is the same in all lanes: arithmetic on positions takes no vector. Their
// comparison gives a mask, computed in lanes as wide as the real numbers' where the difference allows
// it. Everything else takes a vector of 64-bit integers, which `integers` makes of them.
//
// Within a stretch of lanes in which no condition on positions changes, as inside of a border, all of
// this is scalar: positions are Lines, and a comparison of two of them is a Same. Lines that have a
// Stretch to watch find out how far it reaches.
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

// Whether every lane of a number that grows regularly has 32 bits.
template <class V>
FUSELAB_INLINE bool is_small(int64_t first, int64_t step) {
  constexpr int64_t most = 1 << 30, furthest = most / lanes<V>;
  return uint64_t(first + most) <= 2 * most && uint64_t(step + furthest) <= 2 * furthest;
}

// Returns the quotients of numbers that are small and one that has 31 bits: rounded towards zero, which
// a quotient in double precision is, too, as it differs from a whole number by more than its error.
template <class V, std::size_t... lane>
FUSELAB_INLINE LongIntegers<V> small_quotients(int64_t first, int64_t step, int64_t by,
                                               std::index_sequence<lane...>) {
  constexpr int64_t half = lanes<V> / 2;
  using Half = Lanes<int32_t, half>;
  using Reals = Lanes<double, half>;
  Lanes<int64_t, half> part[2];
  for (int i = 0; i < 2; ++i) {
    const Half number = Half{int32_t(lane)...} * int32_t(step) + int32_t(first + i * half * step);
    const Reals quotient = __builtin_convertvector(number, Reals) / (Reals{} + double(by));
    const Half whole = __builtin_convertvector(quotient, Half);
    part[i] = __builtin_convertvector(whole, Lanes<int64_t, half>);
  }
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
    const bool is_by_one = b.step == 0 && b.first > 0 && b.first < int64_t(1) << 31;
    if (is_by_one && is_small<V>(a.first, a.step))
      return small_quotients<V>(a.first, a.step, b.first, std::make_index_sequence<lanes<V> / 2>{});
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

// A mask has a condition of its own in each lane.
template <class Ints>
concept MaskVector = std::is_integral_v<Scalar<Ints>>;

// A condition that is the same in all lanes.
struct Same {
  bool value;

  template <MaskVector Ints>
  FUSELAB_INLINE operator Ints() const {
    return Ints{} - Scalar<Ints>(value);
  }
  friend FUSELAB_INLINE Same operator~(Same a) { return {!a.value}; }
  friend FUSELAB_INLINE Same operator&(Same a, Same b) { return {a.value && b.value}; }
  friend FUSELAB_INLINE Same operator|(Same a, Same b) { return {a.value || b.value}; }
  friend FUSELAB_INLINE Same operator==(Same a, Same b) { return {a.value == b.value}; }
  friend FUSELAB_INLINE Same operator!=(Same a, Same b) { return {a.value != b.value}; }
  friend FUSELAB_INLINE Same operator==(Same a, int b) { return {a.value == (b != 0)}; }
  friend FUSELAB_INLINE Same operator!=(Same a, int b) { return {a.value != (b != 0)}; }
};
template <MaskVector Ints>
FUSELAB_INLINE Ints operator&(Same a, Ints b) {
  return Ints(a) & b;
}
template <MaskVector Ints>
FUSELAB_INLINE Ints operator&(Ints a, Same b) {
  return a & Ints(b);
}
template <MaskVector Ints>
FUSELAB_INLINE Ints operator|(Same a, Ints b) {
  return Ints(a) | b;
}
template <MaskVector Ints>
FUSELAB_INLINE Ints operator|(Ints a, Same b) {
  return a | Ints(b);
}
template <MaskVector Ints>
FUSELAB_INLINE auto operator==(Same a, Ints b) {
  return Ints(a) == b;
}
template <MaskVector Ints>
FUSELAB_INLINE auto operator==(Ints a, Same b) {
  return a == Ints(b);
}
template <MaskVector Ints>
FUSELAB_INLINE auto operator!=(Same a, Ints b) {
  return Ints(a) != b;
}
template <MaskVector Ints>
FUSELAB_INLINE auto operator!=(Ints a, Same b) {
  return a != Ints(b);
}

// The lanes, from the first on, in which every comparison of Lines comes out as in the first, and how
// those came out that depend on the lane.
struct Stretch {
  static constexpr int64_t endless = std::numeric_limits<int64_t>::max();
  int64_t lanes = endless;
  uint64_t outcomes = 0;
  int comparisons = 0;

  FUSELAB_INLINE void end_at(int64_t lane) { lanes = smaller(lanes, lane); }

  // Watches a comparison with 0 of a number that grows by `step` from lane to lane.
  FUSELAB_INLINE void watch(int64_t first, int64_t step) {
    constexpr int64_t most = int64_t(1) << 62;
    const bool is_negative = first < 0;
    outcomes = outcomes << 1 | uint64_t(is_negative);
    if (++comparisons > 64 || first > most || first < -most || step > most || step < -most) {
      end_at(1);
    } else if (is_negative && step > 0) {
      end_at(step == 1 ? -first : (step - first - 1) / step);
    } else if (!is_negative && step < 0) {
      end_at(step == -1 ? first + 1 : first / -step + 1);
    }
  }
};

// A number that grows by `step` from lane to lane of a stretch.
template <class V>
struct Line {
  int64_t first, step;
  Stretch* stretch;

  FUSELAB_INLINE Line(int64_t number, int64_t growth = 0, Stretch* watched = nullptr)
      : first(number), step(growth), stretch(watched) {}

  FUSELAB_INLINE Stepped<V> stepped() const { return {first, step}; }
  FUSELAB_INLINE LongIntegers<V> vector() const { return stepped().vector(); }
  FUSELAB_INLINE Stretch* watched_with(Line other) const {
    return stretch ? stretch : other.stretch;
  }

  friend FUSELAB_INLINE Line operator-(Line a) { return {-a.first, -a.step, a.stretch}; }
  friend FUSELAB_INLINE Line operator+(Line a, Line b) {
    return {a.first + b.first, a.step + b.step, a.watched_with(b)};
  }
  friend FUSELAB_INLINE Line operator-(Line a, Line b) {
    return {a.first - b.first, a.step - b.step, a.watched_with(b)};
  }
  friend FUSELAB_INLINE Line operator*(Line a, Line b) {
    Stretch* const stretch = a.watched_with(b);
    if (stretch && a.step != 0 && b.step != 0) stretch->end_at(1);
    return {a.first * b.first, a.first * b.step + a.step * b.first, stretch};
  }
  friend FUSELAB_INLINE Line operator/(Line a, Line b) {
    Stretch* const stretch = a.watched_with(b);
    const bool is_exact = b.step == 0 && b.first != 0 && a.step % b.first == 0;
    if (stretch && !is_exact) stretch->end_at(1);
    if (stretch && is_exact && a.step != 0 && a.first % b.first != 0) stretch->watch(a.first, a.step);
    if (b.first == 0) return {0, 0, stretch};
    return {a.first / b.first, is_exact ? a.step / b.first : 0, stretch};
  }

  friend FUSELAB_INLINE LongIntegers<V> operator+(Line a, LongIntegers<V> b) {
    return a.vector() + b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator+(LongIntegers<V> a, Line b) {
    return a + b.vector();
  }
  friend FUSELAB_INLINE LongIntegers<V> operator-(Line a, LongIntegers<V> b) {
    return a.vector() - b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator-(LongIntegers<V> a, Line b) {
    return a - b.vector();
  }
  friend FUSELAB_INLINE LongIntegers<V> operator*(Line a, LongIntegers<V> b) {
    return a.vector() * b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator*(LongIntegers<V> a, Line b) {
    return a * b.vector();
  }
  friend FUSELAB_INLINE LongIntegers<V> operator/(Line a, LongIntegers<V> b) {
    return a.vector() / b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator/(LongIntegers<V> a, Line b) {
    return a / b.vector();
  }

  friend FUSELAB_INLINE Same is_less(Line a, Line b) {
    Stretch* const stretch = a.watched_with(b);
    if (stretch && a.step != b.step) {
      int64_t difference;
      if (__builtin_sub_overflow(a.first, b.first, &difference)) stretch->end_at(1);
      else stretch->watch(difference, a.step - b.step);
    }
    return {a.first < b.first};
  }
};

// Returns a number that grows regularly, whatever it is said by.
template <class V>
FUSELAB_INLINE Stepped<V> stepped(Stepped<V> number) {
  return number;
}
template <class V>
FUSELAB_INLINE Stepped<V> stepped(Line<V> number) {
  return number.stepped();
}

// Whether values are Lines, or numbers beside them.
template <class V, class... Values>
constexpr bool are_lines = (std::is_same_v<Values, Line<V>> || ...) &&
                           !(std::is_same_v<Values, LongIntegers<V>> || ...);

// Returns an integer as a vector.
template <class V>
FUSELAB_INLINE LongIntegers<V> integers(LongIntegers<V> value) {
  return value;
}
template <class V>
FUSELAB_INLINE LongIntegers<V> integers(Stepped<V> value) {
  return value.vector();
}
template <class V>
FUSELAB_INLINE LongIntegers<V> integers(Line<V> value) {
  return value.vector();
}
template <class V>
FUSELAB_INLINE LongIntegers<V> integers(int64_t value) {
  return splat<LongIntegers<V>>(value);
}

// Converts integers to a type of fewer bits, as C++ does, and back.
template <class V, class Narrow>
FUSELAB_INLINE LongIntegers<V> narrowed(LongIntegers<V> value) {
  using Narrows = Lanes<Narrow, lanes<V>>;
  return __builtin_convertvector(__builtin_convertvector(value, Narrows), LongIntegers<V>);
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
FUSELAB_INLINE auto equal(A a, B b) {
  if constexpr (are_lines<V, A, B>) {
    const Line<V> one(a), other(b);
    return ~(is_less(one, other) | is_less(other, one));
  } else {
    return integers_compared<V>(a, b, [](auto x, auto y) { return x == y; });
  }
}
template <class V, class A, class B>
FUSELAB_INLINE auto unequal(A a, B b) {
  return ~equal<V>(a, b);
}
template <class V, class A, class B>
FUSELAB_INLINE auto less(A a, B b) {
  if constexpr (are_lines<V, A, B>) {
    return is_less(Line<V>(a), Line<V>(b));
  } else {
    return integers_compared<V>(a, b, [](auto x, auto y) { return x < y; });
  }
}
template <class V, class A, class B>
FUSELAB_INLINE auto at_most(A a, B b) {
  if constexpr (are_lines<V, A, B>) {
    return ~is_less(Line<V>(b), Line<V>(a));
  } else {
    return integers_compared<V>(a, b, [](auto x, auto y) { return x <= y; });
  }
}

// Returns one of two integers: the first one where a condition is true.
template <class V, class Condition, class A, class B>
FUSELAB_INLINE auto where_integer(Condition condition, A a, B b) {
  if constexpr (std::is_same_v<Condition, Same> && !std::is_same_v<A, LongIntegers<V>> &&
                !std::is_same_v<B, LongIntegers<V>>) {
    const Line<V> one(a), other(b);
    const Line<V> chosen = condition.value ? one : other;
    return Line<V>(chosen.first, chosen.step, one.watched_with(other));
  } else {
    const LongIntegers<V> one = integers<V>(a), other = integers<V>(b);
    const auto wide = __builtin_convertvector(Integers<V>(condition), LongIntegers<V>);
    return (one & wide) | (other & ~wide);
  }
}
template <class V, class A, class B>
FUSELAB_INLINE auto larger_integer(A a, B b) {
  if constexpr (are_lines<V, A, B>) {
    return where_integer<V>(less<V>(a, b), b, a);
  } else {
    return maximum(integers<V>(a), integers<V>(b));
  }
}
template <class V, class A, class B>
FUSELAB_INLINE auto smaller_integer(A a, B b) {
  if constexpr (are_lines<V, A, B>) {
    return where_integer<V>(less<V>(b, a), b, a);
  } else {
    return minimum(integers<V>(a), integers<V>(b));
  }
}
template <class V, class A>
FUSELAB_INLINE auto absolute_integer(A a) {
  if constexpr (are_lines<V, A>) {
    return where_integer<V>(less<V>(a, int64_t(0)), -a, a);
  } else {
    return abs(integers<V>(a));
  }
}

template <class V>
FUSELAB_INLINE V where(Same condition, V a, V b) {
  return condition.value ? a : b;
}
template <class V>
FUSELAB_INLINE Integers<V> mask(Same condition) {
  return condition;
}

template <class V, class From>
FUSELAB_INLINE V real_of_integer(From value) {
  if constexpr (std::is_same_v<From, LongIntegers<V>>) {
    return __builtin_convertvector(value, V);
  } else {
    if (is_small<V>(value.first, value.step))
      return __builtin_convertvector(small<V>(value.first, value.step), V);
    return __builtin_convertvector(value.vector(), V);
  }
}

}  // namespace math
