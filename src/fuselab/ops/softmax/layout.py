"""The layout of the rows of a strided tensor, for a softmax over one of its dimensions.

The output is contiguous, so its rows are either contiguous (``dim`` is the last dimension, except
for dimensions of size 1) or columns. The input is read in place if a count and two strides can
describe where each row begins; other layouts are copied first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import FLOATING

Form = Literal["softmax", "log_softmax"]
FORMS: dict[Form, str] = {"softmax": "kSoftmax", "log_softmax": "kLogSoftmax"}  # in C++

# Elements further apart share no 32-byte sector, so that each costs a whole one: a copy is cheaper.
_NEAR = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor. Row outer * inner_count + inner begins at outer * outer_stride + inner
    * inner_stride, and has ``width`` elements, ``dim_stride`` apart.

    ``columns`` says that rows are columns of the output, which is then (outer, width, inner_count)
    with inner_count > 1, else (rows, width). Strides count elements; they are 0 for an expanded
    dimension, and for one that has no second element.
    """

    rows: int
    width: int
    inner_count: int
    outer_stride: int
    inner_stride: int
    dim_stride: int
    columns: bool

    @property
    def outer_count(self) -> int:
        return self.rows // self.inner_count

    @property
    def widest_offset(self) -> int:
        """The largest distance between two elements of one outer slice."""
        inner = self.inner_count if self.columns else 1
        return self.width * max(self.dim_stride, inner) + self.inner_count * self.inner_stride


def positive(dim: int, tensor: Tensor) -> int:
    """Return ``dim`` counted from the front."""
    return dim % max(tensor.dim(), 1)


def neighbours(tensor: Tensor, dim: int) -> int:
    """Return the distance between elements of one softmax in a contiguous tensor."""
    return math.prod(tensor.shape[dim % tensor.dim() + 1 :]) if tensor.dim() else 1


def rows_in_place_or_copied(tensor: Tensor, dim: int) -> tuple[Tensor, Rows]:
    """Return a non-empty tensor, or its contiguous copy if its layout needs one, and its rows."""
    rows = rows_of(tensor, dim)
    if rows is None:
        tensor = tensor.contiguous()
        rows = rows_of(tensor, dim)
        assert rows is not None
    return tensor, rows


def rows_of(tensor: Tensor, dim: int) -> Rows | None:
    """Return the rows of a non-empty tensor, or None if they cannot or should not be read in
    place."""
    if tensor.dim() == 0:
        return Rows(1, 1, 1, 0, 0, 1, columns=False)
    dim = positive(dim, tensor)
    shape, strides = tensor.shape, tensor.stride()
    width = shape[dim]
    dim_stride = strides[dim] if width > 1 else 1
    rows = tensor.numel() // width
    before = collapsed(shape[:dim], strides[:dim])
    after = collapsed(shape[dim + 1 :], strides[dim + 1 :])
    columns = bool(after)
    if columns:
        if len(before) > 1 or len(after) > 1 or after[0][1] > _NEAR:
            return None
        outer, inner = before[0] if before else (1, 0), after[0]
    else:
        if len(before) > 2 or dim_stride > _NEAR:
            return None
        outer, inner = before[0] if before else (1, 0), before[1] if len(before) > 1 else (1, 0)
    return Rows(rows, width, inner[0], outer[1], inner[1], dim_stride, columns)


def collapsed(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return (size, stride) of the fewest dimensions that visit the elements in the same order."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return found


def vector_length(rows: Rows, *tensors: Tensor) -> int:
    """Return the elements that one access of 16 bytes (of the widest dtype) may move in all these
    tensors.

    It is 1 if rows are strided, or if a tensor does not begin on 16 bytes: a launch plan knows no
    finer alignment.
    """
    if rows.dim_stride != 1 or any(tensor.data_ptr() % 16 for tensor in tensors):
        return 1
    widest = max(tensor.element_size() for tensor in tensors)
    return math.gcd(16 // widest, rows.width, rows.outer_stride, rows.inner_stride)


def empty_output(input: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a new, uninitialised output: contiguous whatever the input's strides, as from
    torch.softmax."""
    return torch.empty(input.shape, dtype=dtype or input.dtype, device=input.device)


def readable(input: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the input if a GPU kernel can read its dtype (and cast on the way), else a cast."""
    return input if input.dtype in FLOATING else input.to(dtype)


def empty_gradient(output: Tensor, input_dtype: torch.dtype) -> Tensor:
    """Return a new, uninitialised gradient in the input's dtype, or in the output's if no GPU
    kernel writes the input's."""
    dtype = input_dtype if input_dtype in FLOATING else output.dtype
    return torch.empty(output.shape, dtype=dtype, device=output.device)


def cast(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad if grad.dtype == dtype else grad.to(dtype)
