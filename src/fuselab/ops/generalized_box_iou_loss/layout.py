"""Two box tensors for every implementation: their dtypes, new outputs, and the offsets of pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuselab.errors import ShapeError
from fuselab.ops._shared.dtypes import check_floating
from fuselab.ops._shared.layout import nest
from fuselab.ops._shared.matrices import empty_gradients

MAX_RANK = 3


def validate_boxes(operator: str, **boxes: Tensor) -> None:
    """Raise DtypeError or ShapeError unless two tensors, given by argument name, are boxes of one
    shape."""
    (first_name, first), (second_name, second) = boxes.items()
    check_floating(operator, **boxes)
    if first.dim() == 0 or first.shape[-1] != 4:
        raise ShapeError(
            f"{operator}: '{first_name}' has shape {tuple(first.shape)}; expected (..., 4), boxes "
            "as x1, y1, x2, y2."
        )
    if second.shape != first.shape:
        raise ShapeError(
            f"{operator}: '{second_name}' has shape {tuple(second.shape)}; expected that of "
            f"'{first_name}', {tuple(first.shape)} (expand() repeats boxes without a copy)."
        )


def arithmetic(first: Tensor, second: Tensor) -> torch.dtype:
    """Return the dtype of the loss: float64 if one of the boxes is, else float32."""
    return torch.float64 if torch.float64 in (first.dtype, second.dtype) else torch.float32


def empty_loss(first: Tensor, second: Tensor, reduction: str) -> Tensor:
    """Return a new, uninitialised loss: contiguous, and 0-d unless reduction is "none"."""
    shape = first.shape[:-1] if reduction == "none" else ()
    return first.new_empty(shape, dtype=arithmetic(first, second))


@dataclass(frozen=True)
class Pairs:
    """Two box tensors, the upstream gradient of each pair if there is one, and the loops over them.

    There are ``MAX_RANK`` loops, of which the first ``MAX_RANK - rank`` have size 1; they follow
    the contiguous loss. ``strides`` are the operands', ``steps`` the distances between a box's
    coordinates; all are in elements.
    """

    first: Tensor
    second: Tensor
    grad: Tensor | None
    rank: int
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return self.first.numel() // 4

    @property
    def steps(self) -> tuple[int, int]:
        return self.first.stride(-1), self.second.stride(-1)

    @property
    def gradient_strides(self) -> tuple[int, ...]:
        """The strides of the upstream gradient; 0 if it is one number for all pairs."""
        return (0,) * MAX_RANK if self.grad is None else self.strides[2]

    @property
    def is_dense(self) -> bool:
        """Whether boxes are contiguous in both tensors."""
        inner = [strides[-1] for strides in self.strides[:2]]
        return self.rank == 1 and self.steps == (1, 1) and inner == [4, 4]

    @property
    def is_aligned(self) -> bool:
        """Whether every box can be read by accesses of its own size, or of 16 bytes if less."""
        return self.steps == (1, 1) and all(
            boxes.data_ptr() % 16 == 0 and all(stride % 4 == 0 for stride in strides)
            for boxes, strides in zip((self.first, self.second), self.strides, strict=False)
        )

    def numbers(self, gradient_strides: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the numbers that every kernel of both boxes takes: the count, the inner sizes, the
        upstream gradient's strides in a backward, and the strides and the step of both boxes."""
        (first, second), steps = self.strides[:2], self.steps
        sizes = (self.count, *self.sizes[1:], *gradient_strides)
        return (*sizes, *first, steps[0], *second, steps[1])

    @property
    def second_numbers(self) -> tuple[int, ...]:
        """The numbers of a kernel that reads the second boxes only."""
        return (self.count, *self.sizes[1:], *self.strides[1], self.steps[1])

    def needs_64_bit_offsets(self, margin: int) -> bool:
        """Return whether an offset exceeds 2^31 - 1 elements. Up to ``margin`` pairs past the last
        one are computed before they are masked."""
        furthest = [
            sum((size - 1) * stride for size, stride in zip(self.sizes, strides, strict=True))
            + margin * max(strides)
            for strides in self.strides
        ]
        in_boxes = 3 * max(self.steps)
        return max(4 * (self.count + margin), *furthest) + in_boxes > 2**31 - 1


def pairs(first: Tensor, second: Tensor, grad: Tensor | None = None) -> Pairs:
    """Return the fewest loops over the pairs of two box tensors, which are not empty, by their own
    strides; if more than three loops would be needed, over contiguous copies. ``grad`` has the
    shape (...)."""
    leading = first.shape[:-1]
    operands = (first, second) if grad is None else (first, second, grad)
    loss = torch.empty(leading, device="meta")  # stands for the contiguous loss
    loops = nest(loss, [operand.stride()[: len(leading)] for operand in operands])
    if len(loops.sizes) > MAX_RANK:
        return pairs(*(operand.contiguous() for operand in operands))
    padded = loops.padded(MAX_RANK)
    return Pairs(first, second, grad, len(loops.sizes), padded.sizes, padded.strides)


Epsilon = float | Tensor
Forward = Callable[[Tensor, Tensor, str, Epsilon], Tensor]
Backward = Callable[..., tuple[Tensor | None, ...]]


def forward_of(run: Callable[[Pairs, str, Epsilon, Tensor], None]) -> Forward:
    """Return the forward of an implementation whose ``run(where, reduction, eps, loss)`` writes the
    loss of one pair or more."""

    @functools.wraps(run)
    def forward(first: Tensor, second: Tensor, reduction: str, eps: Epsilon) -> Tensor:
        loss = empty_loss(first, second, reduction)
        if first.numel() == 0:
            return loss.zero_()
        run(pairs(first, second), reduction, eps, loss)
        return loss

    return forward


def backward_of(
    run: Callable[[Pairs, Tensor, str, Epsilon, tuple[Tensor | None, ...]], None],
) -> Backward:
    """Return the backward of an implementation whose ``run(where, upstream, reduction, eps,
    grads)`` writes the gradients that are needed of one pair or more."""

    @functools.wraps(run)
    def backward(
        needs: Sequence[bool],
        grad_output: Tensor,
        first: Tensor,
        second: Tensor,
        reduction: str,
        eps: Epsilon,
    ) -> tuple[Tensor | None, ...]:
        grads = empty_gradients(needs, first, second)
        if first.numel() and any(needs):
            where = pairs(first, second, grad_output if reduction == "none" else None)
            upstream = grad_output if where.grad is None else where.grad
            run(where, upstream, reduction, eps, grads)
        return grads

    return backward
