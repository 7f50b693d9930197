// Scalar functions on vectors, for the C++ kernels that sweep over rows and columns.
//
// All are in the namespace `math`, so that a kernel may give any of these names to a value. A value
// is a vector of real numbers, of integers (64 bits), or a mask: an integer vector as wide as the
// real one, -1 in a lane where it is true and 0 elsewhere. Results are within 3 ulp; what has no
// vector form here goes through <cmath> lane by lane.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "cpu_vectors.h"
#include "elementary.h"
#include "special_functions.h"

template <class V>
using LongIntegers = Lanes<int64_t, lanes<V>>;

namespace math {

template <class V>
constexpr bool is_real = std::is_floating_point_v<Scalar<V>>;

// --- conversions

template <class V>
FUSELAB_INLINE V splat(Scalar<V> value) {
  if constexpr (sizeof(V) > vector_bytes) {  // which GCC fills from smaller vectors than it reads
    using Half = Lanes<Scalar<V>, lanes<V> / 2>;
    const Half half[2] = {splat<Half>(value), splat<Half>(value)};
    V whole;
    std::memcpy(&whole, half, sizeof whole);
    return whole;
  } else {
    return value - V{};
  }
}
template <class V, class From>
FUSELAB_INLINE Integers<V> mask(From condition) {
  return __builtin_convertvector(condition, Integers<V>);
}
template <class V>
FUSELAB_INLINE Integers<V> mask(bool condition) {
  return Integers<V>{} - Scalar<Integers<V>>(condition);
}
template <class V>
FUSELAB_INLINE V real_of_mask(Integers<V> mask) {
  return choose(mask, constant<V>(1.0), V{});
}
template <class V>
FUSELAB_INLINE LongIntegers<V> integer_of_mask(Integers<V> mask) {
  return -__builtin_convertvector(mask, LongIntegers<V>);
}
template <class V>
FUSELAB_INLINE LongIntegers<V> integer_of_real(V value) {
  return __builtin_convertvector(value, LongIntegers<V>);
}

// A value may have been loaded just before. Compilers make that a load by the mask, which has to wait for
// all that the condition is computed from, where the load on its own is under way long before.
template <class V>
FUSELAB_INLINE V where(Integers<V> condition, V a, V b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == vector_bytes) return choose(condition, opaque(a), opaque(b));
#endif
  return choose(condition, a, b);
}

// Integers are twice as wide as float, and compilers take vectors that fill more than one register
// apart lane by lane where they compare them. Here they are halved first.
template <class V>
constexpr bool is_halved = sizeof(LongIntegers<V>) > vector_bytes;
template <class V>
struct Halves {
  Lanes<int64_t, lanes<V> / 2> part[2];

  explicit FUSELAB_INLINE Halves(const LongIntegers<V>& whole) {
    std::memcpy(part, &whole, sizeof whole);
  }
};
template <class Ints, class Function>
FUSELAB_INLINE Ints by_halves(Ints a, Ints b, Function function) {
  if constexpr (is_halved<Ints>) {
    Halves<Ints> one(a);
    const Halves<Ints> other(b);
    for (int i = 0; i < 2; ++i) one.part[i] = function(one.part[i], other.part[i]);
    return load_as<Ints>(one.part);
  } else {
    return function(a, b);
  }
}
template <class Half, std::size_t... lane>
FUSELAB_INLINE auto joined(Half low, Half high, std::index_sequence<lane...>) {
  return __builtin_shufflevector(low, high, int(lane)...);
}
template <class V, class Compare>
FUSELAB_INLINE Integers<V> compared(LongIntegers<V> a, LongIntegers<V> b, Compare compare) {
  if constexpr (is_halved<V>) {
    const Halves<V> one(a), other(b);
    using Half = Lanes<Scalar<Integers<V>>, lanes<V> / 2>;
    const auto low = compare(one.part[0], other.part[0]), high = compare(one.part[1], other.part[1]);
    return joined(__builtin_convertvector(low, Half), __builtin_convertvector(high, Half),
                  std::make_index_sequence<lanes<V>>{});
  } else {
    return mask<V>(compare(a, b));
  }
}

