"""A training step of one rank among many, eager, compiled or fused, with the same numbers.

A step's loss is the mean over the batch of all ranks. A rank's own mean is scaled by its share of
the rows, so that gradients and losses only need to be added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fuselab.data import Batch
from fuselab.data.layout import DENSE_COLUMNS
from fuselab.distributed.exchange import Pending
from fuselab.distributed.ranks import Ranks
from fuselab.distributed.sharding import Shard
from fuselab.distributed.sums import add_up
from fuselab.distributed.tables import Asked, ShardedTables
from fuselab.errors import UnknownNameError
from fuselab.models.dlrm import Dlrm
from fuselab.models.dlrm_fused import FusedDlrm, dense_parameters
from fuselab.ops import embedding_lookup
from fuselab.ops.embedding_lookup.reference import embedding_lookup as plain_lookup
from fuselab.train.capturable import DenseOptimizer, TableOptimizer
from fuselab.train.captured import Captured
from fuselab.train.copies import Copies
from fuselab.train.dlrm_modes import MODES
from fuselab.train.optimizers import (
    dense_optimizer,
    load_state_tensors,
    state_tensors,
    table_optimizer,
)

Held = Shard | int  # what a rank holds of a table: a block, or (by its number) a copy


class Begun(NamedTuple):
    """A rank's rows of a batch, whose ids are on their way to the tables."""

    batch: Batch
    asked: Asked


