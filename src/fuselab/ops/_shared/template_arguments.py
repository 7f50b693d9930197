"""Arguments of CUDA C++ and C++ kernels, and of their templates, from Python values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import CUDA_NAMES
from fuselab.runtime.parameters import Scalar, f32, f64, i64


def numbers(*groups: Sequence[int]) -> list[Scalar]:
    """Return the numbers of all groups, in order, as 64-bit parameters."""
    return [i64(number) for group in groups for number in group]


def flags(*values: bool) -> str:
    """Return Boolean template arguments as C++ spells them: ``true, false``."""
    return ", ".join(str(value).lower() for value in values)


def index_type(is_wide: bool) -> str:
    """Return the C++ type of offsets: int64_t if ``is_wide``, else int32_t."""
    return "int64_t" if is_wide else "int32_t"


# A float argument of an operator is a number or, under torch.compile, a tensor of one element.


def cpp_float(value: float | Tensor, arithmetic: torch.dtype) -> Scalar:
    """Return a float argument of a C++ kernel that computes in ``arithmetic``."""
    number = value.item() if isinstance(value, Tensor) else value
    return f64(number) if arithmetic == torch.float64 else f32(number)


def cuda_float(value: float | Tensor, arithmetic: torch.dtype) -> tuple[str, Tensor | Scalar]:
    """Return the C++ type of a float argument of a CUDA kernel, and the argument; a tensor is
    passed as a pointer."""
    if isinstance(value, Tensor):
        return f"const {CUDA_NAMES[value.dtype]}*", value
    return ("double", f64(value)) if arithmetic == torch.float64 else ("float", f32(value))