// --- arithmetic

// Returns whether a mask is true in any lane.
template <class Ints>
FUSELAB_INLINE bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  return reduced<lanes<Ints> / 2>(mask, [](Ints a, Ints b) { return a | b; }) != 0;
#endif
}

// Returns what `quotient` takes beside a divisor: its reciprocal, or NaN where that is of no use.
template <class V>
FUSELAB_INLINE V reciprocal(V divisor) {
  const double most = is_single<V> ? 0x1p100 : 0x1p900;
  const V magnitude = absolute(divisor);
  const auto is_useful = (magnitude <= constant<V>(most)) & (magnitude >= constant<V>(1 / most));
  const V none = constant<V>(std::numeric_limits<double>::quiet_NaN());
  return choose(is_useful, constant<V>(1.0) / divisor, none);
}
// Returns a / b, rounded as a division is, where the reciprocal of b is known. The remainder of an
// approximate quotient corrects it (Markstein, IBM Journal of Research and Development 34, 1990).
// AVX-512 divides a vector in 16 cycles, in which it multiplies 32.
template <class V>
FUSELAB_INLINE V quotient(V a, V b, V reciprocal) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  if (!any(Integers<V>(reciprocal != reciprocal))) {
    const V near = opaque(a * reciprocal);
    const V remainder = a - near * b;
    const V result = remainder * reciprocal + near;
    return choose(result == result, result, near);  // infinity has no remainder
  }
#endif
  return a / b;
}

template <class V, class Function>
FUSELAB_INLINE V lane_by_lane(V x, Function function) {
  Scalar<V> lane[lanes<V>];
  std::memcpy(lane, &x, sizeof x);
  for (Scalar<V>& value : lane) value = function(value);
  std::memcpy(&x, lane, sizeof x);
  return x;
}

// Returns a product as it is rounded, which the compiler does not fuse with an addition: a product
// that is computed again, as in x * y - max(x * y), is then the same.
template <class V>
FUSELAB_INLINE V rounded(V product) {
  return opaque(product);
}

// Returns the larger or smaller value of every lane, NaN where one of them is NaN.
template <class V>
FUSELAB_INLINE V maximum(V a, V b) {
  if constexpr (is_real<V>) {
    return choose(a != a, a, no_less(b, a));
  } else {
    return by_halves(a, b, [](auto x, auto y) { return x > y ? x : y; });
  }
}
template <class V>
FUSELAB_INLINE V minimum(V a, V b) {
  if constexpr (is_real<V>) {
    return choose(a != a, a, no_more(b, a));
  } else {
    return by_halves(a, b, [](auto x, auto y) { return x < y ? x : y; });
  }
}
template <class V>
FUSELAB_INLINE V abs(V x) {
  if constexpr (is_real<V>) {
    return absolute(x);
  } else {
    return choose(x < V{}, -x, x);
  }
}
template <class V>
FUSELAB_INLINE V relu(V x) {
  return no_less(x, V{});
}
// Returns 0 for NaN, as PyTorch does.
template <class V>
FUSELAB_INLINE V sign(V x) {
  return choose(x > V{}, V{} + 1, choose(x < V{}, V{} - 1, V{}));
}
template <class V>
FUSELAB_INLINE V sqrt(V x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Scalar<V>) == 4) return (V)_mm512_sqrt_ps((__m512)x);
  if constexpr (sizeof(Scalar<V>) == 8) return (V)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(Scalar<V>) == 4) return (V)_mm256_sqrt_ps((__m256)x);
  if constexpr (sizeof(Scalar<V>) == 8) return (V)_mm256_sqrt_pd((__m256d)x);
