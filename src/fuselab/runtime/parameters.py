"""Kernel parameters: the typed values that a launch passes to a kernel.

A CUDA C++ or C++ kernel has typed parameters, but a Python number has no width: ``i32``, ``i64``,
``f32`` and ``f64`` give it one. A tensor is passed as its data pointer, None as a null pointer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuselab.errors import ArgumentError


class TracedFloat(float):
    """A float argument of an operator that remembers which one it is, while a plan is recorded.

    If an implementation passes it straight to a launch (``f32(scale)``), one plan serves all
    values. Any use of the value (arithmetic, comparison, bool, str, hash, ``float()``) is noted in
    ``seen``, and the plan then holds for this value only. Functions of ``math`` read a float's bits
    without a call that could be noted; ``launch_recording`` therefore ties every plan with an
    untraced float parameter to the floats' values.
    """

    __slots__ = ("index", "seen")

    index: int
    seen: set[int]

    def __new__(cls, value: float, index: int, seen: set[int]) -> TracedFloat:
        self = super().__new__(cls, value)
        self.index, self.seen = index, seen
        return self


def _noticed(name: str) -> Any:
    plain = getattr(float, name)

    def method(self: TracedFloat, *args: Any) -> Any:
        self.seen.add(self.index)
        return plain(self, *args)

    method.__name__ = name
    return method


_READS = (
    *("abs", "bool", "ceil", "eq", "float", "floor", "format", "ge", "gt", "hash", "int", "le"),
    *("lt", "ne", "neg", "pos", "repr", "round", "str", "trunc"),
    *(side + name for side in ("", "r") for name in ("add", "divmod", "floordiv", "mod", "mul")),
    *(side + name for side in ("", "r") for name in ("pow", "sub", "truediv")),
)
for _read in (*(f"__{name}__" for name in _READS), "as_integer_ratio", "hex", "is_integer"):
    setattr(TracedFloat, _read, _noticed(_read))


def plain(value: Any) -> Any:
    """Return ``value``, or a TracedFloat's plain float, which does not count as a use of it."""
    return float.__float__(value) if type(value) is TracedFloat else value


class Scalar:
    """A number with the width that the kernel declares; ``code`` is that width's letter."""

    __slots__ = ("value",)
    code = ""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({float(self.value)!r})"


class i32(Scalar):  # noqa: N801 -- spelt as the kernel's type
    """A 32-bit signed integer; raises ArgumentError for a value that does not fit."""

    __slots__ = ()
    code = "i"

    def __init__(self, value: int) -> None:
        if not -(2**31) <= value < 2**31:
            raise ArgumentError(f"i32({value}) does not fit 32 bits; pass i64.")
        self.value = int(value)


class i64(Scalar):  # noqa: N801
    """A 64-bit signed integer."""

    __slots__ = ()
    code = "l"

    def __init__(self, value: int) -> None:
        self.value = int(value)


class f32(Scalar):  # noqa: N801
    """A 32-bit float; a TracedFloat stays traced."""

    __slots__ = ()
    code = "f"


class f64(Scalar):  # noqa: N801
    """A 64-bit float; a TracedFloat stays traced."""

    __slots__ = ()
    code = "d"


class Struct(Scalar):
    """A struct by value: its bytes, laid out as the kernel declares it, and the tensors whose
    addresses go into it, each with the offset of its 8 bytes. Addresses come only from tensors,
    because the launcher writes them at every launch, also of a plan."""

    __slots__ = ()
    code = "s"

    def __init__(self, content: bytes, tensors: Sequence[tuple[int, Tensor]] = ()) -> None:
        self.value = content, tuple(tensors)

    @classmethod
    def of_arrays(cls, capacity: int, arrays: Sequence[Sequence[Tensor | int | None]]) -> Struct:
        """Return a struct of arrays of ``capacity`` 64-bit integers, padded with zeros. Tensors
        stand for their addresses, None for a null pointer."""
        words = [word for array in arrays for word in (*array, *[0] * (capacity - len(array)))]
        tensors = [(8 * at, word) for at, word in enumerate(words) if isinstance(word, Tensor)]
        numbers = [word if isinstance(word, int) else 0 for word in words]
        return cls(struct.pack(f"{len(words)}q", *numbers), tensors)

    def __repr__(self) -> str:
        return f"Struct({len(self.value[0])} bytes)"


class TensorMap(Scalar):
    """A CUtensorMap by value, from a (matrix, layout) of tensor_map.py; it is made for the matrix's
    address at every launch."""

    __slots__ = ()
    code = "m"

    def __repr__(self) -> str:
        return f"TensorMap({self.value[1]})"


def encode(args: Sequence[Tensor | Scalar | None]) -> tuple[str, list[Any]]:
    """Return one code letter per parameter (``t`` tensor, ``n`` null, ``s`` struct, ``m`` tensor
    map, ``i``, ``l``, ``f``, ``d``) and the values. Raises ArgumentError for anything else."""
    codes = []
    values: list[Any] = []
    for arg in args:
        if isinstance(arg, Scalar):
            codes.append(arg.code)
            values.append(arg.value)
        elif isinstance(arg, Tensor):
            codes.append("t")
            values.append(arg)
        elif arg is None:
            codes.append("n")
            values.append(None)
        else:
            raise ArgumentError(
                f"a launch got {arg!r}; pass tensors, None, or numbers as i32, i64, f32 or f64."
            )
    return "".join(codes), values
