"""A DLRM's training run on many ranks: tables shared out by a plan, dense layers data parallel.

Each rank has its part of every batch. The model is that of one process: it begins with the same
weights, sees the same batches, and its loss curve is the same within rounding, for any number of
ranks and any plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.data import Batch, Loader, Position
from fuselab.data.layout import DENSE_COLUMNS
from fuselab.data.rank_loader import rows_of_ranks
from fuselab.distributed import planner, sharded_files
from fuselab.distributed.exchange import wire_dtype
from fuselab.distributed.planner import Bandwidths, Demand
from fuselab.distributed.ranks import Ranks
from fuselab.distributed.sharded_files import Blocks
from fuselab.distributed.sharding import KINDS, Shard, ShardingPlan
from fuselab.distributed.tables import ShardedTables, cut
from fuselab.errors import ArgumentError, CheckpointError, DivergenceError, UnknownNameError
from fuselab.models.dlrm import drawn_table
from fuselab.models.dlrm_fused import dense_parameters
from fuselab.ops.embedding_lookup.reference import embedding_lookup as plain_lookup
from fuselab.report.progress import Progress
from fuselab.train import checkpoint
from fuselab.train.dlrm import _EVALUATED, KIND, Ids, Result, Run, model_of
from fuselab.train.dlrm_ranks_step import Begun, Held, PlainRankStep, RankStep, rank_step_of
from fuselab.train.metrics import Metrics, metrics

SHARDINGS = ("planned", *KINDS)
# bytes of an optimizer's state per row and per element of a table
_STATE_BYTES = {"sgd": (0, 0), "adagrad": (4, 0), "adam": (0, 8)}


@dataclass(frozen=True)
class Sharding:
    """How tables are shared out and vectors exchanged.

    Args:
        kind: ``"planned"``, or one kind for all tables.
        plan: a file with a plan, which takes the place of ``kind``.
        exchange: the dtype of vectors and gradients that are sent.
        memory_gb: what a rank has for tables, in 1e9 bytes; None: enough.
        bandwidths: of link and memory, for the planner.
        graph: whether the fused step on a GPU is one CUDA graph.
    """

    kind: str = "planned"
    plan: Path | None = None
    exchange: str = "float32"
    memory_gb: float | None = None
    bandwidths: Bandwidths = field(default_factory=Bandwidths)
    graph: bool = True


@dataclass
class RankRun(Run):
    """A run of which this process is one rank."""

    ranks: Ranks = field(default_factory=lambda: Ranks(0, 1, torch.device("cpu")))
    sharding: Sharding = field(default_factory=Sharding)

    def build(self, ids: Ids) -> None:
        self.counts = rows_of_ranks(self.plan.batch_size, self.ranks.world_size)
        width = self.plan.config.embedding_dim
        sizes = tuple((rows, width) for rows in ids.cardinalities)
        self.sharding_plan = self._sharding_plan(sizes)
        wire = wire_dtype(self.sharding.exchange)
        self.tables = ShardedTables(self.sharding_plan, self.ranks, wire)
        made = iter(range(len(sizes)))

        def new_table(rows: int, columns: int) -> nn.Embedding:
            # drawn as in one process, and gone once this rank's blocks are copied
            self.tables.fill(next(made), drawn_table(rows, columns).weight)
            return nn.Embedding(rows, columns, device="meta")

        self.model = model_of(self.plan.config, ids, new_table)
        for name, module in self.model.named_children():
            if name != "embeddings":
                module.to(self.device)
        plan = self.plan
        self.rank_step: RankStep = rank_step_of(
            plan.mode, self.model, self.tables, plan.optimizer, self.counts, plan.half,
            self.sharding.graph,
        )  # fmt: skip

    def _sharding_plan(self, sizes: tuple[tuple[int, int], ...]) -> ShardingPlan:
        """Return the plan, made by rank 0, so that all have the same. Raises ArgumentError."""
        self.sizes = sizes
        if self.sharding.plan is not None:
            found = ShardingPlan.read(self.sharding.plan, sizes, self.ranks.world_size)
        else:
            found = self._chosen()
        if self.plan.optimizer == "adagrad" and any(
            each.kind == "column" for each in found.placements
        ):
            raise ArgumentError(
                "the plan cuts a table by columns, and row-wise Adagrad needs whole rows; cut it "
                "by rows, or use --optimizer sgd or adam."
            )
        return ShardingPlan.of(self.ranks.told(found.describe()))

    def demand(self) -> Demand:
        """Return what the planner is asked for."""
        memory = self.sharding.memory_gb
        return Demand(
            self.sizes,
            self.ranks.world_size,
            self.plan.batch_size,
            state_bytes=_STATE_BYTES.get(self.plan.optimizer, (0, 0)),
            vector_bytes=wire_dtype(self.sharding.exchange).itemsize,
            memory_bytes=None if memory is None else int(memory * 1e9),
            columns_allowed=self.plan.optimizer != "adagrad",
        )

    def _chosen(self) -> ShardingPlan:
        demand, kind = self.demand(), self.sharding.kind
        if kind not in SHARDINGS:
            raise UnknownNameError("sharding", kind, SHARDINGS)
        if kind == "planned":
            return planner.choose(demand, self.sharding.bandwidths)
        return planner.uniform(demand, kind)

    def _loader(self, start: Position, rank: int = 0, world_size: int = 1) -> Any:
        return super()._loader(start, self.ranks.rank, self.ranks.world_size)

    def _begun(self) -> Iterator[Begun]:
        """Yield batch after batch, whose successor's ids are already on their way."""
        batches = super()._batches()
        ahead = self._begin(next(batches))
        while True:
            current, self.position = ahead
            ahead = self._begin(next(batches))
            yield current

    def _begin(self, batch: Batch) -> tuple[Begun, Position]:
        position = self.loader.position
        if self.device.type != "cuda":
            return Begun(batch, self.tables.ask(batch.sparse, self.counts)), position
        self.beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.beside):
            begun = Begun(batch, self.tables.ask(batch.sparse, self.counts))
        batch.sparse.record_stream(self.beside)
        return begun, position

    def _batches(self) -> Iterator[Any]:
        if self.device.type == "cuda":
            self.beside = torch.cuda.Stream(self.device)
        return self._begun()

    def take_step(self, batch: Any, rate: float) -> Tensor:
        return self.rank_step(batch, rate)

    def loop_options(self) -> dict[str, Any]:
        nowhere = Path(os.devnull).open("w")  # noqa: SIM115 -- open as long as the run
        silent = None if self.ranks.first else Progress(nowhere)
        return {"progress": silent, "add_up": self.ranks.add_up}

    def evaluate(self) -> Metrics | None:
        """Return the metrics of the held-out rows on rank 0, and None elsewhere."""
        held_out, world = self.held_out, self.ranks.world_size
        if not held_out.rows:
            return None
        edges = [held_out.rows * rank // world for rank in range(world + 1)]
        left = [end - begin for begin, end in pairwise(edges)]
        loader = Loader(
            held_out,
            _EVALUATED,
            rank=self.ranks.rank,
            world_size=world,
            device=self.device,
        )
        batches = iter(loader) if left[self.ranks.rank] else iter(())
        logits, labels = [], []
        with torch.no_grad():
            while max(left):
                counts = [min(_EVALUATED, rows) for rows in left]
                left = [rows - count for rows, count in zip(left, counts, strict=True)]
                # a rank whose rows are used up still answers the others
                batch = next(batches, None) or self._no_rows()
                logits.append(self._logits(batch, counts))
                labels.append(batch.labels)
        found = self.ranks.gathered(torch.stack([torch.cat(logits), torch.cat(labels)], 1))
        return None if found is None else metrics(found[:, 0], found[:, 1])

    def describe(self, trained: Result) -> dict[str, Any]:
        facts = planner.facts(self.sharding_plan, self.demand(), self.sharding.bandwidths)
        mine = {"ranks": self.ranks.world_size, "exchange": self.sharding.exchange}
        return {**super().describe(trained), **mine, "sharding": facts}

    def _no_rows(self) -> Batch:
        columns = len(self.sharding_plan.tables)
        return Batch(
            torch.empty(0, device=self.device),
            torch.empty(0, DENSE_COLUMNS, device=self.device),
            torch.empty(0, columns, dtype=torch.int32, device=self.device),
        )

    def _logits(self, batch: Batch, counts: list[int]) -> Tensor:
        asked = self.tables.ask(batch.sparse, counts)
        ids = self.tables.ids(asked)
        sent = self.tables.send(ids, batch.sparse, counts, plain_lookup)
        vectors = self.tables.receive(sent, torch.float32)
        return self.model.logits_of_vectors(batch.dense, vectors.unbind(1))[:, 0]

    # --- checkpoints ---------------------------------------------------------------------------

    def keep(self, steps: int) -> None:
        """Write a checkpoint; all ranks call it together. Raises as ``Run.keep``, on all ranks."""
        assert self.folder is not None
        state = self._state()
        sums = [
            value.float().sum()
            for name, each in state.items()
            if name.startswith("model/")
            for value in (each.values if isinstance(each, Blocks) else [each])
        ]
        unsound = (~torch.stack([each.to(self.device) for each in sums]).isfinite()).any().float()
        self.ranks.add_up(unsound)
        if unsound > 0:
            raise DivergenceError(f"a weight is no finite number behind step {steps}", steps)
        if self.ranks.first:
            state |= {f"random/{name}": value for name, value in checkpoint.random_state().items()}
        path = self.folder / f"{checkpoint.name_of(steps)}{checkpoint.SHARDED}"
        facts = checkpoint.described(KIND, steps, self.facts(self.position))
        self.last = sharded_files.save(path, state, facts, self.ranks)
        if self.ranks.first:
            checkpoint.remove_old(self.folder)

    def _state(self) -> dict[str, Tensor | Blocks]:
        """Return what this rank holds, by the names that a checkpoint of one process has."""
        state: dict[str, Tensor | Blocks] = {
            f"model/{name}": value.detach()
            for name, value in self.model.state_dict().items()
            if not name.startswith("embeddings.")
        }
        dense = self.rank_step.dense_state()
        state |= {f"optimizer/{name}": value for name, value in dense.items()}
        if self.plan.optimizer == "adam":
            count = torch.tensor(float(self.rank_step.steps))
            for table in range(len(self.sharding_plan.tables)):
                state[f"optimizer/embeddings.{table}.weight/step"] = count
        grouped: dict[str, list[tuple[Held, Tensor]]] = {}
        for what, parameter in self.tables.held():
            name = f"model/embeddings.{_table(what)}.weight"
            grouped.setdefault(name, []).append((what, parameter.detach()))
        for what, key, value in self.rank_step.table_state():
            name = f"optimizer/embeddings.{_table(what)}.weight/{key}"
            grouped.setdefault(name, []).append((what, value))
        for name, pieces in grouped.items():
            shards = [what for what, _ in pieces if isinstance(what, Shard)]
            values = [value for _, value in pieces]
            if shards:
                size = self.sharding_plan.tables[shards[0].table]
                state[name] = Blocks.of_shards(size, shards, values)
            else:
                state[name] = values[0]
        return state

    def resume(self) -> None:
        """Continue from the newest checkpoint of the folder, if there is one, of any ranks.

        Raises CheckpointError if it is broken, or of another run.
        """
        assert self.folder is not None
        name = None
        if self.ranks.first:
            file = checkpoint.latest(self.folder)
            name = None if file is None else str(file)
        name = self.ranks.told(name)
        if name is None:
            return
        file = Path(name)
        if isinstance(self.rank_step, PlainRankStep):
            self.rank_step.begin_table_state()
        with torch.no_grad():
            step, facts = self._load(file)
        self.loader = self._loader(Position(*facts["position"]))
        self.position = self.loader.position
        self.begin, self.last = step, file

    def _load(self, file: Path) -> tuple[int, dict[str, Any]]:
        """Load weights and optimizer from a checkpoint; return its step and facts."""
        if file.suffix != checkpoint.SHARDED:
            found = checkpoint.load(file, KIND)
            self.check_identity(file, found.facts)
            with checkpoint.whole(file):
                self._copy(found.tensors)
            return found.step, dict(found.facts)
        described = checkpoint.sharded_facts(file, KIND)
        self.check_identity(file, described["facts"])
        state = self._state()
        dense_names = [name for name in state if self._is_dense_state(name)]
        known = sharded_files.sizes(file)
        # torch.optim has no state of the dense layers before its first step
        for name, (size, dtype) in known.items():
            if self._is_dense_state(name):
                state[name] = torch.empty(size, dtype=dtype)
        for name in dense_names:
            if name not in known:
                raise CheckpointError(f"{file} lacks {name}; use the one before it.")
        sharded_files.read_into(file, state)
        self._use_dense({name: value for name, value in state.items() if isinstance(value, Tensor)})
        return described["step"], described["facts"]

    @staticmethod
    def _is_dense_state(name: str) -> bool:
        return name.startswith("optimizer/") and not name.startswith("optimizer/embeddings.")

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of the tensors of a whole checkpoint."""
        parameters = dict(self.model.named_parameters())
        for name, parameter in dense_parameters(self.model):
            parameters[name].copy_(tensors[f"model/{name}"])
            assert parameter is parameters[name]
        held = [(what, "", parameter.detach()) for what, parameter in self.tables.held()]
        for what, key, value in [*held, *self.rank_step.table_state()]:
            kind, end = ("optimizer", f"/{key}") if key else ("model", "")
            whole = tensors[f"{kind}/embeddings.{_table(what)}.weight{end}"]
            value.copy_(cut(whole, what) if isinstance(what, Shard) else whole)
        self._use_dense(tensors)

    def _use_dense(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the step the dense optimizer's state, and the count of steps."""
        steps = [
            int(value)
            for name, value in tensors.items()
            if name.startswith("optimizer/") and name.endswith("/step")
        ]
        dense = {
            name.removeprefix("optimizer/"): value
            for name, value in tensors.items()
            if self._is_dense_state(name)
        }
        self.rank_step.load_dense_state(dense, steps[0] if steps else 0)


def _table(what: Held) -> int:
    return what.table if isinstance(what, Shard) else what
