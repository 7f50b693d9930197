"""Arithmetic of Triton's interpreter in bfloat16, which it computes with the bits as integers.

NumPy has no bfloat16, so the interpreter keeps the 16 bits as ``uint16``. It converts them to
float32 and back where a kernel casts, but ``x + x`` adds the integers, ``tl.dot`` multiplies them,
and a constant beside them is an AttributeError. Here they are computed in float32, and the result
is cut to 16 bits by the interpreter's own cast, which truncates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

# What computes with values: each takes handles of tensors, then what is no tensor.
_COMPUTED = ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_dot")


def install() -> None:
    """Replace how the interpreter computes with bfloat16, casts it and makes it of a number."""
    from triton.runtime.interpreter import InterpreterBuilder

    builder: Any = InterpreterBuilder
    builder.cast_impl = _cast(builder.cast_impl)
    builder.get_bf16 = _constant
    for name in _COMPUTED:
        setattr(builder, name, _in_float32(getattr(builder, name)))


def values(handle: Any) -> Any:
    """Return a tensor's array, of bfloat16 its values in float32."""
    if not _is_bfloat16(handle):
        return handle.data
    return (numpy.asarray(handle.data).astype(numpy.uint32) << 16).view(numpy.float32)


def _is_bfloat16(value: Any) -> bool:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compute`` with operands in float32 and the result in bfloat16, unless it is of
    Booleans or of a wider accumulator."""
    import triton.language as tl

    def call(self: Any, *given: Any) -> Any:
        if not any(map(_is_bfloat16, given)):
            return compute(self, *given)
        wide = [self.cast_impl(one, tl.float32) if _is_bfloat16(one) else one for one in given]
        result = compute(self, *wide)
        is_wider = result.data.dtype == bool or (
            len(given) > 2 and hasattr(given[2], "dtype") and not _is_bfloat16(given[2])
        )
        return result if is_wider else self.cast_impl(result, tl.bfloat16)

    return call


def _cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Return a cast that goes from and to bfloat16 by way of float32, for other types too."""
    import triton.language as tl

    def call(self: Any, source: Any, wanted: Any) -> Any:
        kinds = (source.dtype.scalar, wanted.scalar)
        if tl.bfloat16 not in kinds or tl.float32 in kinds or kinds[0] == kinds[1]:
            return cast(self, source, wanted)
        return cast(self, cast(self, source, tl.float32), wanted)

    return call


def _constant(self: Any, value: float) -> Any:
    """Return a number in bfloat16."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    number = TensorHandle(numpy.array([value], numpy.float32), tl.float32)
    return self.cast_impl(number, tl.bfloat16)
