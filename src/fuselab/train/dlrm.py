"""A DLRM's training run: its data, its step, its checkpoints, and its result."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.data import (
    Batch,
    Dataset,
    Dense,
    Loader,
    Modulus,
    Position,
    Vocabulary,
    open_dataset,
    remote,
)
from fuselab.data.metadata import load_metadata
from fuselab.data.prepared import MANIFEST, Prepared, is_prepared
from fuselab.data.rank_loader import RankLoader, lanes_of
from fuselab.data.source import Source
from fuselab.errors import ArgumentError, CheckpointError, DivergenceError
from fuselab.models.dlrm import Dlrm, DlrmConfig
from fuselab.ops.vocabulary_indices.reference import Vocabulary as VocabularyTensors
from fuselab.ops.vocabulary_indices.reference import vocabulary
from fuselab.train import checkpoint
from fuselab.train.checkpoint import Checkpoint
from fuselab.train.dlrm_modes import Step, step_of
from fuselab.train.events import Events
from fuselab.train.loop import Course, Loop
from fuselab.train.losses import way_out
from fuselab.train.metrics import Metrics, metrics
from fuselab.train.schedule import Schedule
from fuselab.train.seed import check_seed

KIND = "dlrm"
_SHUFFLED = 262_144  # rows of a window: 42 MB
_EVALUATED = 16_384  # rows at once
Ids = Modulus | Vocabulary


@dataclass(frozen=True)
class Plan:
    """The settings of a run: what to train, on what data, and how.

    If ``data`` is None, ``rows`` synthetic rows are used. With ``validation``, all rows of ``data``
    train, and the rows there are held out. Training ends after ``steps`` or ``epochs`` passes,
    whichever comes first; with neither after one pass. ``metadata`` is a file of vocabularies or
    cardinalities for raw data.
    """

    config: DlrmConfig
    mode: str = "fused"
    data: str | None = None
    validation: str | None = None
    metadata: str | None = None
    rows: int = 1_000_000
    batch_size: int = 64
    steps: int | None = None
    epochs: int | None = None
    optimizer: str = "sgd"
    lr: float = 0.1
    warmup: int = 0
    decay: float = 0.0
    half: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """The result of a run.

    ``metrics`` are those of the held-out rows; None for a run that was stopped, or if there are
    none. ``checkpoint`` is the last one written.
    """

    model: Dlrm
    course: Course
    steps: int
    resumed_from: int
    rows_per_s: float
    metrics: Metrics | None
    checkpoint: Path | None


@dataclass
class Run:
    """A plan with everything made for it: data, model, step."""

    plan: Plan
    device: torch.device
    folder: Path | None = None
    data: Dataset = field(init=False)
    model: Dlrm = field(init=False)
    step: Step = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        check_seed(plan.seed)
        ids = ids_of(plan)
        self.data = _opened(plan.data, ids, dense_of(plan.data), plan.rows)
        self.training, self.held_out = self.data.split("train"), self.data.split("validation")
        if plan.validation is not None:
            self.training, self.held_out = self.data, _held_out(plan, plan.validation, ids)
        self.batches_per_epoch = self.training.rows // plan.batch_size if plan.batch_size > 0 else 0
        if self.batches_per_epoch == 0:
            raise ArgumentError(
                f"--batch-size is {plan.batch_size}, and there are {self.training.rows} rows to "
                f"train on in {self.data.name}; it must be from 1 to their number."
            )
        for name in ("steps", "epochs", "rows"):
            given = getattr(plan, name)
            if given is not None and given < 1:
                raise ArgumentError(f"--{name} is {given}; give 1 or more.")
        ends = [] if plan.steps is None else [plan.steps]
        if plan.epochs is not None or not ends:
            ends.append((plan.epochs or 1) * self.batches_per_epoch)
        self.steps = min(ends)
        torch.manual_seed(plan.seed)
        self.build(ids)
        self.schedule = Schedule(plan.lr, self.steps, plan.warmup, plan.decay)
        self.loader = self._loader(Position())
        self.begin = 0
        self.last: Path | None = None

    def build(self, ids: Ids) -> None:
        """Make the model and its step."""
        self.model = model_of(self.plan.config, ids).to(self.device)
        plan = self.plan
        self.step = step_of(plan.mode, self.model, plan.optimizer, plan.batch_size, plan.half)

    def _loader(self, start: Position, rank: int = 0, world_size: int = 1) -> RankLoader:
        return RankLoader(
            self.training,
            self.plan.batch_size,
            shuffle_window=min(_SHUFFLED, self.training.rows),
            seed=self.plan.seed,
            rank=rank,
            world_size=world_size,
            device=self.device,
            start=start,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """The facts that a run must share with the checkpoint from which it continues."""
        return {
            "config": config_facts(self.model.config),
            "optimizer": self.plan.optimizer,
            "batch size": self.plan.batch_size,
            "seed": self.plan.seed,
            "data": identity_of(self.plan.data),
            "rows to train on": self.training.rows,
            "order of rows": f"{lanes_of(self.plan.batch_size)} lanes",
        }

    def resume(self) -> None:
        """Continue from the newest checkpoint of the folder, if there is one.

        Raises CheckpointError if it is broken, or of another run.
        """
        assert self.folder is not None
        file = checkpoint.latest(self.folder)
        if file is None:
            return
        found = checkpoint.load(file, KIND)
        with checkpoint.whole(file):
            self.check_identity(file, found.facts)
            self.model.load_state_dict(found.part("model"))
            self.step.load_state(found.part("optimizer"))
            checkpoint.set_random_state(found.part("random"))
            self.loader = self._loader(Position(*found.facts["position"]))
        self.begin, self.last = found.step, file

    def check_identity(self, file: Path, facts: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless the facts of checkpoint ``file`` are of a run like this."""
        for name, value in self.identity.items():
            kept = facts["identity"].get(name)
            if kept != value:
                raise CheckpointError(
                    f"{file} is of a run with {name} {_shown(kept, value)}, and this one has "
                    f"{_shown(value, kept)}; use the same, or another folder."
                )

    def keep(self, steps: int) -> None:
        """Write a checkpoint.

        Raises OutputError, and DivergenceError if a weight is not finite; the last good checkpoint
        then stays the last.
        """
        assert self.folder is not None
        state = self.model.state_dict()
        sums = torch.stack([value.float().sum() for value in state.values()])
        if not bool(sums.isfinite().all()):
            raise DivergenceError(f"a weight is no finite number behind step {steps}", steps)
        tensors = {f"model/{name}": value for name, value in state.items()}
        tensors |= {f"optimizer/{name}": value for name, value in self.step.state().items()}
        tensors |= {f"random/{name}": value for name, value in checkpoint.random_state().items()}
        facts = self.facts(self.loader.position)
        self.last = checkpoint.save(self.folder, Checkpoint(KIND, steps, tensors, facts))

    def facts(self, position: Position) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the tensors."""
        return {
            "identity": self.identity,
            "raw data": raw_identity_of(self.plan.data),
            "position": list(position),
            "dense": asdict(dense_of(self.plan.data)),
            "plan": {**asdict(self.plan), "config": config_facts(self.model.config)},
        }

    def train(
        self,
        keep_every: int = 0,
        events: Events | None = None,
        after: Callable[[], None] | None = None,
    ) -> Result:
        """Run all remaining steps, then the held-out rows. ``after`` is called after every step.

        Raises DivergenceError with step, epoch and batch, and the last checkpoint.
        """
        loop = self._loop(keep_every, events or Events(None), after)
        try:
            course = loop.run(self._batches(), self.begin)
        except DivergenceError as error:
            epoch, batch = divmod(error.step - 1, self.batches_per_epoch)
            kept = "no checkpoint was kept" if self.last is None else f"{self.last} is kept"
            raise DivergenceError(
                f"{error} (epoch {epoch + 1}, batch {batch + 1} of {self.batches_per_epoch}); "
                f"{kept}; {way_out(error.step, '--lr, or --warmup')}.",
                error.step,
            ) from error
        held_out = None if course.interrupted else self.evaluate()
        if held_out is not None and events is not None:
            shown = {"held-out loss": held_out.loss, "held-out accuracy": held_out.accuracy}
            events.scalars(course.steps, {**shown, "held-out AUC": held_out.auc})
        rows = (course.steps - self.begin) * self.plan.batch_size
        rate = rows / course.seconds if course.seconds else math.nan
        return Result(self.model, course, self.steps, self.begin, rate, held_out, self.last)

    def _loop(self, keep_every: int, events: Events, after: Callable[[], None] | None) -> Loop[Any]:
        def step(batch: Any, rate: float) -> Tensor:
            loss = self.take_step(batch, rate)
            if after is not None:
                after()
            return loss

        return Loop(
            step,
            self.schedule,
            self.device,
            self.plan.batch_size,
            keep=self.keep if self.folder is not None else None,
            keep_every=keep_every,
            events=events,
            **self.loop_options(),
        )

    def take_step(self, batch: Any, rate: float) -> Tensor:
        """Train on a batch of ``_batches``; return its loss, 0-d."""
        return self.step(batch, rate)

    def loop_options(self) -> dict[str, Any]:
        """Return further arguments of the ``Loop``."""
        return {}

    def describe(self, trained: Result) -> dict[str, Any]:
        """Return the facts for JSON; the screen shows the same numbers."""
        return {
            **asdict(self.plan),
            "config": config_facts(self.model.config),
            "data": self.data.name,
            "steps": trained.course.steps,
            "planned_steps": trained.steps,
            "resumed_from": trained.resumed_from,
            "interrupted": trained.course.interrupted,
            "seconds": trained.course.seconds,
            "rows_per_s": trained.rows_per_s,
            "curve": trained.course.curve,
            "held_out": None if trained.metrics is None else asdict(trained.metrics),
            "checkpoint": trained.checkpoint,
        }

    def evaluate(self) -> Metrics | None:
        """Return the metrics of the held-out rows, computed by the plain model; None if there are
        none."""
        if not self.held_out.rows:
            return None
        logits, labels = [], []
        with torch.no_grad():
            for batch in Loader(self.held_out, _EVALUATED, device=self.device):
                logits.append(self.model.logits_of_rows(batch.dense, batch.sparse)[:, 0])
                labels.append(batch.labels)
        return metrics(torch.cat(logits), torch.cat(labels))

    def first_batches(self) -> Iterator[Batch]:
        """Return the batches of the first epoch, without changing the run's position."""
        return iter(self._loader(Position()))

    def _batches(self) -> Iterator[Any]:
        """Yield batches epoch after epoch, without end."""
        while True:
            yield from self.loader