#endif
  return lane_by_lane(x, [](auto value) { return std::sqrt(value); });
}
template <class V>
FUSELAB_INLINE V rsqrt(V x) {
  return constant<V>(1.0) / sqrt(x);
}
#if defined(__AVX2__)
template <int mode, class V>
FUSELAB_INLINE V rounded_to_integer(V x) {
#if defined(__AVX512F__)
  if constexpr (is_single<V>) return (V)_mm512_roundscale_ps((__m512)x, mode);
  if constexpr (!is_single<V>) return (V)_mm512_roundscale_pd((__m512d)x, mode);
#else
  if constexpr (is_single<V>) return (V)_mm256_round_ps((__m256)x, mode);
  if constexpr (!is_single<V>) return (V)_mm256_round_pd((__m256d)x, mode);
#endif
}
#endif
template <class V>
FUSELAB_INLINE V floor(V x) {
#if defined(__AVX2__)
  return rounded_to_integer<_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC>(x);
#else
  return lane_by_lane(x, [](auto value) { return std::floor(value); });
#endif
}
template <class V>
FUSELAB_INLINE V ceil(V x) {
#if defined(__AVX2__)
  return rounded_to_integer<_MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC>(x);
#else
  return lane_by_lane(x, [](auto value) { return std::ceil(value); });
#endif
}
// Rounds halves to the even number.
template <class V>
FUSELAB_INLINE V round(V x) {
#if defined(__AVX2__)
  return rounded_to_integer<_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC>(x);
#else
  return lane_by_lane(x, [](auto value) { return std::nearbyint(value); });
#endif
}

// --- exponentials and logarithms

// Where the result is 0, as at the -infinity of a mask, no step on the way to it is below the smallest
// normal number: those take a processor 100 cycles and more.
template <class V>
FUSELAB_INLINE V exp(V x) {
  const V highest = constant<V>(is_single<V> ? 89.0 : 710.0);  // infinite beyond
  const V lowest = constant<V>(is_single<V> ? -104.0 : -746.0);
  const auto vanishes = x < lowest;
#if defined(__AVX512F__)
  const V power = exponential<V>(choose(vanishes, V{}, no_more(x, highest)));
  return choose(vanishes, V{}, power);
#else
  const Exponential<V> parts = reduced_exponential<V>(no_more(no_less(x, lowest), highest));
  const Integers<V> half = half_of(parts.exponent);
  const V scale = power_of_two<V>(half), rest = power_of_two<V>(parts.exponent - half);
  return (scale * parts.fraction + scale) * from_bits<V>(bits_of(rest) & ~vanishes);
#endif
}
// 2^n - 1 is exact where it matters, and the fraction is below a half.
template <class V>
FUSELAB_INLINE V expm1(V x) {
  const V lowest = constant<V>(-40.0), highest = constant<V>(40.0);
  const Exponential<V> parts =
      reduced_exponential<V>(choose(x < lowest, lowest, choose(x > highest, highest, x)));
  const V scale = power_of_two<V>(parts.exponent);
  const V result = scale * parts.fraction + (scale - constant<V>(1.0));
  return choose(x > highest, exp(x), with_sign_of(x, result));
}

// Returns log(2^exponent (1 + f)) + correction, for 1 + f from sqrt(1/2) to sqrt(2): with
// s = f / (2 + f), log(1 + f) = f - f^2 / 2 + s (f^2 / 2 + R(s^2)). R is that of FreeBSD's msun,
// e_log.c and e_logf.c (Sun Microsystems, 1993).
template <class V>
FUSELAB_INLINE V log_of_parts(V exponent, V f, V correction) {
  const V s = f / (constant<V>(2.0) + f), z = s * s, half_square = constant<V>(0.5) * f * f;
  V series;
  if constexpr (is_single<V>) {
    series = horner(z, 0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841) * z;
  } else {
    series = horner(z, 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                    2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                    1.479819860511658591e-01) * z;
  }
  const V high = constant<V>(is_single<V> ? 6.9313812256e-01 : 6.93147180369123816490e-01);
  const V low = constant<V>(is_single<V> ? 9.0580006145e-06 : 1.90821492927058770002e-10);
  const V tail = exponent * low + correction;
  return exponent * high - ((half_square - (s * (half_square + series) + tail)) - f);
}

