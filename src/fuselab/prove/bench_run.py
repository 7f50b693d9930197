"""One case, dtype and phase of a benchmark: all providers and the ceiling, interleaved."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from statistics import median

import torch

from fuselab.device.ceiling import (
    HIGHEST_PLAUSIBLE_SHARE,
    Ceilings,
    measured_again,
    streaming_ceiling,
)
from fuselab.errors import summary
from fuselab.measure.energy import joules_per_call
from fuselab.measure.interleave import FEWEST_ROUNDS, Candidate, Samples, interleave
from fuselab.measure.memory import peak_bytes
from fuselab.measure.statistics import median_interval, quantiles, significant
from fuselab.measure.timer import Call
from fuselab.measure.verdict import Outcome, verdict
from fuselab.op import Cost, dtype_name
from fuselab.prove.bench_providers import Provider, best_peer
from fuselab.prove.bench_result import OURS, Ceiling, Comparison, Group, Record
from fuselab.prove.bench_work import Calls, Work

CEILING = "ceiling: "
_ATTEMPTS = 3
# Below this time the limit is mostly what a call of its kernel takes, and says little about bytes.
_LEAST_LIMIT_US = 20.0
HOST_SHARE = 3  # the host's timing gets an extra third of the device's budget


class Run:
    """All providers on one piece of work.

    With ``captured`` (CUDA only) the calls are replayed from CUDA graphs, unless one of them cannot
    be captured because it waits for the device. ``fewest`` rounds are taken whatever the budget is.
    """

    def __init__(
        self,
        work: Work,
        providers: Sequence[Provider],
        ceilings: Ceilings,
        budget_s: float,
        seed: int,
        energy: bool,
        captured: bool = False,
        fewest: int = FEWEST_ROUNDS,
    ) -> None:
        self.work, self.providers, self.ceilings = work, providers, ceilings
        self.budget_s, self.seed, self.energy = budget_s, seed, energy
        self.captured, self.fewest = captured, fewest
        self.costs = _costs(work)
        self.calls: dict[str, Calls] = {}
        self.unmeasured: dict[str, Record] = {}
        self.kinds = {provider.name: provider.kind for provider in providers}
        self.renewed = False
        self.by_host = "tiny" in work.case.tags

    def group(self) -> Group:
        """Prepare every provider and time it, with torch.compile reset before."""
        with _compile_settings(self.work.phase, self.providers):
            self.prepare()
            return self.timed()

    def timed(self) -> Group:
        """Time the providers that ``prepare`` has made ready, and again where one of ours is above
        the limit: other work on the machine may have disturbed the limit's own kernel."""
        for attempt in range(_ATTEMPTS):
            group = self._timed(self.seed + attempt)
            if not any(record.is_ours and record.is_above_limit for record in group.records):
                break
        return group

    def _timed(self, seed: int) -> Group:
        compared = {provider.name for provider in self.providers if provider.is_compared}
        candidates = [
            Candidate(name, calls.timed, functools.partial(self._verify, calls.checked))
            if name in compared
            else Candidate(name, calls.timed)
            for name, calls in self.calls.items()
        ]
        samples = self._samples(candidates, seed)
        if self.captured and any(samples[name].failed for name in self.calls):
            self.captured = False
            samples = self._samples(candidates, seed)
        hosts = interleave(
            [
                Candidate(name, calls.timed)
                for name, calls in self.calls.items()
                if samples[name].times_us
            ],
            self.work.device,
            host=True,
            budget_s=self.budget_s / HOST_SHARE,
            seed=seed,
            fewest=self.fewest if self.by_host else FEWEST_ROUNDS,
            decided=self._decided,
        )
        ceiling = self.ceiling(samples)
        records = [self._record(provider, samples, hosts, ceiling) for provider in self.providers]
        total = _total(self.costs)
        return Group(
            case=self.work.case.name,
            dtype=dtype_name(self.work.dtype),
            phase=self.work.phase,
            bytes_read=total.bytes_read if total else None,
            bytes_written=total.bytes_written if total else None,
            flops=total.flops if total else None,
            unit=total.unit if total else None,
            ceiling=ceiling,
            records=records,
            verdicts_by="host time" if self.by_host else "device time",
        )

    def _samples(self, candidates: Sequence[Candidate], seed: int) -> dict[str, Samples]:
        """Time the candidates and the limit's kernels on the device."""
        return interleave(
            [*candidates, *self.streaming()],
            self.work.device,
            graph=self.captured,
            budget_s=self.budget_s,
            seed=seed,
            fewest=self.fewest,
            decided=self._decided,
        )

    def prepare(self) -> None:
        """Make every provider's calls; what cannot be made gets its record here."""
        for provider in self.providers:
            refusal = provider.refuses(self.work.args)
            if refusal is not None:
                self.unmeasured[provider.name] = Record(
                    provider.name, provider.kind, "unsupported", refusal
                )
                continue
            try:
                function, args = provider.prepare(self.work.args)
                writes = bool(self.work.op.mutates) and provider.kind in OURS
                self.calls[provider.name] = self.work.calls(function, args, writes)
            except Exception as error:  # other projects' compilers may raise anything
                ours = provider.kind in OURS
                self.unmeasured[provider.name] = Record(
                    provider.name,
                    provider.kind,
                    "failed" if ours else "unavailable",
                    summary(error),
                )

    def _verify(self, call: Call, after: bool) -> str | None:
        if after and not self.renewed:
            self.work.renew()
            self.renewed = True
        problem = self.work.problem(call)
        return f"after timing: {problem}" if problem and after else problem

    def streaming(self) -> list[Candidate]:
        """Return the candidates for the size-matched ceiling.

        For forward+backward there is one candidate, which runs the two passes' streams after each
        other.
        """
        ways = [
            streaming_ceiling(cost.bytes_read, cost.bytes_written, self.work.device)
            for cost in self.costs
        ]
        ways = [way for way in ways if way]
        if not ways:
            return []
        if len(ways) == 1:
            return [Candidate(CEILING + way.name, way.call) for way in ways[0]]
        first, second = (way[0] for way in ways)

        def both() -> None:
            first.call()
            second.call()

        return [Candidate(f"{CEILING}{first.name}, then {second.name}", both)]

    def _decided(self, times: Mapping[str, Sequence[float]]) -> bool:
        """Return whether every verdict on an implementation of ours is clear."""
        medians = {name: median(values) for name, values in times.items() if name in self.kinds}
        peer = best_peer(medians, self.kinds)
        ours = [name for name in medians if self.kinds[name] in OURS]
        return all(
            verdict(times[name], times[other]).outcome is not Outcome.UNCLEAR
            for name in ours or medians
            for other in {"eager", peer} & set(medians) - {name}
            if other is not None
        )

    def ceiling(self, samples: Mapping[str, Samples]) -> Ceiling | None:
        """Return the longer of the streaming time and the arithmetic time; None if there is none.

        A stored rate that was exceeded in this run is measured again, and ``self.ceilings`` is
        updated.
        """
        streamed = {
            name.removeprefix(CEILING): median_interval(found.times_us)
            for name, found in samples.items()
            if name.startswith(CEILING) and found.times_us
        }
        total = _total(self.costs)
        if not streamed or total is None:
            return None
        kernel = min(streamed, key=streamed.__getitem__)
        stream_us, low_us, _ = streamed[kernel]
        timed_us = [
            median(found.times_us)
            for name, found in samples.items()
            if not name.startswith(CEILING) and found.times_us
        ]
        for unit in {cost.unit for cost in self.costs} & set(self.ceilings.matmul_tflops):
            if self._compute_us() > max(stream_us, min(timed_us, default=inf)):
                self.ceilings = measured_again(
                    self.ceilings, self.work.device, "matmul_tflops", unit
                )
        compute_us = self._compute_us()
        if compute_us > stream_us:
            compute_us = significant(compute_us)
            kernel = f"{total.unit} matrix product"
            return Ceiling("compute", kernel, compute_us, None, compute_us)
        gbps = _gbps(total.bytes_moved / stream_us / 1000)
        if gbps > self.ceilings.best_gbps:
            size = self.ceilings.nearest_copy(total.bytes_moved)
            self.ceilings = measured_again(self.ceilings, self.work.device, "copy_gbps", size)
        return Ceiling("memory", kernel, significant(stream_us), gbps, significant(low_us))

    def _compute_us(self) -> float:
        rates = self.ceilings.matmul_tflops
        return sum(cost.flops / rates[cost.unit] / 1e6 for cost in self.costs if cost.unit in rates)

    def _record(
        self,
        provider: Provider,
        samples: Mapping[str, Samples],
        hosts: Mapping[str, Samples],
        ceiling: Ceiling | None,
    ) -> Record:
        name = provider.name
        if name in self.unmeasured:
            return self.unmeasured[name]
        found = samples[name]
        if not found.times_us:
            status = "wrong" if found.wrong else "failed"
            if status == "failed" and provider.kind not in OURS:
                status = "unavailable"
            return Record(name, provider.kind, status, found.wrong or found.failed)
        middle, low, high = (significant(value) for value in median_interval(found.times_us))
        total = _total(self.costs)
        share = significant(ceiling.median_us / middle) if ceiling else None
        joules = joules_per_call(self.calls[name].timed, self.work.device) if self.energy else None
        deciding = hosts if self.by_host else samples
        medians = {other: median(deciding[other].times_us) for other in hosts}
        return Record(
            provider=name,
            kind=provider.kind,
            status="ok",
            note=provider.note(self.work.args),
            median_us=middle,
            low_us=low,
            high_us=high,
            quantiles_us={
                key: significant(value) for key, value in quantiles(found.times_us).items()
            },
            rounds=len(found.times_us),
            calls_per_round=found.calls_per_sample,
            method=found.method,
            host_us=significant(median(hosts[name].times_us)),
            gbps=_gbps(total.bytes_moved / middle / 1000) if total else None,
            tflops=significant(total.flops / middle / 1e6) if total else None,
            ceiling_share=share,
            explain=_explain(share),
            is_above_limit=_is_above(ceiling, high),
            peak_bytes=peak_bytes(self.calls[name].timed, self.work.device),
            joules=significant(joules) if joules is not None else None,
            page_faults_per_call=(
                significant(found.page_faults_per_call)
                if found.page_faults_per_call is not None
                else None
            ),
            vs_eager=_compare(name, "eager", deciding),
            vs_best_peer=_compare(name, best_peer(medians, self.kinds), deciding),
        )


