"""Helpers for operators with a linear layer, ``input Wᵀ``: operands as matrices, shape checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ShapeError


def as_rows(tensor: Tensor) -> Tensor:
    """Return ``(..., K)`` as a matrix ``(rows, K)``: a view where strides allow, else a copy."""
    rows = tensor.shape[:-1].numel()
    return tensor.reshape(rows, tensor.shape[-1])


def row_readable(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its last dimension is contiguous, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] < 2 else tensor.contiguous()


def empty_output(input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Return a new, uninitialised output of ``F.linear(input, weight)``: ``(..., N)``. It is also
    ``FusedOp.fake`` of an operator whose first arguments these are."""
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``F.linear`` of a matrix through torch.mm or torch.addmm, which a launch plan can
    record."""
    if bias is None:
        return torch.mm(rows, weight.t())
    return torch.addmm(bias, rows, weight.t())


# Multiplications of a product from which on two copies are made to align its depth.
_LARGE_PRODUCT = 2**30


def depth_aligned(rows: int, columns: int, *matrices: Tensor) -> tuple[Tensor, ...]:
    """Return the matrices of a (rows, columns) product with their depth, the second dimension,
    padded with zeros to a multiple of 16 bytes, if the product is large, in 16 bits and on a GPU.

    cuBLAS computes 50000x367->512 in bfloat16 at 84 TFLOP/s on an H200, because rows of 367
    elements begin between its vectors. With the copies and relu it takes 97 us for 224. The size
    from which it pays is not timed. Small products, other dtypes and CPUs get the matrices as they
    are.
    """
    depth, itemsize = matrices[0].shape[1], matrices[0].element_size()
    extra = -depth % (16 // itemsize)
    is_slow = extra and itemsize == 2 and matrices[0].is_cuda
    if not is_slow or rows * columns * depth < _LARGE_PRODUCT:
        return matrices
    return tuple(_padded(matrix, extra) for matrix in matrices)


def _padded(matrix: Tensor, extra: int) -> Tensor:
    rows, depth = matrix.shape
    padded = matrix.new_empty(rows, depth + extra)
    padded[:, :depth].copy_(matrix)
    padded[:, depth:].zero_()
    return padded


def empty_gradients(needs: Sequence[bool], *operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return a new contiguous gradient for every operand that needs one, None for the others."""
    return tuple(
        operand.new_empty(operand.shape) if need and operand is not None else None
        for need, operand in zip(needs, operands, strict=True)
    )


def check_linear_shapes(operator: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ShapeError unless the shapes are (..., K), (N, K) and (N,); ``bias`` may be None."""
    if input.dim() == 0:
        raise ShapeError(f"{operator}: 'input' has no dimension; expected (..., K).")
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        raise ShapeError(
            f"{operator}: 'weight' has shape {tuple(weight.shape)}; expected (N, "
            f"{input.shape[-1]}), the last dimension of 'input' {tuple(input.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"{operator}: 'bias' has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), "
            f"the first dimension of 'weight' {tuple(weight.shape)}."
        )
