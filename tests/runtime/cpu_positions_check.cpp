// Numbers that grow from lane to lane, compared, converted and loaded at, for
// test_cpu_positions.py.

#include <tuple>

#include "cpu_elements.h"
#include "cpu_positions.h"

// Stores for each pair of numbers {first, step} the four comparisons, lane by lane: as Stepped
// numbers, then as vectors.
template <class Real>
void compare(const int64_t* pairs, int64_t* masks, int64_t count) {
  using V = Vector<Real>;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* const pair = pairs + 4 * i;
    const math::Stepped<V> a(pair[0], pair[1]), b(pair[2], pair[3]);
    const LongIntegers<V> one = math::integers<V>(a), other = math::integers<V>(b);
    const Integers<V> found[] = {
        math::less<V>(a, b),       math::at_most<V>(a, b),       math::equal<V>(a, b),
        math::unequal<V>(a, b),    math::less<V>(one, other),    math::at_most<V>(one, other),
        math::equal<V>(one, other), math::unequal<V>(one, other)};
    for (int64_t k = 0; k < 8; ++k)
      for (int64_t lane = 0; lane < lanes<V>; ++lane)
        masks[(8 * i + k) * 16 + lane] = found[k][lane];
  }
}

// Stores (3 a - b + 2) and its value as real numbers, lane by lane, and as a vector.
template <class Real>
void combine(const int64_t* pairs, int64_t* sums, Real* reals, int64_t count) {
  using V = Vector<Real>;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* const pair = pairs + 4 * i;
    const math::Stepped<V> a(pair[0], pair[1]), b(pair[2], pair[3]);
    const auto sum = a * int64_t(3) - b + int64_t(2);
    const LongIntegers<V> whole = math::integers<V>(sum);
    const V real = math::real_of_integer<V>(sum);
    for (int64_t lane = 0; lane < lanes<V>; ++lane) {
      sums[16 * i + lane] = whole[lane];
      reals[16 * i + lane] = real[lane];
    }
  }
}

// Stores for each pair of numbers {first, step} how far from the first lane on one course holds, and
// in the lanes up to there what Lines then give: whether a < b, a <= b and a = b, the larger and the
// smaller number, the absolute value of a, and |a| / 2.
template <class Real>
void within_stretch(const int64_t* pairs, int64_t* lengths, int64_t* found, int64_t count) {
  using V = Vector<Real>;
  const auto values = [](auto a, auto b) {
    using math::where_integer;
    const int64_t one = 1, none = 0;
    const auto absolute = math::absolute_integer<V>(a);
    return std::tuple{where_integer<V>(math::less<V>(a, b), one, none),
                      where_integer<V>(math::at_most<V>(a, b), one, none),
                      where_integer<V>(math::equal<V>(a, b), one, none),
                      math::larger_integer<V>(a, b),
                      math::smaller_integer<V>(a, b),
                      absolute,
                      absolute / int64_t(2)};
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* const pair = pairs + 4 * i;
    math::Stretch stretch;
    values(math::Line<V>(pair[0], pair[1], &stretch), math::Line<V>(pair[2], pair[3], &stretch));
    lengths[i] = stretch.lanes;
    const auto lines = values(math::Line<V>(pair[0], pair[1]), math::Line<V>(pair[2], pair[3]));
    int64_t k = 0;
    const auto put = [&](auto number) {
      for (int64_t lane = 0; lane < lanes<V>; ++lane)
        found[(7 * i + k) * 16 + lane] = math::integers<V>(number)[lane];
      ++k;
    };
    std::apply([&](auto... number) { (put(number), ...); }, lines);
  }
}

// Stores for each pair of a number {first, step} and a divisor the quotients, lane by lane.
template <class Real>
void divide(const int64_t* pairs, int64_t* quotients, int64_t count) {
  using V = Vector<Real>;
  for (int64_t i = 0; i < count; ++i) {
    const math::Stepped<V> number(pairs[3 * i], pairs[3 * i + 1]), by(pairs[3 * i + 2]);
    const LongIntegers<V> found = number / by;
    for (int64_t lane = 0; lane < lanes<V>; ++lane) quotients[16 * i + lane] = found[lane];
  }
}

// Stores what small numbers {first, step} give lane by lane: whether a < b, a <= b and a = b, the
// larger and the smaller number, the absolute value of a, a / 3, (a / 3) b, and where a / 3 < b it,
// else a; and as real numbers the last one.
template <class Real>
void combine_small(const int64_t* pairs, int64_t* found, Real* reals, int64_t count) {
  using V = Vector<Real>;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* const pair = pairs + 4 * i;
    const math::SmallStepped<V> a(pair[0], pair[1]), b(pair[2], pair[3]);
    const int64_t one = 1, none = 0;
    const auto third = a / math::SmallStepped<V>(3);
    const auto chosen = math::where_integer<V>(math::less<V>(third, b), third, a);
    int64_t k = 0;
    const auto put = [&](auto number) {
      for (int64_t lane = 0; lane < lanes<V>; ++lane)
        found[(9 * i + k) * 16 + lane] = math::integers<V>(number)[lane];
      ++k;
    };
    put(math::where_integer<V>(math::less<V>(a, b), math::Narrow<V>(one), none));
    put(math::where_integer<V>(math::at_most<V>(a, b), math::Narrow<V>(one), none));
    put(math::where_integer<V>(math::equal<V>(a, b), math::Narrow<V>(one), none));
    put(math::larger_integer<V>(a, b));
    put(math::smaller_integer<V>(a, b));
    put(math::absolute_integer<V>(a));
    put(third);
    put(third * b);
    put(chosen);
    const V real = math::real_of_integer<V>(chosen);
    for (int64_t lane = 0; lane < lanes<V>; ++lane) reals[16 * i + lane] = real[lane];
  }
}

// Stores whether every number is small that the same formulas give between the bounds {low, high} of
// two numbers.
template <class Real>
void bound(const int64_t* bounds, bool* is_small, int64_t count) {
  using V = Vector<Real>;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* const own = bounds + 4 * i;
    is_small[i] = true;
    const math::Bounds<V> a{double(own[0]), double(own[1]), is_small + i};
    const math::Bounds<V> b{double(own[2]), double(own[3]), is_small + i};
    const auto third = a / math::Bounds<V>(3);
    math::where_integer<V>(math::less<V>(third, b), third * b, -a);
  }
}

// Stores the elements at places of their own, and those at every second place, in the lanes where a
// mask is true.
template <class Real, class Element>
void gather(const Element* elements, const int64_t* places, const bool* masks, Element* found,
            int64_t count) {
  using V = Vector<Real>;
  for (int64_t i = 0; i < count; ++i) {
    Integers<V> place, mask;
    for (int64_t lane = 0; lane < lanes<V>; ++lane) {
      place[lane] = places[16 * i + lane];
      mask[lane] = -int64_t(masks[16 * i + lane]);
    }
    auto* const to = found + 32 * i;
    const auto* const from = reinterpret_cast<const Stored<Element>*>(elements);
    const auto gathered = gathered_where<V, Element>(from, place, mask);
    std::memcpy(to, &gathered, sizeof gathered);
#if defined(__AVX2__)
    if constexpr (has_masked_load<V, Element>) {
      const auto second = load_second_where<V, Element>(from, mask);
      std::memcpy(to + 16, &second, sizeof second);
    }
#endif
  }
}
