"""The dtypes that operators take: their names in C++, and the refusal of all others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import DtypeError, UnsupportedDtypeError

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CUDA_NAMES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float64: "double",
}
CUDA_HALF_NAMES = {dtype: CUDA_NAMES[dtype] for dtype in (torch.float16, torch.bfloat16)}
CPP_NAMES = {
    torch.float32: "float",
    torch.float16: "Half",  # defined in cpu_vectors.h, as is BFloat16
    torch.bfloat16: "BFloat16",
    torch.float64: "double",
}


def check_floating(operator: str, **operands: Tensor | torch.dtype | None) -> None:
    """Raise UnsupportedDtypeError unless every operand has one of the dtypes in ``FLOATING``.
    Operands are given by argument name; None is skipped."""
    for name, operand in operands.items():
        dtype = operand.dtype if isinstance(operand, Tensor) else operand
        if dtype is not None and dtype not in FLOATING:
            mend = f" ({name}.float() gives it)" if isinstance(operand, Tensor) else ""
            raise UnsupportedDtypeError(
                f"{operator}: '{name}' is {dtype}; expected float32, float16, bfloat16 or float64"
                f"{mend}."
            )


def check_same_dtype(operator: str, **operands: Tensor | None) -> None:
    """Raise DtypeError unless every operand has the dtype of the first. Operands are given by
    argument name; None is skipped."""
    (first, expected), *others = operands.items()
    assert expected is not None
    for name, operand in others:
        if operand is not None and operand.dtype != expected.dtype:
            raise DtypeError(
                f"{operator}: '{name}' is {operand.dtype} and '{first}' {expected.dtype}; cast one "
                "to the other's dtype, or use torch.autocast."
            )


def cuda_types(dtypes: Iterable[torch.dtype]) -> str:
    """Return the template arguments of a CUDA kernel for these dtypes."""
    return ", ".join(CUDA_NAMES[dtype] for dtype in dtypes)


def cpp_types(dtypes: Iterable[torch.dtype]) -> str:
    """Return the template arguments of a C++ kernel for these dtypes."""
    return ", ".join(CPP_NAMES[dtype] for dtype in dtypes)


def promoted(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype that type promotion gives tensors of one or more dimensions."""
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def cast_operands(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
    """Cast an operator's arguments as ``torch.autocast`` does for a linear layer: every tensor by
    ``cast_floating``, those in sequences too. Other values are returned as they are."""

    def cast(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(cast, value))
        return cast_floating(value, autocast_dtype) if isinstance(value, Tensor) else value

    return tuple(map(cast, args))


def cast_floating(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Cast an operand as ``torch.autocast`` does: floating-point tensors but float64 to ``dtype``;
    other tensors, and None, are returned as they are."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
