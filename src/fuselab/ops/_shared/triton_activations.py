"""The activations as Triton device functions, equivalent to ``activations.h`` in C++.

Only arithmetic, ``tl.fma`` and ``tl.exp`` are used, no libdevice, so that the interpreter and GPUs
of other vendors compute the same values. ``x`` is float32 or float64. The polynomials, the argument
reductions and their sources are those of ``activations.h``. ``ACTIVATION`` is a key of
``activations.ACTIVATIONS``; any other value fails to compile.

``DTYPE`` is what the result is rounded to. If it has 16 bits, ``x`` is float32, and the functions
are those of ``rounded_activations.h``, with relative errors below 1e-5.
"""

import triton
import triton.language as tl


@triton.jit
def _power_of_two(exponent, x):
    """Return 2^exponent in the dtype of ``x``."""
    if x.dtype == tl.float64:
        return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _reduced_exponential(y):
    """Return (n, expm1(y - n ln 2)), n the integer nearest to y / ln 2. ln 2 is subtracted in two
    parts, to keep its rounding error out of the remainder."""
    n = tl.floor(y * 1.4426950408889634 + 0.5)
    if y.dtype == tl.float64:
        r = (y - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
        s = r * 1.608717723438078228e-10 + 2.091896183779577806e-9
        s = s * r + 2.505206959479568481e-8
        s = s * r + 2.755726102934376868e-7
        s = s * r + 2.755731924863382554e-6
        s = s * r + 2.480158733856534555e-5
        s = s * r + 0.0001984126984126276255
        s = s * r + 0.001388888888887826895
        s = s * r + 0.008333333333333334077
        s = s * r + 0.04166666666666667782
        s = s * r + 0.1666666666666666667
        s = s * r + 0.5
    else:
        r = (y - n * 0.693359375) - n * -2.12194440054690583e-4
        s = r * 0.0001989198131397770 + 0.001393454192827026
        s = s * r + 0.008333310024225292
        s = s * r + 0.04166645680967788
        s = s * r + 0.1666666668253436
        s = s * r + 0.5000000014286223
    return n.to(tl.int32), r * r * s + r


@triton.jit
def _exponential(y):
    """Return exp(y) for y <= 0, including subnormal results."""
    lowest = -746.0 if y.dtype == tl.float64 else -104.0
    exponent, fraction = _reduced_exponential(tl.where(y < lowest, lowest, y))
    half = exponent >> 1
    scale = _power_of_two(half, y)
    return (scale * fraction + scale) * _power_of_two(exponent - half, y)


@triton.jit
def _logistic(x, ROUNDED: tl.constexpr):
    """Return sigmoid(x) and 1 - sigmoid(x), both to full relative precision."""
    small = tl.exp(-tl.abs(x)) if ROUNDED else _exponential(-tl.abs(x))
    below = small / (1.0 + small)
    above = 1.0 / (1.0 + small)
    return tl.where(x < 0, below, above), tl.where(x < 0, above, below)


@triton.jit
def _normal(x, ROUNDED: tl.constexpr):
    """Return the standard normal distribution function and density at x."""
    last = 39.0 if x.dtype == tl.float64 else 14.5
    a = tl.abs(x)
    a = tl.where(a > last, last, a)
    square = a * a
    if ROUNDED:
        density = tl.exp(-0.5 * square)
    else:
        density = _exponential(-0.5 * square)
        # The rounding error of the square. It comes out as 0 where fma is not fused (interpreter).
        density -= density * (0.5 * tl.fma(a, a, -square))
    if ROUNDED:
        t = (a - 3.9) / (a + 3.9)
        p = t * 0.0006498358175 + -0.0001320101425
        p = p * t + -0.007003281696
        p = p * t + 0.02868656509
        p = p * t + -0.07005863202
        p = p * t + 0.1248924043
        p = p * t + -0.1735534231
        p = p * t + 0.09658767854
    elif x.dtype == tl.float64:
        t = (a - 5.0) / (a + 5.0)
        p = t * -2.32680238858283768e-10 + -5.71149353021902937e-10
        p = p * t + 1.82756401794652064e-9
        p = p * t + 5.69304849415747454e-9
        p = p * t + -1.09960253089622625e-8
        p = p * t + -3.91718338898170037e-8
        p = p * t + 7.71067086734422732e-8
        p = p * t + 2.43348400480409556e-7
        p = p * t + -6.75077565371341937e-7
        p = p * t + -1.27007590938227019e-6
        p = p * t + 6.64442065958085039e-6
        p = p * t + 9.61305968607503882e-7
        p = p * t + -6.0427482631307459e-5
        p = p * t + 0.000134276843393246534
        p = p * t + 0.000219550737596144771
        p = p * t + -0.00237884435668834706
        p = p * t + 0.00899137055059229452
        p = p * t + -0.0234139004876924815
        p = p * t + 0.047855352284169919
        p = p * t + -0.0808838772641274064
        p = p * t + 0.116068811886003296
        p = p * t + -0.143457555264011972
        p = p * t + 0.0769193049750062959
    else:
        t = (a - 4.0) / (a + 4.0)
        p = t * 7.095604523e-6 + -5.630033547e-5
        p = p * t + -0.0001739593553
        p = p * t + 0.000648930871
        p = p * t + 0.000504815184
        p = p * t + -0.008494938757
        p = p * t + 0.03086500733
        p = p * t + -0.07170711166
        p = p * t + 0.1243792506
        p = p * t + -0.17039773
        p = p * t + 0.09441064134
    tail = density * p
    return tl.where(x < 0, tail, 1.0 - tail), density * 0.39894228040143268


@triton.jit
def _hyperbolic_tangent(x, ROUNDED: tl.constexpr):
    """Return the hyperbolic tangent of x."""
    if ROUNDED:
        size = tl.abs(x)
        square = x * x
        series = square * -0.04440221 + 0.13190296
        series = series * square - 0.33326318
        series = series * square + 0.99999946
        e = tl.exp(-2.0 * size)
        magnitude = tl.where(size < 0.5, series * size, (1.0 - e) / (1.0 + e))
    else:
        lowest = -60.0 if x.dtype == tl.float64 else -30.0
        y = -2.0 * tl.abs(x)
        exponent, fraction = _reduced_exponential(tl.where(y < lowest, lowest, y))
        scale = _power_of_two(exponent, x)
        e = scale * fraction + scale
        one_minus_e = (1.0 - scale) - scale * fraction
        saturating = e < 0.3333333333333333
        ratio = tl.where(saturating, 2.0 * e, one_minus_e) / (1.0 + e)
        magnitude = tl.where(saturating, 1.0 - ratio, ratio)
    # tanh(-0.0) is -0.0, so a zero is returned as it is.
    return tl.where(x < 0, -magnitude, tl.where(x == 0, x, magnitude))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Return the activation of ``x`` as ``DTYPE``."""
    ROUNDED: tl.constexpr = DTYPE.primitive_bitwidth == 16
    tl.static_assert(
        ACTIVATION == "identity"
        or ACTIVATION == "relu"
        or ACTIVATION == "leaky_relu"
        or ACTIVATION == "gelu"
        or ACTIVATION == "gelu_tanh"
        or ACTIVATION == "silu"
        or ACTIVATION == "sigmoid"
        or ACTIVATION == "tanh"
    )
    if ACTIVATION == "relu":
        # NaN compares false and is kept, as in PyTorch; tl.maximum would drop it.
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "leaky_relu":
        x = tl.where(x > 0, x, x * 0.01)
    elif ACTIVATION == "gelu":
        distribution, _density = _normal(x, ROUNDED)
        x = x * distribution
    elif ACTIVATION == "gelu_tanh":
        twice_u = x * (x * x * 0.07135481627260025 + 1.5957691216057308)
        gate, _complement = _logistic(twice_u, ROUNDED)
        x = x * gate
    elif ACTIVATION == "silu":
        gate, _complement = _logistic(x, ROUNDED)
        x = x * gate
    elif ACTIVATION == "sigmoid":
        x, _complement = _logistic(x, ROUNDED)
    elif ACTIVATION == "tanh":
        x = _hyperbolic_tangent(x, ROUNDED)
    return x.to(DTYPE)


@triton.jit
def pull_back(grad, saved, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Return the gradient of the pre-activation. ``saved`` is the output for relu, leaky_relu,
    sigmoid and tanh, and the pre-activation for gelu, gelu_tanh and silu; identity ignores it.
    ``DTYPE`` is the upstream gradient's, in which PyTorch has the result too."""
    ROUNDED: tl.constexpr = DTYPE.primitive_bitwidth == 16
    if ACTIVATION == "relu":
        grad = tl.where(saved <= 0, 0.0, grad)
    elif ACTIVATION == "leaky_relu":
        grad = tl.where(saved > 0, grad, grad * 0.01)
    elif ACTIVATION == "gelu":
        distribution, density = _normal(saved, ROUNDED)
        grad = grad * (distribution + saved * density)
    elif ACTIVATION == "gelu_tanh":
        square = saved * saved
        twice_u = saved * (square * 0.07135481627260025 + 1.5957691216057308)
        gate, complement = _logistic(twice_u, ROUNDED)
        slope = square * 0.21406444881780074 + 1.5957691216057308
        grad = grad * (gate + saved * gate * complement * slope)
    elif ACTIVATION == "silu":
        gate, complement = _logistic(saved, ROUNDED)
        grad = grad * (gate * (saved * complement + 1.0))
    elif ACTIVATION == "sigmoid":
        grad = grad * (saved * (1.0 - saved))
    elif ACTIVATION == "tanh":
        grad = grad * (1.0 - saved * saved)
    return grad
