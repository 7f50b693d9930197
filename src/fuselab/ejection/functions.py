"""The scalar functions of expressions, as source text in each language.

``{0}``, ``{1}`` stand for the operands. A text that is not a name, a number or a call is put in
parentheses where it becomes an operand.
"""

from __future__ import annotations

from fuselab.ejection.integers import NARROWING

TRITON: dict[str, str] = {
    "abs": "tl.abs({0})",
    "acos": "libdevice.acos({0})",
    "acosh": "libdevice.acosh({0})",
    "add": "{0} + {1}",
    "and": "{0} & {1}",
    "asin": "libdevice.asin({0})",
    "asinh": "libdevice.asinh({0})",
    "atan": "libdevice.atan({0})",
    "atan2": "libdevice.atan2({0}, {1})",
    "atanh": "libdevice.atanh({0})",
    "ceil": "tl.ceil({0})",
    "cos": "libdevice.cos({0})",
    "cosh": "libdevice.cosh({0})",
    "digamma": "math.digamma({0})",
    "div": "{0} / {1}",
    "eq": "{0} == {1}",
    "erf": "math.erf({0}, ROUNDED)",
    "erfc": "libdevice.erfc({0})",
    "erfinv": "libdevice.erfinv({0})",
    "exp": "math.exp({0}, ROUNDED)",
    "exp2": "libdevice.exp2({0})",
    "expm1": "math.expm1({0}, ROUNDED)",
    "floor": "tl.floor({0})",
    "fmod": "libdevice.fmod({0}, {1})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "hypot": "libdevice.hypot({0}, {1})",
    "intdiv": "({0} // {1})",
    "invert": "~{0}",
    "isinf": "tl.abs({0}) == float('inf')",
    "isnan": "{0} != {0}",
    "kept": "philox.kept({0}, {1}, {2}, {3})",
    "le": "{0} <= {1}",
    "lgamma": "libdevice.lgamma({0})",
    "log": "math.log({0}, ROUNDED)",
    "log10": "libdevice.log10({0})",
    "log1p": "math.log1p({0}, ROUNDED)",
    "log2": "libdevice.log2({0})",
    "lt": "{0} < {1}",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "mul": "{0} * {1}",
    "ne": "{0} != {1}",
    "neg": "-{0}",
    "not": "{0} == 0",
    "or": "{0} | {1}",
    "pow": "libdevice.pow({0}, {1})",
    "reciprocal": "1.0 / {0}",
    "relu": "tl.where({0} < 0, 0.0, {0})",
    "round": "libdevice.nearbyint({0})",
    "rsqrt": "math.rsqrt({0}, ROUNDED)",
    "shl": "({0} << {1})",
    "shr": "({0} >> {1})",
    "sigmoid": "math.sigmoid({0}, ROUNDED)",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
    "sin": "libdevice.sin({0})",
    "sinh": "libdevice.sinh({0})",
    "sqrt": "libdevice.sqrt({0})",
    "sub": "{0} - {1}",
    "tan": "libdevice.tan({0})",
    "tanh": "math.tanh({0}, ROUNDED)",
    "to_bool": "{0} != 0",
    "to_float": "{0}.to(COMPUTE)",
    "to_int": "{0}.to(tl.int64)",
    **{name: f"{{0}}.to(tl.{name})" for name in NARROWING.values()},
    "trigamma": "math.trigamma({0})",
    "trunc": "libdevice.trunc({0})",
    "where": "tl.where({0}, {1}, {2})",
    "xor": "{0} ^ {1}",
}

# For each reduction: the step that adds an element, and the reduction of a tile along its columns.
TRITON_REDUCTIONS: dict[str, tuple[str, str]] = {
    "sum": ("{0} + {1}", "tl.sum({0}, 1)"),
    "amax": ("larger({0}, {1})", "tl.reduce({0}, 1, larger)"),
    "amin": ("smaller({0}, {1})", "tl.reduce({0}, 1, smaller)"),
    "prod": ("{0} * {1}", "tl.reduce({0}, 1, product)"),
}


# For each scan of a tile along its columns; its steps are those of the reductions.
TRITON_SCANS: dict[str, str] = {
    "sum": "tl.cumsum({0}, 1)",
    "amax": "tl.associative_scan({0}, 1, larger)",
    "amin": "tl.associative_scan({0}, 1, smaller)",
    "prod": "tl.associative_scan({0}, 1, product)",
}


