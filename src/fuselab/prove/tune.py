"""``fuselab bench --tune``: time and verify every candidate configuration, save the fastest.

Candidates of one case are timed interleaved, beside the ceiling, as providers are. If several cases
share a key, it gets the configuration that is fastest over all of them (geometric mean of the times
over each case's default) among those that at least one case finds FASTER than its default and none
finds SLOWER, by the verdicts of ``measure.verdict``. If there is none, the default is kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fuselab.device.ceiling import Ceilings, measured_ceilings
from fuselab.device.environment import describe
from fuselab.device.select import select as select_device
from fuselab.errors import ArgumentError, UnknownNameError, summary
from fuselab.measure.interleave import Candidate, Samples, interleave
from fuselab.measure.statistics import median_interval, significant
from fuselab.measure.verdict import Outcome, verdict
from fuselab.op import Case, FusedOp, dtype_name
from fuselab.prove.arguments import mapped, needed
from fuselab.prove.bench import (
    MEMORY_FACTOR,
    MEMORY_FACTOR_BACKWARD,
    fitting_cases,
    give_memory_back,
)
from fuselab.prove.bench_run import Run
from fuselab.prove.bench_work import Calls, CaseArguments, Work
from fuselab.prove.outputs import as_declared, outputs_in
from fuselab.runtime import cuda_driver, dispatch, fallback, launch_recording, tuning
from fuselab.runtime.tuning import Config, TunedConfig
from fuselab.schema import SCHEMA

LEAST_BUDGET_S = 3.0
BUDGET_PER_CANDIDATE_S = 0.2


@dataclass(frozen=True)
class Tried:
    """One configuration on one case.

    ``status`` is ``ok``, ``wrong`` or ``failed``. ``registers`` per thread, ``local_bytes`` per
    thread (spills) and ``shared_bytes`` per block are the largest over the call's launches; they
    are None if unknown.
    """

    config: Config
    status: str
    reason: str | None = None
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    ceiling_share: float | None = None
    registers: int | None = None
    local_bytes: int | None = None
    shared_bytes: int | None = None
    is_default: bool = False
    is_chosen: bool = False


@dataclass(frozen=True)
class TunedCase:
    """All configurations of one implementation on one case.

    ``key`` is the key with which its launcher asked for a configuration; ``implementation`` ends in
    ``_backward`` for the backward.
    """

    case: str
    dtype: str
    implementation: str
    key: str
    ceiling_us: float | None
    tried: Sequence[Tried]
    times_us: Mapping[Config, Sequence[float]] = field(repr=False)

    @property
    def title(self) -> str:
        return f"{self.case}, {self.dtype}, {self.implementation}, key '{self.key}'"


@dataclass(frozen=True)
class Tuning:
    """The result of tuning: what was tried, chosen and saved, and where.

    ``skipped`` says why something was not tried; ``undecided`` lists keys where more rounds might
    find a faster configuration.
    """

    operator: str
    environment: Mapping[str, Any]
    command: str
    file: Path
    cases: Sequence[TunedCase]
    skipped: Sequence[str]
    undecided: Sequence[str]

    @property
    def wrong(self) -> list[str]:
        """One line for every candidate whose result is wrong."""
        return [
            f"{case.title}: {tried.config}: {tried.reason}"
            for case in self.cases
            for tried in case.tried
            if tried.status == "wrong"
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the payload of ``--json``."""
        facts = asdict(replace(self, cases=[replace(case, times_us={}) for case in self.cases]))
        for case in facts["cases"]:
            del case["times_us"]
        return {"schema": SCHEMA, "verb": "tune", **facts}