// Splits a positive normal number into 2^exponent m, m from sqrt(1/2) to sqrt(2).
template <class V>
FUSELAB_INLINE V split(V x, V& exponent) {
  using Ints = Integers<V>;
  constexpr int digits = is_single<V> ? 23 : 52;
  constexpr int64_t one = is_single<V> ? 0x3f800000 : 0x3ff0000000000000;
  constexpr int64_t root = is_single<V> ? 0x3f3504f3 : 0x3fe6a09e667f3bcd;  // sqrt(1/2)
  using Word = Scalar<Ints>;
  constexpr Word fraction = (Word(1) << digits) - 1;
  const Ints bits = bits_of(x) + Word(one - root);
  const V m = from_bits<V>((bits & fraction) + Word(root));
  // The exponent is non-negative as stored, so a logical shift is as good as an arithmetic one.
  using Unsigned = Lanes<std::conditional_t<is_single<V>, uint32_t, uint64_t>, lanes<V>>;
  const Ints stored = (Ints)((Unsigned)bits >> digits);
  exponent = __builtin_convertvector(stored - Word(is_single<V> ? 127 : 1023), V);
  return m;
}

// Gives log(x) its values at 0, below 0, at infinity and at NaN.
template <class V>
FUSELAB_INLINE V with_limits(V argument, V x, V result) {
  const V infinity = constant<V>(std::numeric_limits<double>::infinity());
  const V nan = constant<V>(std::numeric_limits<double>::quiet_NaN());
  result = choose(argument == infinity, infinity, choose(argument > V{}, result, nan));
  return choose(x != x, x, choose(argument == V{}, -infinity, result));
}

template <class V>
FUSELAB_INLINE V log(V x) {
  const V least = constant<V>(is_single<V> ? 1.17549435e-38 : 2.2250738585072014e-308);
  const V scale = constant<V>(is_single<V> ? 33554432.0 : 18014398509481984.0);  // 2^25, 2^54
  const auto subnormal = x < least;
  V exponent;
  const V f = split(choose(subnormal, x * scale, x), exponent) - constant<V>(1.0);
  exponent = exponent - choose(subnormal, constant<V>(is_single<V> ? 25.0 : 54.0), V{});
  return with_limits(x, x, log_of_parts(exponent, f, V{}));
}

// The correction is what rounding 1 + x has lost, relative to it.
template <class V>
FUSELAB_INLINE V log1p(V x) {
  const V one = constant<V>(1.0), u = one + x;
  V exponent;
  const V m = split(u, exponent);
  const auto small = (x > constant<V>(-0.2928)) & (x < constant<V>(0.4142));
  const V lost = choose(u > constant<V>(2.0), one - (u - x), x - (u - one));
  const auto huge = u > constant<V>(is_single<V> ? 3.3e7 : 3.6e16);
  const V correction = choose(small | huge, V{}, lost / u);
  const V result = log_of_parts(choose(small, V{}, exponent), choose(small, x, m - one), correction);
  return choose(x == V{}, x, with_limits(u, x, result));  // -0.0 stays -0.0
}

// --- sigmoids and the error function

// The gate of `logistic`, with one division where that has two for its complement.
template <class V>
FUSELAB_INLINE V sigmoid(V x) {
  const V one = constant<V>(1.0), small = exponential<V>(-absolute(x));
  return choose(x < V{}, small, one) / (one + small);
}
template <class V>
FUSELAB_INLINE V tanh(V x) {
  return hyperbolic_tangent(x);
}
// A polynomial near 0. Elsewhere erf(x) = 1 - erfc(x): in float erfc(x) is the exponential of a
// polynomial, in double 2 P(X < -sqrt(2) x) of the normal distribution.
template <class V>
FUSELAB_INLINE V erf(V x) {
  const V magnitude = absolute(x), square = x * x, one = constant<V>(1.0);
  if constexpr (is_single<V>) {
    const V ratio = horner(square, 0.1283791489, -0.3761248893, 0.1128176541, -0.02676474689,
                           0.004990401713, -0.0005976534532);  // erf(x) / x - 1
    const V most = constant<V>(4.0);  // erf(4) is 1
    const V t = choose(magnitude > most, most, magnitude);
    const V logarithm = horner(t, -0.1285158614, -0.6357132491, -0.1052685095, 0.02289423424,
                               -0.003216286251, 0.0002141462862);
    const V far = with_sign_of(x, one - exponential<V>(logarithm * t - t));
    return choose(magnitude < constant<V>(0.92), x * ratio + x, far);
  } else {
    const V ratio =
        horner(square, 0.12837916709551257, -0.376126389031837524, 0.112837916709551202,
               -0.0268661706451298408, 0.00522397762542329831, -0.00085483270219348296,
               0.000120553329028887354, -0.0000149256475675193321, 1.64620454414684189e-6,
               -1.63646421581676153e-7, 1.4792401209404813e-8, -1.21645600572834501e-9,
               8.70904512905310669e-11, -4.23094582429533782e-12);
    const V tail = normal<V>(magnitude * constant<V>(-1.4142135623730951)).distribution;
    const V far = with_sign_of(x, one - (tail + tail));
    return choose(magnitude < one, x * ratio + x, far);
  }
}

