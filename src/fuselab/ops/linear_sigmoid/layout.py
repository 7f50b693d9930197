"""One logit per row of an input: the sizes, strides and outputs of every implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuselab.errors import ShapeError
from fuselab.ops._shared.dtypes import check_floating, check_same_dtype
from fuselab.ops._shared.matrices import as_rows


@dataclass(frozen=True)
class Rows:
    """An input as a matrix of rows, the weight as a vector, and how a loss is reduced.

    ``kind`` is "sigmoid", "losses" (one per row) or "loss" (their sum, or their mean).
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    kind: str
    mean: bool

    @property
    def rows(self) -> int:
        return self.input.shape[0]

    @property
    def depth(self) -> int:
        return self.input.shape[1]

    @property
    def divisor(self) -> int:
        """The number that a sum of losses is divided by."""
        return self.rows if self.mean else 1


KINDS = {"none": "losses", "sum": "loss", "mean": "loss"}


def rows_of(
    input: Tensor, weight: Tensor, bias: Tensor | None, reduction: str | None = None
) -> Rows:
    """Return the operands as ``Rows``; ``reduction`` is that of a loss, None for sigmoid."""
    kind = "sigmoid" if reduction is None else KINDS[reduction]
    return Rows(as_rows(input), weight[0], bias, kind, reduction == "mean")


def row_vector(tensor: Tensor, rows: int) -> Tensor:
    """Return ``(..., 1)`` as ``(rows,)``; a single value is expanded to all rows."""
    return tensor.reshape(-1).expand(rows)


def empty_output(input: Tensor, target: Tensor | None, kind: str) -> Tensor:
    """Return a new, uninitialised output: ``(..., 1)`` in the input's dtype, or a loss in the
    target's, 0-d if it is reduced."""
    dtype = input.dtype if target is None else target.dtype
    shape = () if kind == "loss" else (*input.shape[:-1], 1)
    return input.new_empty(shape, dtype=dtype)


def validate(name: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise DtypeError or ShapeError unless these are the arguments of a linear layer with one
    output."""
    check_floating(name, input=input)
    check_same_dtype(name, input=input, weight=weight, bias=bias)
    if input.dim() == 0:
        raise ShapeError(f"{name}: 'input' has no dimension; expected (..., K).")
    if weight.shape != (1, input.shape[-1]):
        raise ShapeError(
            f"{name}: 'weight' has shape {tuple(weight.shape)}; expected (1, {input.shape[-1]}), "
            f"one output for the last dimension of 'input' {tuple(input.shape)}."
        )
    if bias is not None and bias.shape != (1,):
        raise ShapeError(f"{name}: 'bias' has shape {tuple(bias.shape)}; expected (1,) or None.")


def refusal(input: Tensor, *others: Tensor | None) -> str | None:
    """Return the reason why our kernels cannot take these tensors, or None."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in (input, *others)):
        return "it computes in float32"
    return "it is empty" if input.numel() == 0 else None


def empty_gradients(needs: Sequence[bool], input: Tensor) -> tuple[Tensor | None, ...]:
    """Return new, uninitialised gradients of input, weight and bias, contiguous, None if not
    needed."""
    return (
        input.new_empty(input.shape) if needs[0] else None,
        input.new_empty((1, input.shape[-1])) if needs[1] else None,
        input.new_empty((1,)) if needs[2] else None,
    )


def forward_of(run: Callable[[Rows, Tensor | None, Tensor], None]) -> Callable[..., Tensor]:
    """Return the forward of an implementation whose ``run(of, target, output)`` writes sigmoid or,
    with a target ``(rows,)``, the loss."""

    @functools.wraps(run)
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor | None = None,
        reduction: str | None = None,
    ) -> Tensor:
        of = rows_of(input, weight, bias, reduction)
        output = empty_output(input, target, of.kind)
        run(of, None if target is None else row_vector(target, of.rows), output)
        return output

    return forward


def backward_of(
    run: Callable[[Rows, Tensor, Tensor, tuple[Tensor | None, ...]], None],
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return the backward of an implementation whose ``run(of, upstream, kept, grads)`` writes the
    gradients of input, weight and bias that are needed; ``kept`` is the output of sigmoid or a
    loss's target, as ``upstream`` ``(rows,)``."""

    @functools.wraps(run)
    def backward(
        needs: Sequence[bool],
        grad_output: Tensor,
        saved: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        reduction: str | None = None,
    ) -> tuple[Tensor | None, ...]:
        of = rows_of(input, weight, bias, reduction)
        grads = empty_gradients(needs, input)
        run(of, row_vector(grad_output, of.rows), row_vector(saved, of.rows), grads)
        return grads

    return backward


# The order on a GPU, forward and backward: CUDA was the fastest at 65536x256 on an H200.
ORDER = ("cuda", "triton")
BACKWARD_ORDER = (*ORDER, "cpp")