def _explain(share: float | None) -> str | None:
    if share is None or share <= HIGHEST_PLAUSIBLE_SHARE:
        return None
    return (
        "above the limit: a cache kept some of the bytes, the operator's cost counts bytes or "
        "operations that are not needed, the work is not done when the call ends, or the limit's "
        "own kernel was disturbed"
    )


def _is_above(ceiling: Ceiling | None, high_us: float) -> bool:
    """Return whether the upper end of a time's interval is shorter than the lower end of the
    limit's allows."""
    if ceiling is None or ceiling.low_us is None or ceiling.low_us < _LEAST_LIMIT_US:
        return False
    return ceiling.low_us > HIGHEST_PLAUSIBLE_SHARE * high_us


def _compare(name: str, other: str | None, samples: Mapping[str, Samples]) -> Comparison | None:
    if other is None or other == name or other not in samples or not samples[other].times_us:
        return None
    found = verdict(samples[name].times_us, samples[other].times_us)
    return Comparison(
        other,
        str(found.outcome),
        *(_ratio(value) for value in (found.speedup, found.low, found.high)),
    )


def _gbps(value: float) -> float:
    """Round to four significant digits and at most four decimals, since a bandwidth below 0.1 MB/s
    says nothing."""
    return round(significant(value), 4)