// --- sine and cosine

// Angles up to this are reduced exactly enough. Larger ones of float are reduced in double, and those
// that are too large there, infinity and NaN go through <cmath>.
template <class V>
FUSELAB_INLINE bool has_angle_above(V x, double limit) {
  return any(~(Integers<V>)(absolute(x) <= constant<V>(limit)));
}
template <class V>
constexpr double largest_angle = is_single<V> ? 8192.0 : 1e6;

// x = quadrant pi / 2 + angle, with an angle of at most pi / 4.
template <class V>
struct Angle {
  Integers<V> quadrant;
  V angle;
};

// Pi / 2 is taken in parts whose products with the quadrant are exact (Cody and Waite).
template <class V>
FUSELAB_INLINE Angle<V> reduced_angle(V x) {
  const V rounder = constant<V>(is_single<V> ? 12582912.0 : 6755399441055744.0);
  const V shifted = x * constant<V>(0.6366197723675814) + rounder;
  const V n = opaque(shifted) - rounder;
  V angle;
  if constexpr (is_single<V>) {
    angle = x - n * constant<V>(1.5703125);
    angle = angle - n * constant<V>(0.0004837512969970703);
    angle = angle - n * constant<V>(7.549533620476723e-08);
    angle = angle - n * constant<V>(2.563344151594519e-12);
  } else {
    const V first = x - n * constant<V>(1.5707963267341256);
    const V part = n * constant<V>(6.077100506303966e-11);
    angle = first - part;
    const V lost = (first - angle) - part;
    angle = angle - (n * constant<V>(2.0222662487959506e-21) - lost);
  }
  return {bits_of(shifted) - bits_of(rounder), angle};
}

// Returns the sine of quadrant pi / 2 + angle. The polynomials are those of Cephes (Moshier) in
// float, and of FreeBSD's msun, k_sin.c and k_cos.c, in double.
template <class V>
FUSELAB_INLINE V sine_of(Integers<V> quadrant, V angle) {
  const V z = angle * angle, half = constant<V>(0.5) * z, one = constant<V>(1.0);
  V sine, cosine;
  if constexpr (is_single<V>) {
    sine = horner(z, -1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4);
    cosine = horner(z, 4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5);
  } else {
    sine = horner(z, -1.66666666666666324348e-01, 8.33333333332248946124e-03,
                  -1.98412698298579493134e-04, 2.75573137070700676789e-06,
                  -2.50507602534068634195e-08, 1.58969099521155010221e-10);
    cosine = horner(z, 4.16666666666666019037e-02, -1.38888888888741095749e-03,
                    2.48015872894767294178e-05, -2.75573143513906633035e-07,
                    2.08757232129817482790e-09, -1.13596475577881948265e-11);
  }
  sine = angle + angle * (z * sine);
  const V near = one - half;
  cosine = near + (((one - near) - half) + z * z * cosine);
  const V value = choose((quadrant & 1) != 0, cosine, sine);
  return choose((quadrant & 2) != 0, -value, value);
}

// --- through double, or <cmath>

