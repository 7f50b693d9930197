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
//
// Where Bounds, computed in place of the positions, show that no number of a kernel is large, positions
// are Stepped numbers that are known to be small. What does not grow regularly, such as their
// quotients, is then Narrow: a vector of lanes as wide as the real numbers', which takes one register
// where 64-bit integers beside float take two.
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

template <class V>
FUSELAB_INLINE LongIntegers<V> widened_integers(Integers<V> number) {
  if constexpr (is_halved<V>) {
    using Half = Lanes<Scalar<Integers<V>>, lanes<V> / 2>;
    Half half[2];
    std::memcpy(half, &number, sizeof number);
    Lanes<int64_t, lanes<V> / 2> part[2];
    for (int i = 0; i < 2; ++i)
      part[i] = __builtin_convertvector(half[i], Lanes<int64_t, lanes<V> / 2>);
    return load_as<LongIntegers<V>>(part);
  } else {
    return __builtin_convertvector(number, LongIntegers<V>);
  }
}
// Returns the lower bits of integers.
template <class V>
FUSELAB_INLINE Integers<V> narrowed_integers(LongIntegers<V> number) {
  if constexpr (is_halved<V>) {
    using Half = Lanes<Scalar<Integers<V>>, lanes<V> / 2>;
    const Halves<V> half(number);
    return joined(__builtin_convertvector(half.part[0], Half),
                  __builtin_convertvector(half.part[1], Half), std::make_index_sequence<lanes<V>>{});
  } else {
    return __builtin_convertvector(number, Integers<V>);
  }
}

template <class V>
struct Narrow;