def _opened(path: str | None, ids: Ids, dense: Dense, rows: int = 0) -> Dataset:
    if path is not None and is_prepared(path):
        return open_dataset(path)
    return open_dataset(path, ids=ids, dense=dense, rows=rows)


def _held_out(plan: Plan, path: str, ids: Ids) -> Dataset:
    """Open the held-out rows at ``path``, which must differ from the plan's rows but match their
    form."""
    if plan.data is not None and source_files(plan.data) & source_files(path):
        raise ArgumentError(
            f"--validation {path} has rows of --data {plan.data}, which all train; give other "
            "rows, or leave it out: then some of --data are held out."
        )
    dense = dense_of(plan.data)
    found = _opened(path, ids, dense)
    if found.cardinalities != ids.cardinalities or (is_prepared(path) and dense_of(path) != dense):
        raise ArgumentError(
            f"{path} is prepared with other tables or another dense transform than the rows to "
            "train on; prepare it as they were, with their vocabulary or cardinalities."
        )
    if not is_prepared(path):
        # read them once, to report a malformed row before the training
        for _ in Loader(found, _EVALUATED):
            pass
    return found


def source_files(path: str) -> set[Path]:
    """Return the files containing the rows at ``path``; for a prepared dataset, its folder."""
    return {
        each.resolve()
        for each in ([remote.local(path)] if is_prepared(path) else Source.at(path).files)
    }


