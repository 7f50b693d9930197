// Derivatives of log(gamma(x)), and the inverse of the error function, of one number: for CUDA C++
// (Real = float, double) and for C++ on CPUs (double). A file that includes this one first defines
// FUSELAB_INLINE and includes the functions of <cmath>.
//
// Relative errors in double: digamma 4e-16 times the larger of 1 and log|x| (absolute near its
// roots), erf_inverse 4e-16, trigamma 2e-9, which is what PyTorch's own series gives.
#pragma once

#include <cstdint>

namespace special {

constexpr double pi = 3.141592653589793238;

// The derivative of log(gamma(x)): psi(x + 1) = psi(x) + 1 / x leads to x >= 10, where Stirling's
// series holds, and psi(1 - x) = psi(x) + pi / tan(pi x) from below 0. Poles are as PyTorch's:
// infinite at 0, NaN at the negative integers.
template <class Real>
FUSELAB_INLINE Real digamma(Real x) {
  if (x == Real(0)) return Real(-1) / x;
  Real result = Real(0);
  if (x < Real(0)) {
    // tan has the period pi, so that the nearest whole number keeps float's digits at the poles. In
    // double PyTorch takes the part behind the point. Of -infinity either is NaN.
    const Real fraction = x - (sizeof(Real) == 4 ? rint(x) : trunc(x));
    if (fraction == Real(0)) return fraction / fraction;
    result = -Real(pi) / tan(Real(pi) * fraction);
    x = Real(1) - x;
  }
  for (int step = 0; step < 10 && x < Real(10); ++step) {
    result -= Real(1) / x;
    x += Real(1);
  }
  const Real square = Real(1) / (x * x);
  Real series = Real(1.0 / 12) * square - Real(691.0 / 32760);
  series = series * square + Real(1.0 / 132);
  series = series * square - Real(1.0 / 240);
  series = series * square + Real(1.0 / 252);
  series = series * square - Real(1.0 / 120);
  series = series * square + Real(1.0 / 12);
  return result + log(x) - Real(0.5) / x - series * square;
}

// The derivative of digamma. The terms 1 / (x + k)^2 of its sum up to k = 5, the smallest first, lead
// to x + 6, where three terms of Stirling's series give what PyTorch's function gives. Left of 1 / 2
// it is pi^2 / sin^2(pi x) less the value at 1 - x; around the negative integers it is as large as
// the sine is inexact, which PyTorch's is too.
template <class Real>
FUSELAB_INLINE Real trigamma(Real x) {
  const bool is_left = x < Real(0.5);
  const Real sine = is_left ? sin(Real(pi) * x) : Real(1);
  const Real from = is_left ? Real(1) - x : x;
  const Real end = Real(1) / (from + Real(6)), square = end * end;
  Real sum = square * Real(1.0 / 42) - Real(1.0 / 30);
  sum = (sum * square + Real(1.0 / 6)) * square * end + Real(0.5) * square + end;
  for (int k = 5; k >= 0; --k) {
    const Real term = Real(1) / (from + Real(k));
    sum += term * term;
  }
  return is_left ? Real(pi * pi) / (sine * sine) - sum : sum;
}

// The y with erf(y) = x: a polynomial of single precision (M. Giles, Approximating the erfinv
// function, 2010), and Newton's method on erf, or far out on log(erfc).
FUSELAB_INLINE double erf_inverse(double x) {
  const double size = fabs(x);
  if (size == 1.0) return x / 0.0;
  if (!(size < 1.0)) return (x - x) / (x - x);
  double w = -log((1.0 - size) * (1.0 + size)), y;
  if (w < 5.0) {
    w -= 2.5;
    y = 2.81022636e-08 * w + 3.43273939e-07;
    y = y * w - 3.5233877e-06;
    y = y * w - 4.39150654e-06;
    y = y * w + 0.00021858087;
    y = y * w - 0.00125372503;
    y = y * w - 0.00417768164;
    y = y * w + 0.246640727;
    y = y * w + 1.50140941;
  } else {
    w = sqrt(w) - 3.0;
    y = -0.000200214257 * w + 0.000100950558;
    y = y * w + 0.00134934322;
    y = y * w - 0.00367342844;
    y = y * w + 0.00573950773;
    y = y * w - 0.0076224613;
    y = y * w + 0.00943887047;
    y = y * w + 1.00167406;
    y = y * w + 2.83297682;
  }
  y *= size;
  for (int step = 0; step < 4; ++step) {
    const double tail = erfc(y);
    const double error = size < 0.5 ? erf(y) - size : log((1.0 - size) / tail) * tail;
    y -= error * 0.8862269254527580 * exp(y * y);  // sqrt(pi) / 2
  }
  return copysign(y, x);
}

}  // namespace special
