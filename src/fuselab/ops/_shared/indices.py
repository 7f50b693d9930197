"""The ids that operators take: their dtypes, their checks, and the type of their indices."""

from __future__ import annotations

import torch
from torch import Tensor

from fuselab.errors import DtypeError, ShapeError

ID_DTYPES = (torch.int64, torch.int32)
CPP_IDS = {torch.int64: "int64_t", torch.int32: "int32_t"}


def check_integers(op: str, name: str, tensor: Tensor, dimensions: int) -> None:
    """Raise DtypeError or ShapeError unless ``tensor`` is int64 or int32 with ``dimensions``
    dimensions."""
    if tensor.dtype not in ID_DTYPES:
        raise DtypeError(f"{op}: '{name}' is {tensor.dtype}; expected int64 or int32.")
    if tensor.dim() != dimensions:
        shape = {1: "one dimension", 2: "two dimensions, (samples, columns)"}[dimensions]
        raise ShapeError(
            f"{op}: '{name}' has shape {tuple(tensor.shape)}; expected a tensor of {shape}."
        )


def index_type(*counts: int) -> str:
    """Return the C++ type of kernel indices for tensors with these element counts. It is 32-bit
    where possible, because 32-bit division is faster."""
    return "int32_t" if max(counts) < 2**31 - 2**20 else "int64_t"


def is_readable(tensor: Tensor) -> bool:
    """Return whether Python may read the tensor's values: it is on the CPU, not being traced, and
    not wrapped by torch.func."""
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