def tune(
    op: FusedOp,
    *,
    implementations: Sequence[str] | None = None,
    cases: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    backward: bool = False,
    device: torch.device | str = "auto",
    budget_s: float | None = None,
    seed: int = 0,
    ship: bool = False,
    command: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> Tuning:
    """Time every candidate of ``op.configs`` on its cases and save the fastest per key.

    ``implementations`` are keys of ``op.configs`` without ``_backward``; ``backward`` tunes the
    backwards too. ``cases``, ``dtypes`` and ``device`` are as in ``bench``. ``budget_s`` is the
    time in seconds for one case and implementation (0.2 s per candidate, at least 3 s). ``ship``
    saves beside the operator instead of in the user's cache folder. ``command`` is recorded in the
    file.

    Raises ArgumentError where ``op`` has no ``configs`` for what was asked, UnknownNameError,
    DeviceError, DataError (the file to save in cannot be read), OutputError.
    """
    where = device if isinstance(device, torch.device) else select_device(device)
    dispatch.operator(op)
    names = _names(op, implementations, where, backward)
    name = tuning.device_name(op.name, names[0])
    assert name is not None
    file = tuning.shipped_file(op, name) if ship else tuning.user_file(name)
    tuning.read(file)  # an unreadable file is refused before the work, not after
    memory_factor = MEMORY_FACTOR_BACKWARD if backward else MEMORY_FACTOR
    skipped: list[str] = []
    tuned: list[TunedCase] = []
    ceilings = measured_ceilings(where)
    fallback.forget()
    for dtype in tuple(dtypes or op.dtypes[:1]):
        for case in fitting_cases(op, cases, where, dtype, False, memory_factor, skipped):
            made = CaseArguments(op, case, where, dtype)
            for implementation in names:
                progress(f"{op.short_name}: {case.name}, {dtype_name(dtype)}, {implementation}")
                with fallback.strict():
                    one = _Tunable(op, implementation, case, where, dtype, made)
                    refusal = one.refusal()
                    if refusal is None:
                        tuned.append(one.tuned(ceilings, budget_s, seed))
                    else:
                        title = f"{case.name}, {dtype_name(dtype)}, {implementation}"
                        skipped.append(f"{title}: {refusal}")
                del one
                give_memory_back(where)
    environment = describe(where)
    command = command or f"fuselab bench {op.short_name} --tune"
    undecided: list[str] = []
    choices = _choose(tuned, environment, command, undecided)
    if choices:
        tuning.save(op, name, choices, file)
    marked = [_marked(case, choices) for case in tuned]
    return Tuning(op.name, environment, command, file, marked, skipped, undecided)


def _names(
    op: FusedOp, asked: Sequence[str] | None, device: torch.device, backward: bool
) -> list[str]:
    """Return the keys of ``op.configs`` to tune on this device."""
    known = {key.removesuffix("_backward") for key in op.configs}
    for name in asked or ():
        if name not in known and known:
            raise UnknownNameError("tunable implementation", name, known)
    here = [
        key
        for key in op.configs
        if (asked is None or key.removesuffix("_backward") in asked)
        and op.implementations[key.removesuffix("_backward")].device == device.type
    ]
    names = [key for key in here if backward or not key.endswith("_backward")]
    if not op.configs:
        raise ArgumentError(
            f"{op.short_name} has nothing to tune: its FusedOp.configs is empty; give it the "
            "candidate configurations of an implementation (docs/bench.md)."
        )
    if here and not names:
        raise ArgumentError(
            f"{op.short_name} has nothing to tune but {', '.join(here)}; give --backward "
            "(backward=True)."
        )
    if not names:
        devices = sorted({op.implementations[name].device for name in known})
        raise ArgumentError(
            f"{op.short_name} has nothing to tune on {device.type}: its FusedOp.configs are of "
            f"{', '.join(sorted(op.configs))}, on {', '.join(devices)}."
        )
    return names


class _Tunable:
    """One implementation's forward or backward on one case."""

    def __init__(
        self,
        op: FusedOp,
        name: str,
        case: Case,
        device: torch.device,
        dtype: torch.dtype,
        made: CaseArguments,
    ) -> None:
        self.op, self.name = op, name
        self.is_backward = name.endswith("_backward")
        self.implementation = op.implementations[name.removesuffix("_backward")]
        phase = "backward" if self.is_backward else "forward"
        self.work = Work(op, case, device, dtype, phase, made)
        self.args: tuple[Any, ...] = self.work.args
        self.asked: dict[str, None] = {}  # the keys with which the launcher asked, in order

    def refusal(self) -> str | None:
        """Return why there is nothing to tune here, or None; also find the candidates and the
        key."""
        reason = dispatch.why_not(self.op, self.name.removesuffix("_backward"), self.args)
        if reason is None and self.is_backward:
            if self.implementation.backward is None:
                return "the implementation has no backward"
            self._save()
            reason = self.implementation.supports_backward(*self.args)
        if reason is not None:
            return reason
        self.candidates: list[Any] = list(dict.fromkeys(self.op.configs[self.name](*self.args)))
        if not self.candidates:
            return "it has no candidate for these arguments"
        try:
            self._calls(self.candidates[0]).checked()
        except Exception as error:  # a kernel may raise anything
            return f"the default, {self.candidates[0]}, raised {summary(error)}"
        if len(self.asked) != 1:
            keys = ", ".join(f"'{key}'" for key in self.asked) or "none"
            return f"its launcher must ask tuning.chosen() with one key here, and asks with {keys}"
        return None

    def _save(self) -> None:
        """Set the backward's arguments, from the reference's output."""
        gradient = self.op.gradient
        assert gradient is not None
        args = mapped(_detached, self.args)
        output = self.op.reference(*args)
        self.outputs = outputs_in(output)
        assert self.work.upstream is not None
        upstream = as_declared(self.op, self.outputs, self.work.upstream)
        self.needs = tuple(needed(self.op, args))
        self.args = (
            self.needs,
            upstream,
            *gradient.save(self.op.with_residuals(output, args), *args),
        )

    def _calls(self, config: Config) -> Calls:
        def forward(*args: Any) -> Any:
            returned = self._forced(config, self.implementation.forward, args)
            return self.op.without_residuals(returned)

        def backward() -> tuple[Tensor | None, ...]:
            assert self.implementation.backward is not None
            grads = self._forced(config, self.implementation.backward, self.args)
            wanted = (grad for grad, need in zip(grads, self.needs, strict=True) if need)
            return *self.outputs, *wanted

        if self.is_backward:
            return Calls(backward, backward)
        return self.work.calls(forward, self.work.args, writes=bool(self.op.mutates))

    def _forced(self, config: Config, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        with tuning.forced(self.op.name, self.name, config) as forced, torch.no_grad():
            try:
                return function(*args)
            finally:
                self.asked.update(dict.fromkeys(forced.keys))

    def tuned(self, ceilings: Ceilings, budget_s: float | None, seed: int) -> TunedCase:
        """Time every candidate beside the ceiling."""
        calls = {str(config): self._calls(config) for config in self.candidates}
        budget_s = budget_s or max(LEAST_BUDGET_S, BUDGET_PER_CANDIDATE_S * len(calls))
        run = Run(self.work, [], ceilings, budget_s, seed, energy=False)
        candidates = [
            Candidate(name, one.timed, functools.partial(self._verify, one))
            for name, one in calls.items()
        ]
        samples = interleave(
            [*candidates, *run.streaming()], self.work.device, budget_s=budget_s, seed=seed
        )
        ceiling = run.ceiling(samples)
        ceiling_us = ceiling.median_us if ceiling else None
        tried = [
            self._tried(config, samples[str(config)], calls[str(config)], ceiling_us)
            for config in self.candidates
        ]
        tried[0] = replace(tried[0], is_default=True)
        return TunedCase(
            self.work.case.name,
            dtype_name(self.work.dtype),
            self.name,
            next(iter(self.asked)),
            ceiling_us,
            tried,
            {config: samples[str(config)].times_us for config in self.candidates},
        )

    def _verify(self, calls: Calls, after: bool) -> str | None:
        return self.work.problem(calls.checked)

    def _tried(
        self, config: Config, found: Samples, calls: Calls, ceiling_us: float | None
    ) -> Tried:
        if not found.times_us:
            return Tried(config, "wrong" if found.wrong else "failed", found.wrong or found.failed)
        middle, low, high = (significant(value) for value in median_interval(found.times_us))
        share = significant(ceiling_us / middle) if ceiling_us else None
        return Tried(config, "ok", None, middle, low, high, share, *_resources(calls))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _resources(calls: Calls) -> tuple[int | None, int | None, int | None]:
    """Return the most registers, local bytes and shared bytes among a call's launches."""
    with launch_recording.LaunchWatch() as launches:
        calls.timed()
    found = [
        (registers, local_bytes, static_bytes + dynamic_bytes)
        for on_cuda, function, index, _, _, dynamic_bytes in launches.made
        if on_cuda
        for registers, local_bytes, static_bytes in [
            cuda_driver.function_resources(function, index)
        ]
    ]
    if not found:
        return None, None, None
    registers, local_bytes, shared_bytes = map(max, zip(*found, strict=True))
    return registers, local_bytes, shared_bytes


def _choose(
    tuned: Sequence[TunedCase],
    environment: Mapping[str, Any],
    command: str,
    undecided: list[str],
) -> dict[tuple[str, str], TunedConfig]:
    """Return the fastest configuration by implementation and key.

    Adds a line to ``undecided`` for each key where more rounds might find a faster one.
    """
    choices = {}
    for place in dict.fromkeys((case.implementation, case.key) for case in tuned):
        cases = [case for case in tuned if (case.implementation, case.key) == place]
        config, maybe = _fastest(cases)
        if maybe is not None:
            undecided.append(
                f"{place[0]}, key '{place[1]}': {maybe} may be faster; give it --budget"
            )
        if config is None:
            continue
        default = cases[-1].tried[0].config
        last = {tried.config: tried.median_us for tried in cases[-1].tried}
        us = last[config]
        assert us is not None
        choices[place] = TunedConfig(
            config,
            us,
            last[default],
            [f"{case.case}, {case.dtype}" for case in cases],
            str(environment["date"]),
            {name: environment[name] for name in ("torch", "triton", "driver")},
            command,
        )
    return choices


def _fastest(cases: Sequence[TunedCase]) -> tuple[Config | None, Config | None]:
    """Return the configuration to choose, and one that may be faster but had too few rounds.

    Only configurations that are right in every case count. The first is None if there is none, or
    if the cases' defaults differ and nothing is better; the second may be None too.
    """
    right = [
        config for config in cases[0].times_us if all(case.times_us.get(config) for case in cases)
    ]
    defaults = [case.tried[0].config for case in cases]
    times = [case.times_us[default] for case, default in zip(cases, defaults, strict=True)]

    def score(config: Config) -> float:
        """Return the product, over the cases, of the median time over the default's."""
        return math.prod(
            median(case.times_us[config]) / median(default)
            for case, default in zip(cases, times, strict=True)
            if default
        )

    ranked = sorted(right, key=score)
    if not all(times):
        return (ranked[0] if ranked else None), None
    maybe = None
    for config in [config for config in ranked if score(config) < 1]:
        outcomes = [
            verdict(case.times_us[config], default).outcome
            for case, default in zip(cases, times, strict=True)
        ]
        if Outcome.FASTER in outcomes and Outcome.SLOWER not in outcomes:
            return config, maybe
        if Outcome.SLOWER not in outcomes and Outcome.UNCLEAR in outcomes:
            maybe = maybe or config
    return (defaults[0] if len(set(defaults)) == 1 else None), maybe


def _marked(case: TunedCase, choices: Mapping[tuple[str, str], TunedConfig]) -> TunedCase:
    choice = choices.get((case.implementation, case.key))
    tried = [
        replace(one, is_chosen=choice is not None and one.config == choice.config)
        for one in case.tried
    ]
    return replace(case, tried=tried)