// Returns function(x), computed in double where x is float. Every function of double that is given
// here is exact to more digits than float has.
template <class V, class Function>
FUSELAB_INLINE V in_double(V x, Function function) {
  using Half = Lanes<float, lanes<V> / 2>;
  Half part[2];
  std::memcpy(part, &x, sizeof x);
  const Doubles low = function(__builtin_convertvector(part[0], Doubles));
  const Doubles high = function(__builtin_convertvector(part[1], Doubles));
  return joined(__builtin_convertvector(low, Half), __builtin_convertvector(high, Half),
                std::make_index_sequence<lanes<V>>{});
}
template <class V, class Function>
FUSELAB_INLINE V in_double(V x, V y, Function function) {
  using Half = Lanes<float, lanes<V> / 2>;
  Half part[2], other[2];
  std::memcpy(part, &x, sizeof x);
  std::memcpy(other, &y, sizeof y);
  const Doubles low = function(__builtin_convertvector(part[0], Doubles),
                               __builtin_convertvector(other[0], Doubles));
  const Doubles high = function(__builtin_convertvector(part[1], Doubles),
                                __builtin_convertvector(other[1], Doubles));
  return joined(__builtin_convertvector(low, Half), __builtin_convertvector(high, Half),
                std::make_index_sequence<lanes<V>>{});
}
// Returns of_angle(x), computed in double where float angles are large, or else in <cmath>.
template <class V, class OfAngle, class OfLane>
FUSELAB_INLINE V of_angle(V x, OfAngle of_angle, OfLane of_lane) {
  if (!has_angle_above(x, largest_angle<V>)) return of_angle(x);
  if constexpr (is_single<V>) {
    if (!has_angle_above(x, largest_angle<Doubles>))
      return in_double(x, [=](auto wide) { return of_angle(wide); });
  }
  return lane_by_lane(x, of_lane);
}
template <class V>
FUSELAB_INLINE V sin(V x) {
  const auto sine = [](auto angle) {
    const auto parts = reduced_angle(angle);
    return sine_of(parts.quadrant, parts.angle);
  };
  const V found = of_angle(x, sine, [](auto value) { return std::sin(value); });
  return choose(x == V{}, x, found);  // -0.0 stays -0.0
}
template <class V>
FUSELAB_INLINE V cos(V x) {
  const auto cosine = [](auto angle) {
    const auto parts = reduced_angle(angle);
    return sine_of(parts.quadrant + 1, parts.angle);
  };
  return of_angle(x, cosine, [](auto value) { return std::cos(value); });
}
// Calls function(value, other) for each lane.
template <class V, class Function>
FUSELAB_INLINE V lane_by_lane(V x, V y, Function function) {
  Scalar<V> second[lanes<V>];
  std::memcpy(second, &y, sizeof y);
  const Scalar<V>* next = second;
  return lane_by_lane(x, [&](auto value) { return Scalar<V>(function(value, *next++)); });
}

template <class V>
FUSELAB_INLINE V trunc(V x) {
#if defined(__AVX2__)
  return rounded_to_integer<_MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC>(x);
#else
  return lane_by_lane(x, [](auto value) { return std::trunc(value); });
#endif
}

