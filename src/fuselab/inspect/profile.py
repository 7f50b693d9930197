"""Profile the time and memory of a TARGET or of a user's own loop.

Two kinds of steps are recorded. Undisturbed ones, with nothing but the profiler's own bookkeeping,
give every time. One watched step before them gives source lines, modules, shapes and memory; its
times are discarded. The calls of both are matched by name and order.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function

from fuselab import structures
from fuselab.errors import ArgumentError, MissingDependencyError, TargetError
from fuselab.inspect import targets
from fuselab.inspect.findings import Finding, find
from fuselab.inspect.kineto import (
    STEP,
    Details,
    Window,
    attach_details,
    part_within,
    read_details,
    read_window,
)
from fuselab.inspect.line_tracer import Markers, line_tracer
from fuselab.inspect.open_ranges import OpenRanges
from fuselab.inspect.profile_tables import Tables, tabulate
from fuselab.inspect.step_split import Split, split_step
from fuselab.inspect.target_prints import muted
from fuselab.inspect.user_code import plain, raising_target_error
from fuselab.measure.machine_state import waiting_share
from fuselab.measure.statistics import significant
from fuselab.notebook import ShownInNotebooks

Schedule = tuple[int, int, int, int]


@dataclass
class Profile(ShownInNotebooks):
    """A recorded profile: microseconds per step, on average over ``steps`` recorded steps."""

    name: str
    device: str
    steps: int
    split: Split
    tables: Tables
    findings: list[Finding]
    matched: float  # share of operator calls whose line, module and shapes are known
    traces: list[str] = field(repr=False, default_factory=list)  # Chrome traces, one per repeat
    within: str | None = None  # the named range that tables and findings are restricted to
    waited_share: float | None = None  # of its time the process waited for a core; None of a trace

    def __str__(self) -> str:
        """Return the text that ``fuselab profile`` prints; without rich, the fields."""
        from fuselab.report.profile_text import profile_text

        try:
            return profile_text(self.describe())
        except MissingDependencyError:
            return repr(self)

    @property
    def step_us(self) -> float:
        return self.split.step_us

    def describe(self) -> dict[str, Any]:
        """Return the facts for JSON; the screen shows the same numbers."""
        facts = {
            "name": self.name,
            "device": self.device,
            "steps": self.steps,
            "step_us": self.step_us,
            "split": {
                "compute_us": self.split.compute_us,
                "memory_us": self.split.memory_us,
                "overhead_us": self.split.overhead_us,
                "data_us": self.split.data_us,
            },
            "matched": self.matched,
            "within": self.within,
            "waited_share": self.waited_share,
            **self.tables.describe(),
            "findings": [finding.describe() for finding in self.findings],
        }
        rounded: dict[str, Any] = significant_everywhere(facts)
        return rounded

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace of the last recorded repeat, which Perfetto opens. Raises
        OutputError."""
        from fuselab.report.files import write_text

        write_text(path, self.traces[-1])

    def save_tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Write every repeat where TensorBoard's profiler plugin finds it. Raises OutputError."""
        from fuselab.report.files import folder_for_results, write_text

        worker = f"{socket.gethostname()}_{os.getpid()}"
        with folder_for_results(folder) as place:
            for trace in self.traces:
                write_text(place / f"{worker}.{time.time_ns()}.pt.trace.json", trace)


