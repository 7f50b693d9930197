"""Embedding look-up whose backward is the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuselab import ops
from fuselab.errors import ArgumentError, UnknownNameError, UnsupportedError

OPTIMIZERS = ("sgd", "rowwise_adagrad")


@dataclass(frozen=True)
class _Step:
    """The optimizer's step that the backward takes on the tables."""

    optimizer: str
    learning_rate: float | Tensor
    eps: float
    states: tuple[Tensor, ...]
    rules: tuple[str, str | None]
    dtype: torch.dtype | None
    implementation: str

    def take(self, tables: Sequence[Tensor], ids: Tensor, grad_output: Tensor) -> None:
        chosen = {"implementation": self.implementation}
        if self.optimizer == "sgd":
            ops.embedding_sgd_(tables, ids, grad_output, self.learning_rate, *self.rules, **chosen)
        else:
            numbers = (self.learning_rate, self.eps, *self.rules)
            ops.embedding_adagrad_(tables, self.states, ids, grad_output, *numbers, **chosen)


class _UpdatingLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Step, ids: Tensor, *tables: Tensor) -> Tensor:
        # The gradient does not depend on the tables' values, so they may change before the
        # backward. They are therefore kept outside save_for_backward, whose version check would
        # refuse several look-ups of one table that are stepped in turn.
        ctx.save_for_backward(ids)
        ctx.step, ctx.tables = step, tables
        return ops.embedding_lookup(
            [table.detach() for table in tables],
            ids,
            *step.rules,
            step.dtype,
            implementation=step.implementation,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, ...]:
        if torch._C._dispatch_keys(grad_output).has("Batched"):
            raise UnsupportedError(
                "updating_embedding_lookup: its backward is one step, so it takes one upstream "
                "gradient; leave is_grads_batched=True out."
            )
        (ids,) = ctx.saved_tensors
        ctx.step.take([table.detach() for table in ctx.tables], ids, grad_output)
        return (None,) * (2 + len(ctx.tables))


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="its backward writes to parameters, which a graph cannot hold"
)
def updating_embedding_lookup(
    tables: Sequence[Tensor],
    ids: Tensor,
    optimizer: str,
    learning_rate: float | Tensor,
    states: Sequence[Tensor] = (),
    eps: float = 1e-10,
    out_of_range: str = "error",
    hash: str | None = None,
    dtype: torch.dtype | None = None,
    *,
    implementation: str = "auto",
) -> Tensor:
    """Look up as ``embedding_lookup`` does; the backward takes the optimizer's step on those rows.

    The backward writes to ``tables`` in place, at once, and returns no gradient for them: their
    ``.grad`` stays None, so an optimizer that also holds them leaves them unchanged. No dense
    gradient is ever allocated. Each backward is one step: with ``retain_graph`` two calls are two
    steps, and gradients cannot be accumulated over batches or clipped together with others. A
    second derivative raises. Under torch.compile the graph breaks here.

    Args:
        tables, ids, out_of_range, hash, dtype: as for ``embedding_lookup``. The step is taken if
            the tables require a gradient; either all must require one, or none (frozen).
        optimizer: ``"sgd"``: w -= learning_rate * g, as ``torch.optim.SGD`` without momentum or
            weight decay. ``"rowwise_adagrad"``: see ``embedding_adagrad_``.
        learning_rate: a float, or a 0-d tensor on the tables' device, whose value may change
            between replays of a CUDA graph.
        states: for ``"rowwise_adagrad"`` one tensor per table, (rows_t,), float32 (float64 for
            float64 tables), zeros at first.
        eps: of row-wise Adagrad.

    Raises:
        ArgumentError: some tables require a gradient and some do not, a table is given twice, or
            ``states`` are missing.
        UnknownNameError: ``optimizer`` is not one of the known names.
        UnsupportedError: in the backward, for ``is_grads_batched=True``: several steps at once.
    """
    if optimizer not in OPTIMIZERS:
        raise UnknownNameError("optimizer", optimizer, OPTIMIZERS)
    if optimizer == "rowwise_adagrad" and len(states) != len(tables):
        raise ArgumentError(
            f"updating_embedding_lookup: 'states' has {len(states)} tensors for {len(tables)} "
            "tables; row-wise Adagrad keeps one number per row of each."
        )
    if len({*map(id, tables)}) < len(tables):
        raise ArgumentError(
            "updating_embedding_lookup: a tensor is in 'tables' twice, and a step writes it once; "
            "look its columns up in turn."
        )
    trained = {table.requires_grad for table in tables}
    if len(trained) > 1:
        raise ArgumentError(
            "updating_embedding_lookup: some of 'tables' require a gradient and some do not; look "
            "the frozen ones up by themselves."
        )
    rules = out_of_range, hash
    step = _Step(optimizer, learning_rate, eps, tuple(states), rules, dtype, implementation)
    vectors: Tensor = _UpdatingLookup.apply(step, ids, *tables)
    return vectors