class RankStep(Protocol):
    """Trains a model whose tables are shared out, batch by batch; all ranks call it together."""

    def __call__(self, begun: Begun, rate: float) -> Tensor:
        """Take one step.

        Returns this rank's part of the loss before it, 0-d: the ranks' parts add up to the mean
        over the batch. The next step may overwrite it.
        """
        ...

    def dense_state(self) -> dict[str, Tensor]:
        """Return the optimizer's state of the dense layers as ``parameter/key``."""
        ...

    def table_state(self) -> Iterator[tuple[Held, str, Tensor]]:
        """Yield what is held, a key, and the tensor of the optimizer's state."""
        ...

    @property
    def steps(self) -> int:
        """The number of steps that Adam has counted."""
        ...

    def load_dense_state(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Restore the dense layers' state and the count; tables' state is written in place."""
        ...


def rank_step_of(
    mode: str,
    model: Dlrm,
    tables: ShardedTables,
    optimizer: str,
    counts: list[int],
    half: bool = False,
    graph: bool = True,
) -> RankStep:
    """Return the step of a mode. ``counts`` are the ranks' rows of each batch.

    With ``graph`` the fused step on a GPU is one CUDA graph, exchange included. Raises
    UnknownNameError for an unknown mode or optimizer.
    """
    match mode:
        case "eager":
            return PlainRankStep(model, tables, optimizer, counts, half)
        case "compile":
            return PlainRankStep(model, tables, optimizer, counts, half, compiled=True)
        case "fused":
            return FusedRankStep(model, tables, optimizer, counts, half, graph)
    raise UnknownNameError("mode", mode, MODES)


class _Head(nn.Module):
    """All layers after the tables, as one module for DistributedDataParallel."""

    def __init__(self, model: Dlrm, compiled: bool) -> None:
        super().__init__()
        self.dense_mlp, self.prediction_mlp = model.dense_mlp, model.prediction_mlp
        run: Callable[..., Tensor] = model.logits_of_vectors
        self.run = torch.compile(run, dynamic=False) if compiled else run

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.run(dense, vectors.unbind(1))


class _ShardedStep:
    """The parts of every rank's step: tables, copies, learning rate, and share of the loss."""

    def __init__(
        self, model: Dlrm, tables: ShardedTables, optimizer: str, counts: list[int], half: bool
    ) -> None:
        self.model, self.tables, self.half, self.counts = model, tables, half, counts
        self.ranks = tables.ranks
        self.share = counts[self.ranks.rank] / sum(counts)
        device = self.ranks.device
        self.rate, self.count = (torch.zeros((), device=device) for _ in range(2))
        self.copies = Copies(optimizer, tables.copies, self.rate, self.count)
        self.steps = 0

    def copies_state(self) -> Iterator[tuple[Held, str, Tensor]]:
        """Yield the state of replicated tables."""
        for key, values in self.copies.state.items():
            for table, value in zip(self.tables.replicated, values, strict=True):
                yield table, key, value


class PlainRankStep(_ShardedStep):
    """The usual step: autograd, DistributedDataParallel, sparse gradients, torch.optim."""

    def __init__(
        self,
        model: Dlrm,
        tables: ShardedTables,
        optimizer: str,
        counts: list[int],
        half: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(model, tables, optimizer, counts, half)
        ranks = self.ranks
        self.head: nn.Module = _Head(model, compiled)
        if ranks.world_size > 1:
            on = [ranks.device] if ranks.device.type == "cuda" else None
            parallel = DistributedDataParallel(
                self.head, device_ids=on, gradient_as_bucket_view=True
            )
            parallel.register_comm_hook(None, add_up)
            self.head = parallel
        named = dense_parameters(model)
        self.names: dict[Tensor, str] = {value: name for name, value in named}
        self.of_dense = dense_optimizer(optimizer, [value for _, value in named], 1.0)
        self.blocks = [block for blocks in tables.blocks for block in blocks]
        self.of_tables = table_optimizer(optimizer, self.blocks, 1.0) if self.blocks else None

    def __call__(self, begun: Begun, rate: float) -> Tensor:
        batch, asked = begun
        self.steps += 1
        self.rate.fill_(rate)
        self.count.fill_(self.steps)
        ids = self.tables.ids(asked)
        with torch.no_grad():  # the blocks get sparse gradients below
            sent = self.tables.send(ids, asked.rows, asked.counts, plain_lookup)
            vectors = self.tables.receive(sent, torch.float32)
        vectors.requires_grad_()
        with torch.autocast(batch.dense.device.type, torch.bfloat16, enabled=self.half):
            logits = self.head(batch.dense, vectors)
        loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels[:, None])
        loss = loss * self.share
        self.of_dense.zero_grad()
        loss.backward()
        assert vectors.grad is not None
        grads = [
            each.result().float() for each in self.tables.send_gradients(vectors.grad, asked.counts)
        ]
        self._step_tables(ids, grads, rate)
        if self.tables.copies:
            columns = self.tables.columns
            found = self.copies.gradient(asked.rows[:, columns], vectors.grad[:, columns])
            self.ranks.add_up(found)
            self.copies.step(found)
        self.of_dense.param_groups[0]["lr"] = rate
        self.of_dense.step()
        return loss.detach()

    def _step_tables(self, ids: Sequence[Tensor], grads: Sequence[Tensor], rate: float) -> None:
        """Give every block the sparse gradient of the rows that it has, and step."""
        if self.of_tables is None:
            return
        for exchange, blocks, asked, grad in zip(
            self.tables.exchanges, self.tables.blocks, ids, grads, strict=True
        ):
            for place, (shard, block) in enumerate(zip(exchange.mine, blocks, strict=True)):
                rows, values = asked[:, place].long(), grad[:, place]
                if shard.rows < self.tables.plan.tables[shard.table][0]:
                    inside = (rows >= 0) & (rows < shard.rows)
                    rows, values = rows[inside], values[inside]
                block.grad = torch.sparse_coo_tensor(
                    rows[None], values, block.shape, check_invariants=False
                )
        self.of_tables.param_groups[0]["lr"] = rate
        self.of_tables.step()

    def dense_state(self) -> dict[str, Tensor]:
        return state_tensors(self.of_dense, self.names)

    def table_state(self) -> Iterator[tuple[Held, str, Tensor]]:
        for what, parameter in self.tables.held():
            if isinstance(what, Shard):
                assert self.of_tables is not None
                for key, value in self.of_tables.state[parameter].items():
                    if isinstance(value, Tensor) and value.dim():
                        yield what, key, value
        yield from self.copies_state()

    def load_dense_state(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        load_state_tensors(self.of_dense, self.names, tensors)
        self.steps = steps
        if isinstance(self.of_tables, torch.optim.SparseAdam):
            for block in self.blocks:
                self.of_tables.state[block]["step"] = steps

    def begin_table_state(self) -> None:
        """Make Adam's state exist, which SparseAdam makes in its first step."""
        if isinstance(self.of_tables, torch.optim.SparseAdam):
            for block in self.blocks:
                state: dict[str, Any] = self.of_tables.state[block]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(block)
                    state["exp_avg_sq"] = torch.zeros_like(block)


class FusedRankStep(_ShardedStep):
    """A step made of fuselab's operators.

    Vectors travel while the bottom layers run, gradients of vectors and of the top layers while
    the bottom layers' backward runs. On a GPU the whole step is one CUDA graph, exchange included.
    """

    def __init__(
        self,
        model: Dlrm,
        tables: ShardedTables,
        optimizer: str,
        counts: list[int],
        half: bool = False,
        graph: bool = True,
    ) -> None:
        super().__init__(model, tables, optimizer, counts, half)
        device = self.ranks.device
        self.rate_there = 0.0
        self.upstream = torch.full((), self.share, device=device)
        self.of_tables = [
            TableOptimizer(optimizer, blocks, self.rate, self.count, tables.out_of_range(exchange))
            if blocks
            else None
            for exchange, blocks in zip(tables.exchanges, tables.blocks, strict=True)
        ]
        self.fused = FusedDlrm(model, half)
        leaves = self.fused.leaves
        operands = self.fused.operands if half else ()
        self.of_dense = DenseOptimizer(optimizer, leaves, self.rate, self.count, operands)
        self.top = 2 * len(self.fused.bottom)  # the first leaf of the top layers
        self.found: dict[int, Tensor] = {}  # gradients of the backward that runs
        for place, operand in enumerate(self.fused.operands):
            if place >= self.top:
                operand.register_hook(self._keep(place))
        self.graph: Captured | None = None
        if device.type == "cuda" and graph:
            self._capture(device)

    def _keep(self, place: int) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            self.found[place] = grad

        return keep

    def _capture(self, device: torch.device) -> None:
        """Capture the work on a batch of zeros, with an upstream gradient and a learning rate of 0,
        so that no parameter changes."""
        mine = self.counts[self.ranks.rank]
        columns = len(self.tables.plan.tables)
        self.batch = Batch(
            torch.zeros(mine, device=device),
            torch.zeros(mine, DENSE_COLUMNS, device=device, dtype=self.fused.dtype),
            torch.zeros(mine, columns, dtype=torch.int32, device=device),
        )
        self.ids = [
            torch.zeros(sum(self.counts), len(blocks), dtype=torch.int32, device=device)
            for blocks in self.tables.blocks
        ]
        self.upstream.zero_()
        self.count.fill_(1)
        self.graph = Captured(self._work, device, "thread_local")
        self.upstream.fill_(self.share)

    def __call__(self, begun: Begun, rate: float) -> Tensor:
        self.steps += 1
        if rate != self.rate_there:
            self.rate.fill_(rate)
            self.rate_there = rate
        self.count.fill_(self.steps)
        ids = self.tables.ids(begun.asked)
        if self.graph is None:
            self.batch, self.ids = begun.batch, ids
            self._work()
        else:
            for mine, given in zip([*self.batch, *self.ids], [*begun.batch, *ids], strict=True):
                mine.copy_(given, non_blocking=True)
            self.graph()
        return self.loss

    def _work(self) -> None:
        grads, self.loss, gradients, reduced = self._differentiate()
        for optimizer, ids, pending in zip(self.of_tables, self.ids, gradients, strict=True):
            found = pending.result()
            if optimizer is not None:
                optimizer.step(ids, found)
        for part in reduced:
            grads |= part.result()
        of_copies = grads.pop(-1, None)
        if of_copies is not None:
            self.copies.step(of_copies)
        self.of_dense.step([grads[place] for place in range(len(self.fused.operands))])

    def _differentiate(
        self,
    ) -> tuple[dict[int, Tensor], Tensor, list[Pending], list[_Reduced]]:
        """Run forward and backward, and start what has to travel as early as it is known."""
        dtype, counts = self.fused.dtype, self.counts
        sent = self.tables.send(self.ids, self.batch.sparse, counts, self._look_up)
        gradients: list[Pending] = []
        reduced: list[_Reduced] = []
        local: dict[int, Tensor] = {}
        leaf: list[Tensor] = []
        self.found = {}

        def on_vectors(grad: Tensor) -> None:
            gradients.extend(self.tables.send_gradients(grad, counts))
            # by now the top layers' gradients are known, and the bottom ones' are not
            reduced.append(_Reduced(self.found, self.ranks, dtype))
            if self.tables.copies:
                columns = self.tables.columns
                local[-1] = self.copies.gradient(
                    self.batch.sparse.index_select(1, columns), grad.index_select(1, columns)
                )

        def vectors() -> Tensor:
            leaf.append(self.tables.receive(sent, dtype).requires_grad_())
            leaf[0].register_hook(on_vectors)
            return leaf[0]

        loss = self.fused.loss(self.batch.dense, vectors, self.batch.labels)
        wanted = [*self.fused.operands, leaf[0]] if leaf else self.fused.operands
        grads = torch.autograd.grad(loss, wanted, self.upstream)
        done = {place for part in reduced for place in part.places}
        rest = {
            place: grads[place] for place in range(len(self.fused.operands)) if place not in done
        }
        reduced.append(_Reduced(rest | local, self.ranks, dtype))
        return {}, loss.detach() * self.share, gradients, reduced

    def _look_up(self, tables: Sequence[Tensor], ids: Tensor, out_of_range: str) -> Tensor:
        with torch.no_grad():
            return embedding_lookup(list(tables), ids, out_of_range, dtype=self.tables.wire)

    def dense_state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for key, tensors in self.of_dense.state.items():
            found |= {
                f"{name}/{key}": value for name, value in self.fused.narrowed(tensors).items()
            }
        names = {name.rpartition("/")[0] for name in found}
        return found | {f"{name}/step": torch.tensor(float(self.steps)) for name in names}

    def table_state(self) -> Iterator[tuple[Held, str, Tensor]]:
        for exchange, optimizer in zip(self.tables.exchanges, self.of_tables, strict=True):
            if optimizer is not None:
                for key, values in optimizer.state.items():
                    for shard, value in zip(exchange.mine, values, strict=True):
                        yield shard, key, value
        yield from self.copies_state()

    def load_dense_state(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        for key, kept in self.of_dense.state.items():
            for name, mine in self.fused.narrowed(kept).items():
                mine.copy_(tensors[f"{name}/{key}"])
        self.steps = steps
        self.fused.refresh()


class _Reduced:
    """Gradients that are being added up over the ranks, in one float32 all-reduce.

    Args:
        grads: by place; a place below 0 stays float32.
        ranks: the processes.
        dtype: of the results.
    """

    def __init__(self, grads: Mapping[int, Tensor], ranks: Ranks, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.places = list(grads)
        self.shapes = [grads[place].shape for place in self.places]
        self.work: dist.Work | None = None
        self.grads = dict(grads)
        if ranks.world_size > 1 and self.places:
            found = [grads[place] for place in self.places]
            self.flat = found[0].new_empty(sum(each.numel() for each in found), dtype=torch.float32)
            # one launch that also converts
            torch._foreach_copy_(self._views(self.flat), found)
            self.work = dist.all_reduce(self.flat, async_op=True)

    def result(self) -> dict[int, Tensor]:
        """Return the sums, by place."""
        if self.work is None:
            return self.grads
        self.work.wait()
        wide, narrow = self._views(self.flat), self._views(self.flat.to(self.dtype))
        return {place: (narrow if place >= 0 else wide)[at] for at, place in enumerate(self.places)}

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
