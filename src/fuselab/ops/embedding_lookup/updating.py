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
    """What the backward does to the tables."""

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
            ops.embedding_adagrad_(
                tables,
                self.states,
                ids,
                grad_output,
                self.learning_rate,
                self.eps,
                *self.rules,
                **chosen,
            )


class _UpdatingLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Step, ids: Tensor, *tables: Tensor) -> Tensor:
        # The tables' values are no part of the gradient, so nothing saved can go stale: they are
        # held beside save_for_backward, and several look-ups of one table may be stepped in turn.
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


@torch.compiler.disable(reason="its backward writes to parameters, which a graph cannot hold")
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
    """``embedding_lookup`` whose backward takes the optimizer's step on the rows it met.

    The backward writes to ``tables`` in place, at once, and gives no gradient for them: their
    ``.grad`` stays None, so an optimizer that holds them too leaves them alone. No dense gradient
    exists at any time. Each backward is one step: with ``retain_graph`` two calls are two steps,
    and gradients cannot be accumulated over batches or clipped together with others. A second
    derivative raises. Under torch.compile the graph breaks here.

    Args:
        tables, ids, out_of_range, hash, dtype: as for ``embedding_lookup``. The step is taken if
            the tables require a gradient: all of them, or none (frozen).
        optimizer: ``"sgd"``: w -= learning_rate * g, as ``torch.optim.SGD`` without momentum or
            weight decay. ``"rowwise_adagrad"``: see ``embedding_adagrad_``.
        learning_rate: a float, or a 0-d tensor on the tables' device, whose value may change
            between replays of a CUDA graph.
        states: for ``"rowwise_adagrad"`` one tensor per table, (rows_t,), float32 (float64 for
            float64 tables), zeros at first.
        eps: row-wise Adagrad's.

    Raises:
        ArgumentError: some tables require a gradient and some do not, one is there twice, or
            ``states`` are missing.
        UnknownNameError: ``optimizer`` is none of the known.
        UnsupportedError, in the backward: ``is_grads_batched=True``, several steps at once.
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
    return _UpdatingLookup.apply(step, ids, *tables)
