"""``fuselab train lora``: adapters on a frozen MLP, trained in every mode and compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
from torch import Tensor, nn

from fuselab.errors import ArgumentError, DivergenceError, UnknownNameError
from fuselab.measure.interleave import Candidate, interleave
from fuselab.measure.memory import peak_bytes
from fuselab.measure.statistics import median_interval
from fuselab.measure.steady_step import steady
from fuselab.nn import LoRALinear
from fuselab.nn.peft_checkpoint import load_adapters, save_adapters
from fuselab.report.files import folder_for_results
from fuselab.runtime import fallback
from fuselab.train.loop import Loop
from fuselab.train.lora_modes import (
    MODES,
    Batch,
    FusedStep,
    Step,
    adapted,
    base_model,
    step_of,
    trained,
)
from fuselab.train.lora_task import Rows, Task, digits
from fuselab.train.losses import way_out
from fuselab.train.optimizers import dense_optimizer
from fuselab.train.schedule import Schedule
from fuselab.train.seed import check_seed

TOLERANCE = 0.02  # allowed difference of accuracy between modes: 4 of the 180 rows held out
_BASE_STEPS, _BASE_RATE, _BASE_BATCH = 300, 1e-3, 64


@dataclass(frozen=True)
class Settings:
    """The settings of a run; ``modes`` in the order in which they train."""

    modes: Sequence[str] = MODES
    hidden: int = 256
    rank: int = 8
    alpha: float = 16.0
    steps: int = 500
    batch_size: int = 64
    lr: float = 5e-3
    amp: bool = False
    seed: int = 0
    budget_s: float = 2.0


@dataclass(frozen=True)
class ModeResult:
    """The result of one mode.

    ``loss`` is the mean over the last steps, ``accuracy`` that of the held-out new digits, ``off``
    the largest difference of a logit from the first mode's. Times are microseconds per step;
    ``differentiate_us`` is the part of forward, loss and backward, None in a CUDA graph;
    ``peak_bytes`` is what forward and backward need beside model and optimizer.
    """

    mode: str
    loss: float
    accuracy: float
    off: float
    step_us: float
    low_us: float
    high_us: float
    differentiate_us: float | None
    peak_bytes: int
    curve: Sequence[tuple[int, float]] = field(repr=False)


@dataclass(frozen=True)
class LoraResult:
    """The result of ``train``.

    Accuracies are of held-out rows: ``base_accuracy`` of the base on its own digits, ``before`` of
    the base on the new ones. ``merged_off`` is the largest difference of a logit that merging
    makes, ``merged_accuracy`` the accuracy after merging.
    """

    settings: Settings
    parameters: int
    trained: int
    base_accuracy: float
    before: float
    modes: Sequence[ModeResult]
    merged_off: float
    merged_accuracy: float
    exported: str | None

    @property
    def agree(self) -> bool:
        """Whether all modes reached the same accuracy, and merging kept it."""
        found = [mode.accuracy for mode in self.modes] + [self.merged_accuracy]
        return max(found) - min(found) <= TOLERANCE


def train(
    settings: Settings,
    device: torch.device,
    output: Path | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> LoraResult:
    """Train a base on the digits 0 to 4, then adapters on 5 to 9 in every mode.

    All modes train from the same start on the same batches; then their steps are timed,
    interleaved. ``output`` is a folder for the last mode's adapters in peft's layout; they are read
    back and must be equal, bit for bit.

    Raises:
        ArgumentError: a setting is out of range.
        UnknownNameError: no such mode.
        MissingDependencyError: scikit-learn is missing, or safetensors for ``output``.
        OutputError: ``output`` cannot be written.
        DivergenceError: a loss is not a finite number, or a logit after the last step, the adapters
            merged or not.
    """
    task = digits(device)
    validate(settings, len(task.new))
    schedule = Schedule(settings.lr, settings.steps, decay=1)
    if output is not None:
        with folder_for_results(output):
            pass
    torch.manual_seed(settings.seed)
    base = _trained_base(settings, task, device, say)
    start = adapted(copy.deepcopy(base), settings.rank, settings.alpha)
    steps: dict[str, Step] = {}
    courses = {}
    for mode in settings.modes:
        say(f"adapters, {mode}")
        steps[mode] = step_of(mode, copy.deepcopy(start), settings.batch_size, settings.amp)
        courses[mode] = run_mode(steps[mode], task.new, settings, schedule, device)
    logits = {mode: _logits(step.model, task.new_held_out) for mode, step in steps.items()}
    last = steps[settings.modes[-1]].model
    merged = _merged_logits(last, task.new_held_out)
    if not bool(torch.stack([merged, *logits.values()]).isfinite().all()):
        raise DivergenceError(
            f"after step {settings.steps} a logit is no finite number; try a smaller --lr.",
            settings.steps,
        )
    if output is not None:
        _export(last, base, output)
    say("timing the steps")
    times, memory = times_and_memory(steps, task.new, settings, device)
    first = logits[settings.modes[0]]
    results = [
        ModeResult(
            mode,
            courses[mode][-1][1],
            _accuracy(logits[mode], task.new_held_out),
            (logits[mode] - first).abs().max().item(),
            *times[mode],
            memory[mode],
            courses[mode],
        )
        for mode in settings.modes
    ]
    return LoraResult(
        settings,
        sum(parameter.numel() for parameter in base.parameters()),
        sum(parameter.numel() for parameter in trained(last)),
        _accuracy(_logits(base, task.base_held_out), task.base_held_out),
        _accuracy(_logits(base, task.new_held_out), task.new_held_out),
        results,
        (merged - logits[settings.modes[-1]]).abs().max().item(),
        _accuracy(merged, task.new_held_out),
        None if output is None else str(output),
    )


def validate(settings: Settings, rows: int | None) -> None:
    """Raise ArgumentError or UnknownNameError for a setting that cannot be; ``rows`` are those to
    train on, None where the user's own data are batches already."""
    check_seed(settings.seed)
    for mode in settings.modes:
        if mode not in MODES:
            raise UnknownNameError("mode", mode, MODES)
    if rows is not None and not 1 <= settings.batch_size <= rows:
        raise ArgumentError(
            f"--batch-size is {settings.batch_size}; there are {rows} rows to train on: give 1 to "
            f"{rows}."
        )
    for name in ("hidden", "rank", "steps"):
        if getattr(settings, name) < 1:
            raise ArgumentError(f"--{name} is {getattr(settings, name)}; give 1 or more.")
    if not settings.alpha > 0:
        raise ArgumentError(f"--alpha is {settings.alpha}; give a number above 0.")


