"""Additions to the Triton interpreter: libdevice's functions, bounds of loops in Triton 3.6, and
comparisons of single numbers.

On a GPU, Triton replaces ``triton.language.extra.libdevice`` by the device's functions when it
compiles a kernel. The interpreter calls the module's placeholders, which return None. ``install``
puts functions in their place that compute with PyTorch, in the child process of
``runtime/interpreter.py`` alone.

The interpreter keeps a number as an array of one element. Triton 3.6 makes a loop's bound of it by
``int(array)``, which NumPy refuses from 2.4 on; ``install`` takes the element. It notes for the
result of a comparison the type of what was compared; a single one that becomes a block, as beside
one, would turn into a block of that type, 0.0 and 1.0, which ``|`` refuses. ``install`` notes int1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from fuselab.runtime import interpreted_bfloat16, interpreted_scans

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atan2": torch.atan2,
    "atanh": torch.atanh,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "fast_dividef": torch.div,
    "fast_expf": torch.exp,
    "fast_logf": torch.log,
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "lgamma": torch.lgamma,
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "nearbyint": torch.round,
    "pow": torch.pow,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sqrt": torch.sqrt,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
}


def install() -> None:
    """Replace the placeholders of ``triton.language.extra.libdevice``, and how the interpreter
    makes an int of a number, compares, scans, reduces and computes in bfloat16."""
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    interpreted_scans.install()
    interpreted_bfloat16.install()
    patch_tensor: Any = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda one: int(one.handle.data.item()))
        for name, text in (("__repr__", repr), ("__str__", str)):
            scope.set_attr(tensor, name, _of_values(text))

    interpreter._patch_lang_tensor = patch_with_index

    builder = interpreter.InterpreterBuilder
    for name in [one for one in dir(builder) if one.startswith(("create_fcmp", "create_icmp"))]:
        setattr(builder, name, _of_bools(getattr(builder, name)))
    for name, function in FUNCTIONS.items():
        setattr(libdevice, name, _interpreted(function))


def _of_values(text: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda one: text(interpreted_bfloat16.values(one.handle))


def _of_bools(compare: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, one: Any, other: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        return TensorHandle(compare(self, one, other).data, tl.int1)

    return call


def _interpreted(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def call(*operands: Any, **_: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        given = [operand for operand in operands if isinstance(operand, tl.tensor)]
        # A block beside a scalar gives a block.
        first = next((one for one in given if one.type.is_block()), given[0])
        arrays = [
            operand.handle.data if isinstance(operand, tl.tensor) else operand
            for operand in operands
        ]
        like = first.handle.data
        tensors = numpy.broadcast_arrays(*(numpy.asarray(array, like.dtype) for array in arrays))
        computed = function(*(torch.from_numpy(array.copy()) for array in tensors)).numpy()
        return tl.tensor(TensorHandle(computed, first.dtype.scalar), _type_of(first, computed))

    return call


def _type_of(first: Any, computed: Any) -> Any:
    import triton.language as tl

    scalar = first.dtype.scalar
    return tl.block_type(scalar, list(computed.shape)) if first.type.is_block() else scalar