// The arc sine of x up to 1/2, and of larger ones by that of sqrt((1 - x) / 2); polynomials of
// Cephes (Moshier).
template <class V>
FUSELAB_INLINE V small_asin(V x, V square) {
  const V series = horner(square, 1.6666752422e-1, 7.4953002686e-2, 4.5470025998e-2,
                          2.4181311049e-2, 4.2163199048e-2);
  return x + x * (square * series);
}
template <class V>
FUSELAB_INLINE V asin(V x) {
  if constexpr (is_single<V>) {
    const V magnitude = absolute(x), half = constant<V>(0.5);
    const auto large = magnitude > half;
    const V square = choose(large, half * (constant<V>(1.0) - magnitude), x * x);
    const V angle = small_asin(choose(large, sqrt(square), magnitude), square);
    const V far = constant<V>(1.5707963267948966) - (angle + angle);
    return with_sign_of(x, choose(large, far, angle));
  } else {
    return lane_by_lane(x, [](auto value) { return std::asin(value); });
  }
}
template <class V>
FUSELAB_INLINE V acos(V x) {
  if constexpr (is_single<V>) {
    const V magnitude = absolute(x), half = constant<V>(0.5);
    const auto large = magnitude > half;
    const V square = choose(large, half * (constant<V>(1.0) - magnitude), x * x);
    const V angle = small_asin(choose(large, sqrt(square), x), square);
    const V twice = angle + angle;
    const V far = choose(x < V{}, constant<V>(3.141592653589793) - twice, twice);
    return choose(large, far, constant<V>(1.5707963267948966) - angle);
  } else {
    return lane_by_lane(x, [](auto value) { return std::acos(value); });
  }
}
// atan(x) = pi / 4 + atan((x - 1) / (x + 1)), or pi / 2 - atan(1 / x); the polynomial is Cephes's.
template <class V>
FUSELAB_INLINE V atan(V x) {
  if constexpr (is_single<V>) {
    const V magnitude = absolute(x), one = constant<V>(1.0);
    const auto large = magnitude > constant<V>(2.414213562373095);
    const auto middle = magnitude > constant<V>(0.4142135623730950);
    const V above = choose(large, -one, choose(middle, magnitude - one, magnitude));
    const V below = choose(large, magnitude, choose(middle, magnitude + one, one));
    const V y = above / below, square = y * y;
    const V series = horner(square, -3.33329491539e-1, 1.99777106478e-1, -1.38776856032e-1,
                            8.05374449538e-2);
    const V start = choose(large, constant<V>(1.5707963267948966),
                           choose(middle, constant<V>(0.7853981633974483), V{}));
    return with_sign_of(x, start + (y + y * (square * series)));
  } else {
    return lane_by_lane(x, [](auto value) { return std::atan(value); });
  }
}