def triton_neutral(function: str, kind: str) -> str:
    """Return the number that changes no result of a reduction."""
    if kind == "int":
        return {"sum": "0", "prod": "1", "amax": str(-(2**63)), "amin": str(2**63 - 1)}[function]
    infinity = "float('inf')"
    return {"sum": "0.0", "prod": "1.0", "amax": "float('-inf')", "amin": infinity}[function]


# ``V`` is the kernel's vector of real numbers; the functions of ``math`` are in ``cpu_math.h``.
CPP: dict[str, str] = {
    "abs": "math::abs({0})",
    "acos": "math::acos({0})",
    "acosh": "math::acosh({0})",
    "add": "{0} + {1}",
    "and": "{0} & {1}",
    "asin": "math::asin({0})",
    "asinh": "math::asinh({0})",
    "atan": "math::atan({0})",
    "atan2": "math::atan2({0}, {1})",
    "atanh": "math::atanh({0})",
    "ceil": "math::ceil({0})",
    "cos": "math::cos({0})",
    "cosh": "math::cosh({0})",
    "digamma": "math::digamma({0})",
    "div": "{0} / {1}",
    "eq": "{0} == {1}",
    "erf": "math::erf({0})",
    "erfc": "math::erfc({0})",
    "erfinv": "math::erfinv({0})",
    "exp": "math::exp({0})",
    "exp2": "math::exp2({0})",
    "expm1": "math::expm1({0})",
    "floor": "math::floor({0})",
    "fmod": "math::fmod({0}, {1})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "hypot": "math::hypot({0}, {1})",
    "intdiv": "{0} / {1}",
    "invert": "~{0}",
    "isinf": "math::abs({0}) == Real(INFINITY)",
    "isnan": "{0} != {0}",
    "kept": "math::kept<V>({0}, {1}, {2}, {3})",
    "le": "{0} <= {1}",
    "lgamma": "math::lgamma({0})",
    "log": "math::log({0})",
    "log10": "math::log10({0})",
    "log1p": "math::log1p({0})",
    "log2": "math::log2({0})",
    "lt": "{0} < {1}",
    "maximum": "math::maximum({0}, {1})",
    "minimum": "math::minimum({0}, {1})",
    "mul": "{0} * {1}",
    "ne": "{0} != {1}",
    "neg": "-{0}",
    "not": "{0} == 0",
    "or": "{0} | {1}",
    "pow": "math::pow({0}, {1})",
    "reciprocal": "Real(1) / {0}",
    "relu": "math::relu({0})",
    "round": "math::round({0})",
    "rsqrt": "math::rsqrt({0})",
    "shl": "{0} << {1}",
    "shr": "{0} >> {1}",
    "sigmoid": "math::sigmoid({0})",
    "sign": "math::sign({0})",
    "sin": "math::sin({0})",
    "sinh": "math::sinh({0})",
    "sqrt": "math::sqrt({0})",
    "sub": "{0} - {1}",
    "tan": "math::tan({0})",
    "tanh": "math::tanh({0})",
    "to_bool": "{0} != 0",
    **{name: f"math::narrowed<V, {name}_t>({{0}})" for name in NARROWING.values()},
    "trigamma": "math::trigamma({0})",
    "trunc": "math::trunc({0})",
    "where": "math::where({0}, {1}, {2})",
    "xor": "{0} ^ {1}",
}

# A change of kind, by the kinds from and to which it goes.
CPP_CASTS: dict[tuple[str, str], str] = {
    ("bool", "float"): "math::real_of_mask<V>({0})",
    ("bool", "int"): "math::integer_of_mask<V>({0})",
    ("int", "float"): "math::real_of_integer<V>({0})",
    ("int", "bool"): "math::unequal<V>({0}, int64_t(0))",
    ("float", "int"): "math::integer_of_real<V>({0})",
    ("float", "bool"): "{0} != 0",
}

# Functions that take longer than to load a value from the cache; divisions and roots the least so.
CPP_DIVISIONS = frozenset({"div", "reciprocal", "rsqrt", "sqrt"})
CPP_SLOW = CPP_DIVISIONS | frozenset(
    """acos acosh asin asinh atan atan2 atanh cos cosh digamma erf erfc erfinv exp exp2 expm1 fmod
    hypot kept lgamma log log10 log1p log2 pow sigmoid sin sinh tan tanh trigamma""".split()  # noqa: SIM905
)