def significant_everywhere(value: Any) -> Any:
    """Round every float in nested facts to four significant digits."""
    if isinstance(value, float):
        return significant(value)
    if isinstance(value, Mapping):
        return {key: significant_everywhere(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [significant_everywhere(item) for item in value]
    return value


def parse_schedule(text: str) -> Schedule:
    """Parse a schedule such as ``1,1,3,1``; raises ArgumentError."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ArgumentError(
            f"schedule '{plain(text)}' must be four whole numbers, wait,warmup,active,repeat; "
            "for example 1,1,3,1."
        )
    return check_schedule([int(part) for part in parts])


def check_schedule(schedule: Sequence[int]) -> Schedule:
    """Return the schedule (wait, warmup, active, repeat) as integers; raises ArgumentError."""
    if len(schedule) != 4 or any(int(n) != n for n in schedule):
        raise ArgumentError("schedule must be four whole numbers: wait, warmup, active, repeat.")
    wait, warmup, active, repeat = (int(n) for n in schedule)
    if wait < 0 or warmup < 1 or active < 1 or repeat < 1:
        raise ArgumentError(
            f"schedule {wait},{warmup},{active},{repeat}: wait is at least 0, the rest at least 1; "
            "lines and shapes are recorded in the last warm-up step."
        )
    return wait, warmup, active, repeat


class Recorder:
    """A running profile, as ``with profile(...) as p`` gives it. ``result`` is the ``Profile`` once
    enough steps have run; reading it earlier raises TargetError."""

    def __init__(self, schedule: Schedule, name: str, within: str | None = None) -> None:
        self.schedule = schedule
        self.name = name
        self.within = within
        self._step = 0
        self._watching: ExitStack | None = None
        self._watcher: torch.profiler.profile | None = None
        self._markers: Markers | None = None
        self._timer: torch.profiler.profile | None = None
        self._range: record_function | None = None
        self._details: Details | None = None
        self.windows: list[Window] = []  # one per recorded repeat
        self._waiting: ExitStack | None = None
        self._waited: list[float] = []  # the share of each window in which we waited for a core
        self._traces: list[str] = []
        self._whole_steps = 0

    def __enter__(self) -> Recorder:
        # Kineto reports its own start and stop on stderr unless told not to.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._begin_step()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self._watching is not None:
            self._stop_watching()
        if self._timer is not None:
            self._close_range()
            self._stop_timing()

    def step(self) -> None:
        """End one step of the loop and begin the next."""
        if self._watching is not None:
            self._stop_watching()
        if self._timer is not None:
            self._close_range()
            self._whole_steps += 1
            if self._whole_steps == self.schedule[2]:
                self._stop_timing()
        self._step += 1
        self._begin_step()

    @property
    def recorded(self) -> bool:
        """Whether at least one whole step has been timed."""
        return bool(self.windows)

    @property
    def result(self) -> Profile:
        if not self.windows:
            wait, warmup, _, _ = self.schedule
            raise TargetError(
                f"nothing was recorded: the loop made {self._step} steps, and this schedule needs "
                f"{wait + warmup + 1} (p.step() ends each); make more, or change the schedule."
            )
        found = summarize(self.name, self.windows, self._details, self._traces, self.within)
        return replace(found, waited_share=fmean(self._waited))

    def _begin_step(self) -> None:
        wait, warmup, active, repeat = self.schedule
        cycle, position = divmod(self._step, wait + warmup + active)
        if cycle >= repeat:
            return
        if position == wait + warmup - 1 and cycle == 0:
            self._start_watching()
        if position == wait + warmup:
            self._start_timing()
        if self._timer is not None:
            self._range = record_function(f"{STEP}{self._step}")
            self._range.__enter__()

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _start_watching(self) -> None:
        self._watching = ExitStack()
        _synchronize()
        self._watcher = torch.profiler.profile(
            activities=_activities(), record_shapes=True, profile_memory=True
        )
        self._watcher.start()
        self._watching.enter_context(OpenRanges())
        self._markers = self._watching.enter_context(line_tracer())

    def _stop_watching(self) -> None:
        assert (
            self._watching is not None and self._watcher is not None and self._markers is not None
        )
        self._watching.close()
        _synchronize()
        self._watcher.stop()
        self._details = read_details(self._watcher, self._markers)
        self._watching = self._watcher = None

    def _start_timing(self) -> None:
        _synchronize()
        self._whole_steps = 0
        self._timer = torch.profiler.profile(activities=_activities())
        self._timer.start()
        self._waiting = ExitStack()
        self._waiting.enter_context(OpenRanges())
        self._waited_share = self._waiting.enter_context(waiting_share())

    def _stop_timing(self) -> None:
        assert self._timer is not None and self._waiting is not None
        _synchronize()
        waited_share = self._waited_share()
        self._waiting.close()
        self._timer.stop()
        if self._whole_steps:
            self._waited.append(waited_share)
            trace = _chrome_trace(self._timer)
            self.windows.append(read_window(json.loads(trace), self._whole_steps))
            self._traces.append(trace)
        self._timer = None


def profile(
    schedule: Sequence[int] = (1, 1, 3, 1), *, name: str = "loop", within: str | None = None
) -> Recorder:
    """Return a recorder for ``with`` around a loop that calls ``p.step()`` after each step.

    Use it as ``with fuselab.profile(schedule=(1, 1, 3, 1)) as p:``. ``schedule`` is (wait, warmup,
    active, repeat) in steps, as in ``torch.profiler``: ``wait`` steps pass unrecorded, the last of
    ``warmup`` is watched for lines, modules, shapes and memory, ``active`` are timed; all this
    ``repeat`` times. Steps after that pass unrecorded. ``within`` restricts tables and findings to
    what runs inside the named ranges called so. Raises ArgumentError for an invalid schedule.
    ``p.result`` is the ``Profile``.
    """
    return Recorder(check_schedule(schedule), name, within)


def summarize(
    name: str,
    windows: list[Window],
    details: Details | None,
    traces: list[str],
    within: str | None = None,
) -> Profile:
    """Compute tables, split and findings of recorded windows.

    ``within`` restricts tables and findings, not the split, to what ran inside ranges of that name.
    Raises ArgumentError if there is none.
    """
    details = details or Details([], [])
    matched = [attach_details(window, details) for window in windows]
    return summarize_attached(name, windows, details, traces, within, sum(matched) / len(matched))


def summarize_attached(
    name: str,
    windows: list[Window],
    details: Details,
    traces: list[str],
    within: str | None,
    matched: float,
) -> Profile:
    """Do what ``summarize`` does with windows whose calls have their details already."""
    on_gpu = any(window.kernels for window in windows)
    steps = sum(window.steps for window in windows)
    splits = [split_step(window, on_gpu) for window in windows]

    def mean(field_name: str) -> float:
        total = sum(getattr(s, field_name) * w.steps for s, w in zip(splits, windows, strict=True))
        return float(total / steps)

    split = Split(mean("compute_us"), mean("memory_us"), mean("overhead_us"), mean("data_us"))
    if within is not None:
        windows, details = _restricted(windows, details, within)
    return Profile(
        name=name,
        device="cuda" if on_gpu else "cpu",
        steps=steps,
        split=split,
        tables=tabulate(windows, details, on_gpu),
        findings=find(windows, details, split, on_gpu, whole=within is None),
        matched=matched,
        traces=traces,
        within=within,
    )


def _restricted(
    windows: Sequence[Window], details: Details, within: str
) -> tuple[list[Window], Details]:
    known = {s.name for window in windows for s in window.spans if s.kind == "range"}
    if within not in known:
        names = ", ".join(sorted(map(plain, known))) or "none"
        raise ArgumentError(f"no range is called '{plain(within)}'; the step has: {names}.")
    ops = [op for op in details.ops if within in op.ranges]
    kept = {id(op) for op in ops}
    # what another thread does for a range, as autograd's, has no range of its own there
    inside = [(use.start_us, use.end_us) for use in details.ranges if use.name == within]
    allocations = [
        change
        for change in details.allocations
        if id(change.op) in kept or any(a <= change.time_us < b for a, b in inside)
    ]
    return [part_within(window, within) for window in windows], replace(
        details, ops=ops, allocations=allocations
    )


def profile_target(
    target: targets.Target,
    *,
    backward: bool = False,
    schedule: Sequence[int] = (2, 1, 10, 1),
    within: str | None = None,
) -> Profile:
    """Profile a TARGET.

    Every step copies the inputs to the device and runs the forward; with ``backward`` also loss,
    backward and, if the file has one, the optimizer. Without ``backward`` a module runs in
    evaluation mode under ``no_grad``, a function as it is. The loss is the file's
    ``get_loss(output)``, or the sum of every differentiable output. ``within`` restricts tables and
    findings to one named range. What the target prints is shown for the first step. Raises
    TargetError, ArgumentError.
    """
    step = target_step(target, backward)
    wait, warmup, active, repeat = check_schedule(schedule)
    with ExitStack() as stack:
        recorder = stack.enter_context(profile(schedule, name=target.name, within=within))
        for number in range((wait + warmup + active) * repeat):
            if number == 1:
                stack.enter_context(muted())
            with raising_target_error(f"{target.name} raised when it ran:"):
                step()
            recorder.step()
    return recorder.result


def target_step(target: targets.Target, backward: bool) -> Callable[[], Any]:
    """Return a call that runs one step of a TARGET and returns the forward's output.

    The step has the ranges ``copy data``, ``forward``, ``loss``, ``backward`` and ``optimizer``.
    """
    host = targets.on_host(target)
    if isinstance(target.callable, nn.Module):
        target.callable.train(backward)
    optimizer = None
    if backward and target.optimizer is not None and isinstance(target.callable, nn.Module):
        optimizer = target.optimizer(target.callable)
    trained = backward or not target.is_module

    def step() -> Any:
        with record_function("copy data"):
            args, kwargs = targets.to_device(host, target.device)
        with record_function("forward"), torch.set_grad_enabled(trained):
            if backward and not target.is_module:
                args = _differentiable(args)
            output = target.callable(*args, **kwargs)
        if backward:
            with record_function("loss"):
                loss = target.loss(output) if target.loss else _sum_of(output, target.name)
            with record_function("backward"):
                loss.backward()
            if optimizer is not None:
                with record_function("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
            elif isinstance(target.callable, nn.Module):
                target.callable.zero_grad()
        return output

    return step


def _differentiable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a function's inputs, floating-point ones as fresh leaves that require a gradient."""
    return tuple(
        a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    )


def _sum_of(output: Any, name: str) -> Tensor:
    total: Tensor | None = None
    for tensor in structures.tensors(output):
        if tensor.requires_grad:
            total = tensor.sum() if total is None else total + tensor.sum()
    if total is None:
        raise TargetError(
            f"{name} returns nothing that requires a gradient, so there is no backward to run; "
            "leave --backward out."
        )
    return total


def _activities() -> list[ProfilerActivity]:
    if torch.cuda.is_available():
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    return [ProfilerActivity.CPU]


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _chrome_trace(profiler: torch.profiler.profile) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_text(errors="replace")
