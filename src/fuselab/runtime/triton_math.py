"""Elementary functions of Triton kernels, as exact as their results are kept.

Where ``ROUNDED`` is true, all results of the kernel are rounded to 16 bits and the arithmetic is in
float32. The functions are then made of the hardware's approximations of 2^x, log2, 1 / x and
1 / sqrt(x), and of polynomials where those lose digits. Their relative error is below 1e-5, a
fiftieth of the rounding of float16. Otherwise they are libdevice's, to 2 ulp.

Subnormal results are kept, which bfloat16 has as float32 does. Triton's libdevice and its ``fast_``
functions take subnormal numbers for 0, so they stand only where that cannot be seen in the result.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def exp(x, ROUNDED: tl.constexpr):
    """Return e^x."""
    if ROUNDED:
        result = tl.exp(x)
    elif x.dtype == tl.float32:
        # Below -87 the result is subnormal: e^x = e^(x + 64 high) e^(64 low) 2^-64, ln 2 being
        # high + low. The sum is exact.
        is_low = x < -87.0
        result = libdevice.exp(tl.where(is_low, x + 44.361328125, x))
        result = tl.where(is_low, result * 1.0000914350 * 5.421010862427522e-20, result)
    else:
        result = libdevice.exp(x)
    return result


@triton.jit
def expm1(x, ROUNDED: tl.constexpr):
    """Return e^x - 1."""
    if ROUNDED:
        series = x * 0.00833332 + 0.04187925  # minimax for |x| < 0.35, relative error 5e-7
        series = series * x + 0.16666946
        series = series * x + 0.49999352
        series = series * x + 0.99999994
        result = tl.where(tl.abs(x) < 0.35, series * x, libdevice.fast_expf(x) - 1.0)
    else:
        result = _identity_near_zero(x, libdevice.expm1(x))
    return result


@triton.jit
def erf(x, ROUNDED: tl.constexpr):
    """Return the error function. The polynomials are N. Juffa's (absolute error 2e-7)."""
    if ROUNDED:
        square = x * x
        near = square * -5.96761703e-4 + 4.99119423e-3
        near = near * square - 2.67681349e-2
        near = near * square + 1.12819925e-1
        near = near * square - 3.76125336e-1
        near = near * square + 1.28379166e-1
        size = tl.abs(x)
        far = (size * -1.72853470e-5 + 3.83197126e-4) * square
        far = far + (size * -3.88396438e-3 + 2.42546219e-2)
        far = far * size - 1.06777877e-1
        far = far * size - 6.34846687e-1
        far = far * size - 1.28717512e-1
        far = 1.0 - libdevice.fast_expf(far * size - size)
        result = tl.where(size > 0.927734375, tl.where(x < 0, -far, far), near * x + x)
    else:
        result = _identity_near_zero(x, libdevice.erf(x), 1.1283791670955126)
    return result


@triton.jit
def log(x, ROUNDED: tl.constexpr):
    """Return the natural logarithm."""
    if ROUNDED:
        result = tl.log(x)
    elif x.dtype == tl.float32:
        is_low = x < 1.1754944e-38
        result = libdevice.log(tl.where(is_low, x * 4294967296.0, x))
        result = tl.where(is_low, result - 22.180709777918249, result)
    else:
        result = libdevice.log(x)
    return result


@triton.jit
def log1p(x, ROUNDED: tl.constexpr):
    """Return log(1 + x)."""
    if ROUNDED:
        series = x * -0.18096759 + 0.21419544  # minimax for |x| < 0.25, relative error 2e-6
        series = series * x - 0.24955738
        series = series * x + 0.33299421
        series = series * x - 0.50000331
        series = series * x + 1.00000119
        result = tl.where(tl.abs(x) < 0.25, series * x, libdevice.fast_logf(1.0 + x))
    else:
        result = _identity_near_zero(x, libdevice.log1p(x))
    return result


@triton.jit
def rsqrt(x, ROUNDED: tl.constexpr):
    """Return 1 / sqrt(x)."""
    return tl.rsqrt(x) if ROUNDED else 1.0 / libdevice.sqrt(x)


@triton.jit
def sigmoid(x, ROUNDED: tl.constexpr):
    """Return 1 / (1 + e^-x)."""
    return 1.0 / (1.0 + (libdevice.fast_expf(-x) if ROUNDED else libdevice.exp(-x)))


@triton.jit
def tanh(x, ROUNDED: tl.constexpr):
    """Return the hyperbolic tangent."""
    if ROUNDED:
        square = x * x
        series = square * -0.04440221 + 0.13190296  # minimax for |x| < 0.5, relative error 6e-7
        series = series * square - 0.33326318
        series = series * square + 0.99999946
        # e^2x is infinite from 44.4 on, and 2 / infinity is 0.
        saturating = 1.0 - libdevice.fast_dividef(2.0, 1.0 + libdevice.fast_expf(2.0 * x))
        result = tl.where(tl.abs(x) < 0.5, series * x, saturating)
    else:
        result = _identity_near_zero(x, libdevice.tanh(x))
    return result


@triton.jit
def digamma(x):
    """Return the derivative of log(gamma(x)), by Stirling's series from 10 on: infinite at 0, NaN
    at the negative integers."""
    # tan has the period pi, so that the nearest whole number keeps float32's digits at the poles.
    # In float64 PyTorch takes the part behind the point.
    whole = libdevice.nearbyint(x) if x.dtype == tl.float32 else libdevice.trunc(x)
    fraction = x - whole
    # Two constants would choose float32, whatever the other operands are.
    reflected = -3.141592653589793 / libdevice.tan(fraction * 3.141592653589793)
    reflected = tl.where(fraction == 0, float("nan"), reflected)
    result = tl.where(x < 0, reflected, 0.0)
    x = tl.where(x < 0, 1.0 - x, x)
    for _ in tl.static_range(10):
        is_low = x < 10.0
        result = tl.where(is_low, result - 1.0 / x, result)
        x = tl.where(is_low, x + 1.0, x)
    square = 1.0 / (x * x)
    series = square * 0.08333333333333333 - 0.021092796092796094
    series = series * square + 0.007575757575757576
    series = series * square - 0.004166666666666667
    series = series * square + 0.003968253968253968
    series = series * square - 0.008333333333333333
    series = series * square + 0.08333333333333333
    return result + libdevice.log(x) - 0.5 / x - series * square


@triton.jit
def trigamma(x):
    """Return the derivative of ``digamma``: the first six terms of its sum, and of the others
    Stirling's series. Left of 1 / 2 it is reflected."""
    is_left = x < 0.5
    sine = libdevice.sin(tl.where(is_left, x, 0.5) * 3.141592653589793)
    x = tl.where(is_left, 1.0 - x, x)
    end = 1.0 / (x + 6.0)
    square = end * end
    total = square * 0.023809523809523808 - 0.03333333333333333
    total = (total * square + 0.16666666666666666) * square * end + 0.5 * square + end
    for k in tl.static_range(6):
        term = 1.0 / (x + (5.0 - k))
        total += term * term
    return tl.where(is_left, 9.869604401089358 / (sine * sine) - total, total)


@triton.jit
def _identity_near_zero(x, value, slope: tl.constexpr = 1.0):
    """Return ``value``, and ``slope * x`` where that is the function's value to the last bit."""
    return tl.where(tl.abs(x) < 1e-20, x * slope, value)