# The class of ``cpu_sweep.h`` for each reduction.
CPP_REDUCTIONS = {"sum": "Sum", "amax": "Maximum", "amin": "Minimum", "prod": "Product"}

# Operands of a kind other than the result's are converted by the emitter.
CUDA: dict[str, str] = {
    "abs": "fabs({0})",
    "acos": "acos({0})",
    "acosh": "acosh({0})",
    "add": "{0} + {1}",
    "and": "{0} & {1}",
    "asin": "asin({0})",
    "asinh": "asinh({0})",
    "atan": "atan({0})",
    "atan2": "atan2({0}, {1})",
    "atanh": "atanh({0})",
    "ceil": "ceil({0})",
    "cos": "cos({0})",
    "cosh": "cosh({0})",
    "digamma": "special::digamma({0})",
    "div": "{0} / {1}",
    "eq": "{0} == {1}",
    "erf": "erf({0})",
    "erfc": "erfc({0})",
    "erfinv": "erfinv({0})",
    "exp": "exp({0})",
    "exp2": "exp2({0})",
    "expm1": "expm1({0})",
    "floor": "floor({0})",
    "fmod": "fmod({0}, {1})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "hypot": "hypot({0}, {1})",
    "intdiv": "{0} / {1}",
    "invert": "~{0}",
    "isinf": "fabs({0}) == infinity<Real>()",
    "isnan": "{0} != {0}",
    "kept": "philox::kept({0}, {1}, {2}, {3})",
    "le": "{0} <= {1}",
    "lgamma": "lgamma({0})",
    "log": "log({0})",
    "log10": "log10({0})",
    "log1p": "log1p({0})",
    "log2": "log2({0})",
    "lt": "{0} < {1}",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "mul": "{0} * {1}",
    "ne": "{0} != {1}",
    "neg": "-{0}",
    "not": "{0} == 0",
    "or": "{0} | {1}",
    "pow": "pow({0}, {1})",
    "reciprocal": "Real(1) / {0}",
    "relu": "{0} < Real(0) ? Real(0) : {0}",
    "round": "rint({0})",
    "rsqrt": "rsqrt({0})",
    "shl": "{0} << {1}",
    "shr": "{0} >> {1}",
    "sigmoid": "Real(1) / (Real(1) + exp(-{0}))",
    "sign": "sign_of({0})",
    "sin": "sin({0})",
    "sinh": "sinh({0})",
    "sqrt": "sqrt({0})",
    "sub": "{0} - {1}",
    "tan": "tan({0})",
    "tanh": "tanh({0})",
    "to_bool": "{0} != 0",
    "to_float": "Real({0})",
    "to_int": "int64_t({0})",
    **{name: f"int64_t({name}_t({{0}}))" for name in NARROWING.values()},
    "trigamma": "special::trigamma({0})",
    "trunc": "trunc({0})",
    "where": "{0} ? {1} : {2}",
    "xor": "{0} ^ {1}",
}

# The C++ functions for powers with these exponents.
CUDA_POWERS: dict[float, str] = {
    -1: "Real(1) / {0}",
    -0.5: "rsqrt({0})",
    0.5: "sqrt({0})",
    1: "{0}",
    2: "squared({0})",
    3: "cubed({0})",
}

# The C++ functions that compare integers.
CPP_INTEGER_COMPARISONS: dict[str, str] = {
    "eq": "math::equal<V>({0}, {1})",
    "ge": "math::at_most<V>({1}, {0})",
    "gt": "math::less<V>({1}, {0})",
    "le": "math::at_most<V>({0}, {1})",
    "lt": "math::less<V>({0}, {1})",
    "ne": "math::unequal<V>({0}, {1})",
}

# Functions of integers that positions take without becoming vectors (cpu_positions.h).
CPP_INTEGERS: dict[str, str] = {
    "abs": "math::absolute_integer<V>({0})",
    "maximum": "math::larger_integer<V>({0}, {1})",
    "minimum": "math::smaller_integer<V>({0}, {1})",
    "where": "math::where_integer<V>({0}, {1}, {2})",
}

# The types of `runtime/include/cuda_sweep.h` that join the elements of each reduction.
CUDA_REDUCTIONS: dict[str, str] = {
    "sum": "Sum",
    "amax": "Largest",
    "amin": "Smallest",
    "prod": "Product",
}