def _ratio(value: float) -> float:
    """Round to three decimals below 10, and to four significant digits from there on."""
    return round(value, 3) if value < 10 else significant(value)


def _costs(work: Work) -> list[Cost]:
    """Return the least work of the phase, as one cost per pass; empty if a cost is not declared."""
    op, costs = work.op, []
    if "forward" in work.phase:
        costs.append(op.cost(*work.args))
    if "backward" in work.phase:
        if op.cost_backward is None:
            return []
        costs.append(op.cost_backward(*work.args))
    return costs


def _total(costs: Sequence[Cost]) -> Cost | None:
    if not costs:
        return None
    return Cost(
        sum(cost.bytes_read for cost in costs),
        sum(cost.bytes_written for cost in costs),
        sum(cost.flops for cost in costs),
        costs[0].unit,
    )


def _compile_settings(phase: str, providers: Sequence[Provider]) -> AbstractContextManager[None]:
    """Reset torch.compile, and configure it for this phase.

    The reset is needed because after 8 recompiles of a function later cases would run eagerly.
    Donated buffers are off where a compiled backward runs repeatedly on the same graph.
    """
    if not any(provider.kind == "compile" for provider in providers):
        return nullcontext()
    import torch._functorch.config as functorch_config

    torch._dynamo.reset()
    patched: AbstractContextManager[None] = functorch_config.patch(
        donated_buffer=phase != "backward"
    )
    return patched