// |x|^y by logarithm and exponential; then what C's pow gives for signs, ones and zeros.
template <class V>
FUSELAB_INLINE V pow(V x, V y) {
  if constexpr (is_single<V>) {
    const V one = constant<V>(1.0), magnitude = absolute(x);
    const V infinity = constant<V>(std::numeric_limits<double>::infinity());
    const V power = in_double(magnitude, y, [](auto a, auto b) { return math::exp(b * log(a)); });
    const auto is_whole = floor(y) == y;
    const V half = y * constant<V>(0.5);
    const auto is_odd = is_whole & (floor(half) != half);
    const V signed_power = choose(is_odd, with_sign_of(x, power), power);
    const auto is_undefined = (x < V{}) & (magnitude < infinity) & ~is_whole;
    const V nan = constant<V>(std::numeric_limits<double>::quiet_NaN());
    const V defined = choose(is_undefined, nan, signed_power);
    const auto is_one = (y == V{}) | (x == one) | ((magnitude == one) & (absolute(y) == infinity));
    return choose(is_one, one, defined);
  } else {
    return lane_by_lane(x, y, [](auto one, auto other) { return std::pow(one, other); });
  }
}
template <class V>
FUSELAB_INLINE V hypot(V x, V y) {
  if constexpr (is_single<V>) {
    const V infinity = constant<V>(std::numeric_limits<double>::infinity());
    const V length = in_double(x, y, [](auto a, auto b) { return math::sqrt(a * a + b * b); });
    return choose((absolute(x) == infinity) | (absolute(y) == infinity), infinity, length);
  } else {
    return lane_by_lane(x, y, [](auto one, auto other) { return std::hypot(one, other); });
  }
}
template <class V>
FUSELAB_INLINE V acosh(V x) {
  if constexpr (is_single<V>) {
    return in_double(x, [](Doubles a) {
      const Doubles one = constant<Doubles>(1.0);
      const Doubles size = choose(a < one, constant<Doubles>(-1.0), a * a - one);
      return math::log(a + math::sqrt(size));
    });
  } else {
    return lane_by_lane(x, [](auto value) { return std::acosh(value); });
  }
}
template <class V>
FUSELAB_INLINE V asinh(V x) {
  if constexpr (is_single<V>) {
    return in_double(x, [](Doubles a) {
      const Doubles one = constant<Doubles>(1.0);
      const Doubles size = absolute(a), square = a * a;
      const Doubles part = square / (one + math::sqrt(square + one));
      const Doubles most = constant<Doubles>(1e300);  // infinity / infinity is none of its values
      return with_sign_of(a, choose(size < most, math::log1p(size + part), size));
    });
  } else {
    return lane_by_lane(x, [](auto value) { return std::asinh(value); });
  }
}
template <class V>
FUSELAB_INLINE V atanh(V x) {
  if constexpr (is_single<V>) {
    return in_double(x, [](Doubles a) {
      const Doubles one = constant<Doubles>(1.0);
      return constant<Doubles>(0.5) * math::log1p((a + a) / (one - a));
    });
  } else {
    return lane_by_lane(x, [](auto value) { return std::atanh(value); });
  }
}
template <class V>
FUSELAB_INLINE V cosh(V x) {
  if constexpr (is_single<V>) {
    return in_double(x, [](Doubles a) {
      const Doubles growing = math::exp(absolute(a));
      return constant<Doubles>(0.5) * (growing + constant<Doubles>(1.0) / growing);
    });
  } else {
    return lane_by_lane(x, [](auto value) { return std::cosh(value); });
  }
}
template <class V>
FUSELAB_INLINE V sinh(V x) {
  if constexpr (is_single<V>) {
    return in_double(x, [](Doubles a) {
      const Doubles growing = math::exp(absolute(a));
      const Doubles half = constant<Doubles>(0.5) * (growing - constant<Doubles>(1.0) / growing);
      const Doubles near = a + a * a * a * constant<Doubles>(1.0 / 6);
      return choose(absolute(a) < constant<Doubles>(1e-3), near, with_sign_of(a, half));
    });
  } else {
    return lane_by_lane(x, [](auto value) { return std::sinh(value); });
  }
}
template <class V>
FUSELAB_INLINE V tan(V x) {
  if constexpr (is_single<V>) {
    return in_double(x, [](Doubles a) {
      return math::sin(a) / math::cos(a);
    });
  } else {
    return lane_by_lane(x, [](auto value) { return std::tan(value); });
  }
}
template <class V>
FUSELAB_INLINE V erfc(V x) {
  if constexpr (is_single<V>) {
    return in_double(x, [](Doubles a) {
      const Doubles tail = normal<Doubles>(a * constant<Doubles>(-1.4142135623730951)).distribution;
      return tail + tail;
    });
  } else {
    return lane_by_lane(x, [](auto value) { return std::erfc(value); });
  }
}
template <class V>
FUSELAB_INLINE V exp2(V x) {
  if constexpr (is_single<V>) {
    return in_double(x, [](Doubles a) {
      return math::exp(a * constant<Doubles>(0.6931471805599453));
    });
  } else {
    return lane_by_lane(x, [](auto value) { return std::exp2(value); });
  }
}
template <class V>
FUSELAB_INLINE V log10(V x) {
  if constexpr (is_single<V>) {
    return in_double(x, [](Doubles a) {
      return math::log(a) * constant<Doubles>(0.4342944819032518);
    });
  } else {
    return lane_by_lane(x, [](auto value) { return std::log10(value); });
  }
}
template <class V>
FUSELAB_INLINE V log2(V x) {
  if constexpr (is_single<V>) {
    return in_double(x, [](Doubles a) {
      return math::log(a) * constant<Doubles>(1.4426950408889634);
    });
  } else {
    return lane_by_lane(x, [](auto value) { return std::log2(value); });
  }
}
// Functions of one number, computed in double.
template <class V>
FUSELAB_INLINE V digamma(V x) {
  return lane_by_lane(x, [](double value) { return special::digamma(value); });
}
template <class V>
FUSELAB_INLINE V trigamma(V x) {
  return lane_by_lane(x, [](double value) { return special::trigamma(value); });
}
template <class V>
FUSELAB_INLINE V erfinv(V x) {
  return lane_by_lane(x, [](double value) { return special::erf_inverse(value); });
}
template <class V>
FUSELAB_INLINE V lgamma(V x) {
  return lane_by_lane(x, [](double value) { return std::lgamma(value); });
}
template <class V>
FUSELAB_INLINE V atan2(V x, V y) {
  return lane_by_lane(x, y, [](auto one, auto other) { return std::atan2(one, other); });
}
template <class V>
FUSELAB_INLINE V fmod(V x, V y) {
  return lane_by_lane(x, y, [](auto one, auto other) { return std::fmod(one, other); });
}

}  // namespace math