def _trained_base(
    settings: Settings, task: Task, device: torch.device, say: Callable[[str], None]
) -> nn.Sequential:
    say("the base, on the digits 0 to 4")
    base = base_model(settings.hidden).to(device)
    optimizer = dense_optimizer("adam", base.parameters(), _BASE_RATE)

    def step(batch: Batch, rate: float) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(base(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    loop = Loop(step, Schedule(_BASE_RATE, _BASE_STEPS), device, _BASE_BATCH)
    if loop.run(task.base.batches(_BASE_BATCH, settings.seed)).interrupted:
        raise KeyboardInterrupt
    return base.requires_grad_(False)


class Batches(Protocol):
    """The source of batches."""

    def batches(self, size: int, seed: int) -> Iterator[Batch]: ...


def run_mode(
    step: Step, rows: Batches, settings: Settings, schedule: Schedule, device: torch.device
) -> list[tuple[int, float]]:
    """Train, and return the loss curve."""
    loop = Loop(step, schedule, device, settings.batch_size)
    try:
        with fallback.strict():
            course = loop.run(rows.batches(settings.batch_size, settings.seed))
    except DivergenceError as error:
        sentence = f"{error}; {way_out(error.step, '--lr')}."
        raise DivergenceError(sentence, error.step) from error
    if course.interrupted:
        raise KeyboardInterrupt
    return course.curve


@torch.no_grad()
def _logits(model: nn.Module, rows: Rows) -> Tensor:
    logits: Tensor = model(rows.pixels)
    return logits


def _accuracy(logits: Tensor, rows: Rows) -> float:
    return (logits.argmax(-1) == rows.digits).double().mean().item()


def _merged_logits(model: nn.Sequential, rows: Rows) -> Tensor:
    layers = [layer for layer in model if isinstance(layer, LoRALinear)]
    for layer in layers:
        layer.merge()
    logits = _logits(model, rows)
    for layer in layers:
        layer.unmerge()
    return logits


def _export(model: nn.Sequential, base: nn.Sequential, output: Path) -> None:
    """Write the adapters, read them into a copy of the base, and assert that the model is the
    same."""
    save_adapters(model, output)
    read = load_adapters(copy.deepcopy(base), output)
    written_now, read_back = (dict(each.named_parameters()) for each in (model, read))
    assert all(torch.equal(written_now[name], read_back[name]) for name in written_now)


def times_and_memory(
    steps: Mapping[str, Step], rows: Batches, settings: Settings, device: torch.device
) -> tuple[dict[str, tuple[float, float, float, float | None]], dict[str, int]]:
    """Return the median us per step with its interval, by a loop's wall clock, then the median of
    forward, loss and backward alone, and bytes per step.

    A step that is one CUDA graph has no such part.

    The models are trained on meanwhile.
    """
    batch = next(rows.batches(settings.batch_size, settings.seed))
    loops = {
        mode: steady(partial(step, batch, settings.lr), device) for mode, step in steps.items()
    }
    for mode, step in steps.items():
        if not isinstance(step, FusedStep) or step.graph is None:
            loops[_part(mode)] = steady(partial(step.differentiate, batch), device)
    with fallback.strict():
        samples = interleave(
            [Candidate(mode, call) for mode, (call, _) in loops.items()],
            torch.device("cpu"),
            cold=False,
            budget_s=settings.budget_s,
        )
        memory = {
            mode: peak_bytes(partial(step.differentiate, batch), device)
            for mode, step in steps.items()
        }
    found: dict[str, tuple[float, float, float]] = {}
    for name, (_, calls) in loops.items():
        if samples[name].failed:
            raise ArgumentError(f"--mode {name} failed while it was timed: {samples[name].failed}.")
        each = [us / calls for us in samples[name].times_us]
        _, low, high = median_interval(each)
        found[name] = (median(each), low, high)
    parts = {mode: found[_part(mode)][0] if _part(mode) in found else None for mode in steps}
    return {mode: (*found[mode], parts[mode]) for mode in steps}, memory


def _part(mode: str) -> str:
    return f"{mode}, forward and backward"
