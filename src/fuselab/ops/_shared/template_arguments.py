"""Arguments of CUDA C++ and C++ kernels, and of their templates, from Python values."""

from __future__ import annotations

from collections.abc import Sequence

from fuselab.runtime.parameters import Scalar, i64


def numbers(*groups: Sequence[int]) -> list[Scalar]:
    """Return the groups' numbers, one after the other, as 64-bit parameters."""
    return [i64(number) for group in groups for number in group]


def flags(*values: bool) -> str:
    """Return Boolean template arguments as C++ spells them: ``true, false``."""
    return ", ".join(str(value).lower() for value in values)


def index_type(is_wide: bool) -> str:
    """Return the C++ type of offsets: 64-bit where ``is_wide``."""
    return "int64_t" if is_wide else "int32_t"
