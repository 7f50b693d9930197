"""Sizes, outputs and operands of the dot interaction, for every implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from fuselab.ops._shared.matrices import empty_gradients, row_readable


def pair_count(vectors: int) -> int:
    """Return the number of pairs of ``vectors`` vectors."""
    return vectors * (vectors - 1) // 2


def empty_output(dense: Tensor, embeddings: Tensor, padding: int) -> Tensor:
    batch, tables, width = embeddings.shape
    return dense.new_empty(batch, width + pair_count(tables + 1) + padding)


Backward = Callable[[Sequence[bool], Tensor, Tensor, Tensor], tuple[Tensor | None, ...]]


def forward_of(
    run: Callable[[Tensor, Tensor, int, Tensor], None],
) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Return the forward of an implementation whose ``run(dense, embeddings, padding, output)``
    writes an output that is not empty, from operands whose rows are contiguous."""

    @functools.wraps(run)
    def forward(dense: Tensor, embeddings: Tensor, padding: int) -> Tensor:
        output = empty_output(dense, embeddings, padding)
        if output.numel():
            run(row_readable(dense), row_readable(embeddings), padding, output)
        return output

    return forward


def backward_of(
    run: Callable[[Tensor, Tensor, Tensor, Sequence[Tensor | None]], None],
) -> Backward:
    """Return the backward of an implementation whose ``run(grad_output, dense, embeddings, grads)``
    writes the gradients that are needed, from operands whose rows are contiguous."""

    @functools.wraps(run)
    def backward(
        needs: Sequence[bool], grad_output: Tensor, dense: Tensor, embeddings: Tensor
    ) -> tuple[Tensor | None, ...]:
        grads = empty_gradients(needs, dense, embeddings)
        if any(grad is not None and grad.numel() for grad in grads):
            run(row_readable(grad_output), row_readable(dense), row_readable(embeddings), grads)
        return grads

    return backward
