"""Peers for ``scale.py``: the same model on many processes, without fuselab's exchange.

``plain`` is what a good PyTorch user writes: dense layers compiled and in DistributedDataParallel,
all tables one after the other in one matrix whose rows are dealt out to the ranks, look-ups by
nn.EmbeddingBag between two all_to_all, and the tables' update by index_add_. ``torchrec`` is
TorchRec's pipeline, tables whole on one rank or another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.data import Batch
from fuselab.distributed.ranks import Ranks
from fuselab.distributed.sharding import Placement, ShardingPlan
from fuselab.models.dlrm import Dlrm, DlrmConfig

Step = Callable[[int], Tensor | None]


def plain(
    config: DlrmConfig,
    ranks: Ranks,
    batches: Sequence[Batch],
    rate: float,
    compiled: bool = True,
    half: bool = True,
    table: Callable[[int, int], Tensor] | None = None,
) -> Step:
    """Return the step; it returns this rank's mean loss.

    ``table(rows, width)`` fills the tables, one after the other, on every rank alike; without it
    each rank draws its own rows.
    """
    head = _Head(config, ranks.device, compiled)
    parallel: nn.Module = head
    if ranks.world_size > 1:
        on = [ranks.device] if ranks.device.type == "cuda" else None
        parallel = nn.parallel.DistributedDataParallel(
            head, device_ids=on, gradient_as_bucket_view=True
        )
    optimizer = torch.optim.SGD(head.parameters(), rate, foreach=True)
    tables = _RowWise(config, ranks, rate, torch.bfloat16 if half else torch.float32, table)

    def step(place: int) -> Tensor:
        batch = batches[place % len(batches)]
        asked = tables.ask(batch.sparse)
        vectors = tables.look_up(asked).requires_grad_()
        with torch.autocast(ranks.device.type, torch.bfloat16, enabled=half):
            logits = parallel(batch.dense, vectors)
        loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels[:, None])
        optimizer.zero_grad()
        loss.backward()
        assert vectors.grad is not None
        tables.update(asked, vectors.grad)
        optimizer.step()
        return loss.detach()

    return step


class _Head(nn.Module):
    """The layers after the tables; vectors are [n, T, D]."""

    def __init__(self, config: DlrmConfig, device: torch.device, compiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = Dlrm(config, new_table=lambda rows, width: nn.Embedding(rows, width, device="meta"))
        self.dense_mlp = model.dense_mlp.to(device)
        self.prediction_mlp = model.prediction_mlp.to(device)
        run: Callable[[Tensor, Sequence[Tensor]], Tensor] = model.logits_of_vectors
        self.run = torch.compile(run, dynamic=False) if compiled else run

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.run(dense, vectors.unbind(1))


class _RowWise:
    """All tables as one, whose row r lies on rank r % N; vectors travel in ``wire``."""

    def __init__(
        self,
        config: DlrmConfig,
        ranks: Ranks,
        rate: float,
        wire: torch.dtype,
        table: Callable[[int, int], Tensor] | None,
    ) -> None:
        self.ranks, self.rate, self.wire, self.width = ranks, rate, wire, config.embedding_dim
        world, device = ranks.world_size, ranks.device
        starts = list(accumulate(config.table_sizes, initial=0))
        self.starts = torch.tensor(starts[:-1], device=device)
        mine = (starts[-1] - ranks.rank + world - 1) // world
        weight = torch.empty(mine, self.width, device=device)
        if table is None:
            weight.uniform_(-0.01, 0.01)
        else:
            whole = torch.cat([table(rows, self.width) for rows in config.table_sizes])
            weight.copy_(whole[ranks.rank :: world])
        self.bags = nn.EmbeddingBag(mine, self.width, mode="sum", _weight=weight)

    def ask(self, rows: Tensor) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Return the local rows asked for, the order in which they were asked, and the splits."""
        world = self.ranks.world_size
        flat = (rows + self.starts).flatten()
        order = (flat % world).argsort(stable=True)
        if world == 1:
            return flat, order, [len(flat)], [len(flat)]
        sent = torch.bincount(flat % world, minlength=world)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        splits = sent.tolist(), received.tolist()  # the host waits here: sizes depend on the ids
        asked = flat.new_empty(sum(splits[1]))
        dist.all_to_all_single(asked, flat[order] // world, splits[1], splits[0])
        return asked, order, *splits

    def look_up(self, asked: tuple[Tensor, Tensor, list[int], list[int]]) -> Tensor:
        """Return the vectors [n, T, D], float32."""
        ids, order, sent, received = asked
        with torch.no_grad():
            offsets = torch.arange(len(ids), device=ids.device)
            vectors = self.bags(ids, offsets).to(self.wire)
            if self.ranks.world_size > 1:
                found = vectors.new_empty(len(order), self.width)
                dist.all_to_all_single(found, vectors, sent, received)
                vectors = torch.empty_like(found).index_copy_(0, order, found)
        return vectors.float().view(-1, len(self.starts), self.width)

    def update(self, asked: tuple[Tensor, Tensor, list[int], list[int]], grad: Tensor) -> None:
        """Take a step of SGD with the gradients of this rank's mean loss."""
        ids, order, sent, received = asked
        values = grad.view(-1, self.width).to(self.wire)
        world = self.ranks.world_size
        if world > 1:
            found = values.new_empty(len(ids), self.width)
            dist.all_to_all_single(found, values[order], received, sent)
            values = found
        self.bags.weight.data.index_add_(0, ids, values.float(), alpha=-self.rate / world)


def torchrec(config: DlrmConfig, ranks: Ranks, batches: Sequence[Batch], rate: float) -> Step:
    """Return the step of TorchRec's pipeline. Raises MissingDependencyError without TorchRec."""
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
    from torchrec.distributed.model_parallel import get_default_sharders
    from torchrec.distributed.types import ShardingPlan as TorchrecPlan
    from torchrec.optim.keyed import KeyedOptimizerWrapper

    from fuselab.distributed.torchrec_dlrm import TorchrecBatch, TorchrecDlrm
    from fuselab.distributed.torchrec_tables import to_torchrec_plan

    torch.manual_seed(0)
    model = TorchrecDlrm(Dlrm(config))
    sizes = tuple((rows, config.embedding_dim) for rows in config.table_sizes)
    placements = tuple(Placement("table", (at % ranks.world_size,)) for at in range(len(sizes)))
    plan = ShardingPlan(ranks.world_size, sizes, placements)
    _apply_optimizer_in_backward(torch.optim.SGD, model.embeddings.parameters(), {"lr": rate})
    theirs = to_torchrec_plan(plan, model.names, ranks.device.type)
    parallel = DistributedModelParallel(
        model,
        device=ranks.device,
        plan=TorchrecPlan({"embeddings": theirs}),
        sharders=get_default_sharders(),
    )
    dense = KeyedOptimizerWrapper(
        {name: value for name, value in parallel.named_parameters() if "embeddings" not in name},
        lambda parameters: torch.optim.SGD(parameters, lr=rate),
    )
    pipeline = TrainPipelineSparseDist(parallel, dense, ranks.device)
    given = _endless([TorchrecBatch.of(batch, model.names) for batch in batches])

    def step(place: int) -> Tensor:
        loss: Tensor = pipeline.progress(given)[0]
        return loss

    return step


def _endless(batches: Sequence[Any]) -> Any:
    while True:
        yield from batches