template <class V, bool is_known_small = false>
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
  friend FUSELAB_INLINE auto operator*(Stepped a, Stepped b) {
    if constexpr (is_known_small) {
      return Narrow<V>(a) * Narrow<V>(b);
    } else {
      return a.vector() * b.vector();
    }
  }
  friend FUSELAB_INLINE auto operator/(Stepped a, Stepped b) {
    if constexpr (is_known_small) {
      return Narrow<V>::quotients(a, b);
    } else {
      if (a.step == 0 && b.step == 0 && b.first != 0)
        return splat<LongIntegers<V>>(a.first / b.first);
      const bool is_by_one = b.step == 0 && b.first > 0 && b.first < int64_t(1) << 31;
      if (is_by_one && is_small<V>(a.first, a.step))
        return small_quotients<V>(a.first, a.step, b.first,
                                  std::make_index_sequence<lanes<V> / 2>{});
      return a.vector() / b.vector();
    }
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
template <class V>
using SmallStepped = Stepped<V, true>;

// Small integers, in lanes as wide as the real numbers'.
template <class V>
struct Narrow {
  using Ints = Integers<V>;
  using Number = Scalar<Ints>;
  Ints lane;

  explicit FUSELAB_INLINE Narrow(Ints number) : lane(number) {}
  FUSELAB_INLINE Narrow(int64_t number) : lane(splat<Ints>(Number(number))) {}
  FUSELAB_INLINE Narrow(SmallStepped<V> number) : lane(small<V>(number.first, number.step)) {}

  FUSELAB_INLINE LongIntegers<V> vector() const { return widened_integers<V>(lane); }

  // Returns the quotients of small numbers, rounded towards zero. Those by a number that is not large
  // are found in single precision, from the remainder in the first lane: its lanes' error is then less
  // than what a quotient differs by from a whole number.
  static FUSELAB_INLINE Narrow quotients(SmallStepped<V> a, SmallStepped<V> b) {
    constexpr int64_t most = 1 << 20;
    if (b.step == 0 && b.first > 0 && b.first < most && a.first >= 0 && a.step >= 0 &&
        a.step < most / lanes<V>) {
      const int64_t whole = uint32_t(a.first) / uint32_t(b.first);
      const Ints left = small<V>(a.first - whole * b.first, a.step);
      const V beyond = __builtin_convertvector(left, V) / splat<V>(Scalar<V>(b.first));
      return Narrow(splat<Ints>(Number(whole)) + __builtin_convertvector(beyond, Ints));
    }
    return Narrow(a) / Narrow(b);
  }

  friend FUSELAB_INLINE Narrow operator-(Narrow a) { return Narrow(-a.lane); }
  friend FUSELAB_INLINE Narrow operator+(Narrow a, Narrow b) { return Narrow(a.lane + b.lane); }
  friend FUSELAB_INLINE Narrow operator-(Narrow a, Narrow b) { return Narrow(a.lane - b.lane); }
  friend FUSELAB_INLINE Narrow operator*(Narrow a, Narrow b) { return Narrow(a.lane * b.lane); }
  friend FUSELAB_INLINE Narrow operator/(Narrow a, Narrow b) { return Narrow(a.lane / b.lane); }

  friend FUSELAB_INLINE LongIntegers<V> operator+(Narrow a, LongIntegers<V> b) {
    return a.vector() + b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator+(LongIntegers<V> a, Narrow b) {
    return a + b.vector();
  }
  friend FUSELAB_INLINE LongIntegers<V> operator-(Narrow a, LongIntegers<V> b) {
    return a.vector() - b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator-(LongIntegers<V> a, Narrow b) {
    return a - b.vector();
  }
  friend FUSELAB_INLINE LongIntegers<V> operator*(Narrow a, LongIntegers<V> b) {
    return a.vector() * b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator*(LongIntegers<V> a, Narrow b) {
    return a * b.vector();
  }
  friend FUSELAB_INLINE LongIntegers<V> operator/(Narrow a, LongIntegers<V> b) {
    return a.vector() / b;
  }
  friend FUSELAB_INLINE LongIntegers<V> operator/(LongIntegers<V> a, Narrow b) {
    return a / b.vector();
  }
};

// Integers of as many bits that may be large, and are only compared.
template <class V>
struct Words {
  Integers<V> lane;

  FUSELAB_INLINE LongIntegers<V> vector() const { return widened_integers<V>(lane); }
};

// The least and the largest value of a number, wherever the kernel computes it. Double precision tells
// whether they are small. `is_fitting` is set to false where one is not.
template <class V>
struct Bounds {
  double low, high;
  bool* is_fitting;

  FUSELAB_INLINE Bounds(int64_t number) : low(number), high(number), is_fitting(nullptr) {}
  FUSELAB_INLINE Bounds(double least, double most, bool* fitting)
      : low(least), high(most), is_fitting(fitting) {
    constexpr double limit = 1 << 30;
    if (fitting && !(least >= -limit && most <= limit)) *fitting = false;
  }

  FUSELAB_INLINE LongIntegers<V> vector() const { return LongIntegers<V>{}; }
  FUSELAB_INLINE bool* watched_with(Bounds other) const {
    return is_fitting ? is_fitting : other.is_fitting;
  }
  FUSELAB_INLINE double magnitude() const { return -low > high ? -low : high; }
  FUSELAB_INLINE Bounds joined_with(Bounds other) const {
    return {low < other.low ? low : other.low, high > other.high ? high : other.high,
            watched_with(other)};
  }

  friend FUSELAB_INLINE Bounds operator-(Bounds a) { return {-a.high, -a.low, a.is_fitting}; }
  friend FUSELAB_INLINE Bounds operator+(Bounds a, Bounds b) {
    return {a.low + b.low, a.high + b.high, a.watched_with(b)};
  }
  friend FUSELAB_INLINE Bounds operator-(Bounds a, Bounds b) { return a + -b; }
  friend FUSELAB_INLINE Bounds operator*(Bounds a, Bounds b) {
    const Bounds one(a.low * b.low, a.low * b.high, nullptr);
    const Bounds other(a.high * b.low, a.high * b.high, nullptr);
    const double low[2] = {one.low < one.high ? one.low : one.high,
                           other.low < other.high ? other.low : other.high};
    const double high[2] = {one.low > one.high ? one.low : one.high,
                            other.low > other.high ? other.low : other.high};
    return {low[0] < low[1] ? low[0] : low[1], high[0] > high[1] ? high[0] : high[1],
            a.watched_with(b)};
  }
  friend FUSELAB_INLINE Bounds operator/(Bounds a, Bounds b) {
    if (a.low >= 0 && b.low > 0) return {0, a.high / b.low, a.watched_with(b)};
    // Processors raise a signal for the quotient by zero, which 64-bit lanes do not compute either.
    const bool has_zero = b.low <= 0 && b.high >= 0;
    const double most = has_zero ? INFINITY : a.magnitude();
    return {-most, most, a.watched_with(b)};
  }
  friend FUSELAB_INLINE LongIntegers<V> operator+(Bounds, LongIntegers<V> b) { return b; }
  friend FUSELAB_INLINE LongIntegers<V> operator+(LongIntegers<V> a, Bounds) { return a; }
  friend FUSELAB_INLINE LongIntegers<V> operator-(Bounds, LongIntegers<V> b) { return b; }
  friend FUSELAB_INLINE LongIntegers<V> operator-(LongIntegers<V> a, Bounds) { return a; }
  friend FUSELAB_INLINE LongIntegers<V> operator*(Bounds, LongIntegers<V> b) { return b; }
  friend FUSELAB_INLINE LongIntegers<V> operator*(LongIntegers<V> a, Bounds) { return a; }
  friend FUSELAB_INLINE LongIntegers<V> operator/(Bounds, LongIntegers<V> b) { return b; }
  friend FUSELAB_INLINE LongIntegers<V> operator/(LongIntegers<V> a, Bounds) { return a; }
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
  bool is_regular = true;  // whether all numbers are Lines from lane to lane

  FUSELAB_INLINE void end_at(int64_t lane) { lanes = smaller(lanes, lane); }
  FUSELAB_INLINE void end_at_once() { lanes = 1, is_regular = false; }

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
    if (stretch && a.step != 0 && b.step != 0) stretch->end_at_once();
    return {a.first * b.first, a.first * b.step + a.step * b.first, stretch};
  }
  friend FUSELAB_INLINE Line operator/(Line a, Line b) {
    Stretch* const stretch = a.watched_with(b);
    const bool is_exact = b.step == 0 && b.first != 0 && a.step % b.first == 0;
    if (stretch && !is_exact) stretch->end_at_once();
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
FUSELAB_INLINE Stepped<V> stepped(SmallStepped<V> number) {
  return {number.first, number.step};
}
template <class V>
FUSELAB_INLINE Stepped<V> stepped(Line<V> number) {
  return number.stepped();
}

// Whether values are Lines, or numbers beside them; likewise of Bounds, and of small numbers.
template <class V, class... Values>
constexpr bool has_long = (std::is_same_v<Values, LongIntegers<V>> || ...);
template <class V, class... Values>
constexpr bool are_lines =
    (std::is_same_v<Values, Line<V>> || ...) && !has_long<V, Values...>;
template <class V, class... Values>
constexpr bool are_bounds =
    (std::is_same_v<Values, Bounds<V>> || ...) && !has_long<V, Values...>;
template <class V, class... Values>
constexpr bool are_stepped =
    (std::is_same_v<Values, SmallStepped<V>> || ...) &&
    ((std::is_same_v<Values, SmallStepped<V>> || std::is_same_v<Values, int64_t>) && ...);
template <class V, class... Values>
constexpr bool are_narrow =
    ((std::is_same_v<Values, SmallStepped<V>> || std::is_same_v<Values, Narrow<V>>) || ...) &&
    !has_long<V, Values...>;

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
FUSELAB_INLINE LongIntegers<V> integers(SmallStepped<V> value) {
  return value.vector();
}
template <class V>
FUSELAB_INLINE LongIntegers<V> integers(Narrow<V> value) {
  return value.vector();
}
template <class V>
FUSELAB_INLINE LongIntegers<V> integers(Words<V> value) {
  return value.vector();
}
template <class V>
FUSELAB_INLINE LongIntegers<V> integers(Bounds<V> value) {
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

template <class V, class Compare>
__attribute__((noinline)) void compare_apart(Integers<V>* result, Stepped<V> a, Stepped<V> b,
                                             Compare compare) {
  *result = compared<V>(a.vector(), b.vector(), compare);
}
template <class V, class A>
FUSELAB_INLINE Integers<V> lanes_of(A a) {
  if constexpr (std::is_same_v<A, Words<V>>) {
    return a.lane;
  } else {
    return Narrow<V>(a).lane;
  }
}
template <class V, class A, class B, class Compare>
FUSELAB_INLINE Integers<V> integers_compared(A a, B b, Compare compare) {
  using Vec = LongIntegers<V>;
  if constexpr (std::is_same_v<A, Vec> || std::is_same_v<B, Vec>) {
    return compared<V>(integers<V>(a), integers<V>(b), compare);
  } else if constexpr (are_stepped<V, A, B>) {
    const SmallStepped<V> difference = SmallStepped<V>(a) - SmallStepped<V>(b);
    return compare(small<V>(difference.first, difference.step), Integers<V>{});
  } else if constexpr (are_narrow<V, A, B>) {
    return compare(lanes_of<V>(a), lanes_of<V>(b));
  } else if constexpr (std::is_same_v<A, Words<V>> || std::is_same_v<B, Words<V>>) {
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
// Returns where a small number is negative. One that is the same in all lanes takes no product.
template <class V>
FUSELAB_INLINE Integers<V> is_negative(SmallStepped<V> number) {
  using Number = Scalar<Integers<V>>;
  if (number.step == 0) return splat<Integers<V>>(-Number(number.first < 0));
  return small<V>(number.first, number.step) < Integers<V>{};
}
template <class V, class A, class B>
FUSELAB_INLINE auto equal(A a, B b) {
  if constexpr (are_lines<V, A, B>) {
    const Line<V> one(a), other(b);
    return ~(is_less(one, other) | is_less(other, one));
  } else if constexpr (are_bounds<V, A, B>) {
    return Same{};
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
  } else if constexpr (are_bounds<V, A, B>) {
    return Same{};
  } else if constexpr (are_stepped<V, A, B>) {
    return is_negative<V>(SmallStepped<V>(a) - SmallStepped<V>(b));
  } else {
    return integers_compared<V>(a, b, [](auto x, auto y) { return x < y; });
  }
}
template <class V, class A, class B>
FUSELAB_INLINE auto at_most(A a, B b) {
  if constexpr (are_lines<V, A, B>) {
    return ~is_less(Line<V>(b), Line<V>(a));
  } else if constexpr (are_bounds<V, A, B>) {
    return Same{};
  } else if constexpr (are_stepped<V, A, B>) {
    return ~is_negative<V>(SmallStepped<V>(b) - SmallStepped<V>(a));
  } else {
    return integers_compared<V>(a, b, [](auto x, auto y) { return x <= y; });
  }
}

// Returns one of two integers: the first one where a condition is true.
template <class V, class Condition, class A, class B>
FUSELAB_INLINE auto where_integer(Condition condition, A a, B b) {
  if constexpr (are_bounds<V, A, B>) {
    return Bounds<V>(a).joined_with(Bounds<V>(b));
  } else if constexpr (are_narrow<V, A, B>) {
    const Integers<V> mask = condition;
    return Narrow<V>((Narrow<V>(a).lane & mask) | (Narrow<V>(b).lane & ~mask));
  } else if constexpr (std::is_same_v<Condition, Same> && !std::is_same_v<A, LongIntegers<V>> &&
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
  if constexpr (are_lines<V, A, B> || are_bounds<V, A, B> || are_narrow<V, A, B>) {
    return where_integer<V>(less<V>(a, b), b, a);
  } else {
    return maximum(integers<V>(a), integers<V>(b));
  }
}
template <class V, class A, class B>
FUSELAB_INLINE auto smaller_integer(A a, B b) {
  if constexpr (are_lines<V, A, B> || are_bounds<V, A, B> || are_narrow<V, A, B>) {
    return where_integer<V>(less<V>(b, a), b, a);
  } else {
    return minimum(integers<V>(a), integers<V>(b));
  }
}
template <class V, class A>
FUSELAB_INLINE auto absolute_integer(A a) {
  if constexpr (are_lines<V, A> || are_bounds<V, A> || are_narrow<V, A>) {
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
  } else if constexpr (std::is_same_v<From, int64_t>) {
    return splat<V>(Scalar<V>(value));
  } else if constexpr (std::is_same_v<From, Narrow<V>>) {
    return __builtin_convertvector(value.lane, V);
  } else if constexpr (std::is_same_v<From, SmallStepped<V>>) {
    return __builtin_convertvector(small<V>(value.first, value.step), V);
  } else if constexpr (std::is_same_v<From, Bounds<V>>) {
    return V{};
  } else {
    if (is_small<V>(value.first, value.step))
      return __builtin_convertvector(small<V>(value.first, value.step), V);
    return __builtin_convertvector(value.vector(), V);
  }
}

}  // namespace math