def identity_of(path: str | None) -> str:
    """Return a text that identifies the rows at ``path``.

    For prepared rows it is a digest of the manifest, for raw ones their files' names and sizes. No
    row is read, and a copy elsewhere has the same text.
    """
    if path is None:
        return "synthetic"
    if is_prepared(path):
        digest = hashlib.sha256((remote.local(path) / MANIFEST).read_bytes()).hexdigest()
        return f"prepared as {digest[:16]}"
    return _listed(Source.at(path).identity())


def raw_identity_of(path: str | None) -> str | None:
    """Return ``identity_of`` of the raw rows from which those at ``path`` were prepared, or of the
    rows themselves where they are raw; None where it is not known."""
    if path is None:
        return None
    if not is_prepared(path):
        return identity_of(path)
    files = (Prepared(path).manifest.get("plan") or {}).get("files")
    return _listed(files) if files else None


def _listed(files: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(f"{file['name']} of {file['bytes']} bytes" for file in files)


def ids_of(plan: Plan) -> Ids:
    """Return the mapping of raw ids to rows: the prepared data's, the metadata's, or by modulus.

    Raises ArgumentError if the configuration asks for a vocabulary and none is given.
    """
    config = plan.config
    if plan.data is not None and is_prepared(plan.data):
        return Prepared(plan.data).ids()
    found = None if plan.metadata is None else load_metadata(plan.metadata).ids
    if config.ids == "vocabulary":
        if not isinstance(found, Vocabulary):
            raise ArgumentError(
                "the configuration asks for a vocabulary, and none is given; add --metadata FILE "
                "with one, or train on data prepared with one."
            )
        return found
    if found is None:
        return Modulus(config.table_sizes)
    sizes = (
        tuple(max(1, len(values)) for values in found.values)
        if isinstance(found, Vocabulary)
        else found.cardinalities
    )
    return Modulus(tuple(min(size, config.largest_table) for size in sizes))


def dense_of(path: str | None) -> Dense:
    """Return the transform of the counts: the prepared data's, or else the original DLRM's."""
    return Prepared(path).dense() if path is not None and is_prepared(path) else Dense()


def model_of(
    config: DlrmConfig,
    ids: Ids,
    new_table: Callable[[int, int], nn.Embedding] | None = None,
) -> Dlrm:
    """Return a new model whose tables fit the ids; ``new_table`` is that of ``Dlrm``."""
    sizes = ids.cardinalities
    fitting = replace(config, cardinalities=sizes, largest_table=max(sizes), ids="modulus")
    if isinstance(ids, Modulus):
        return Dlrm(fitting, new_table=new_table)
    columns = [torch.from_numpy(values) for values in ids.values]
    return Dlrm(replace(fitting, ids="vocabulary"), vocabulary(columns), new_table)


def load_model(path: Path) -> tuple[Dlrm, Checkpoint]:
    """Return the model of a checkpoint, on the CPU, and the checkpoint. Raises CheckpointError."""
    found = checkpoint.load(path, KIND)
    state = found.part("model")
    with checkpoint.whole(path):
        config = _config(found.facts["plan"]["config"])
        kept = None
        if config.ids == "vocabulary":
            kept = VocabularyTensors(state["sorted_keys"], state["slots"], state["offsets"])
        model = Dlrm(config, kept)
        model.load_state_dict(state)
    return model.eval(), found


def config_facts(config: DlrmConfig) -> dict[str, Any]:
    """Return the configuration as JSON gives it back."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(config).items()
    }


def _config(facts: Mapping[str, Any]) -> DlrmConfig:
    """Rebuild the configuration from the result of ``config_facts``."""
    values: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each for name, each in facts.items()
    }
    return DlrmConfig(**values)


def _shown(value: object, other: object) -> str:
    """Format a value; of a configuration, only the keys that differ from the other's."""
    if not isinstance(value, Mapping) or not isinstance(other, Mapping):
        return str(value)
    return ", ".join(f"{key} {each}" for key, each in value.items() if other.get(key) != each)
