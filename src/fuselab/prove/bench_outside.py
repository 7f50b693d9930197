"""Times that a benchmark claims, held against the judge's own clock, and outputs of timed calls.

``fuselab bench`` times the implementations of a file in a process that has imported it, where a
file may patch the clock. What comes out is a claim. The judge then times the same calls from
outside: in a process that runs the implementation, it asks for K, 2 K and 4 K calls in an order
that is not announced, and the slope of their times is the time of a call. A claim more than 5 %
below the lower end of the slope's interval is a failure. Rounds are added until the interval is
narrow; a claim below a slope that stays uncertain is not judged, which is a failure too. Calls that
follow each other at once find their inputs in the caches, which a benchmark clears, so an honest
claim is not below the slope.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from fuselab.measure.statistics import median_interval, significant
from fuselab.prove import asked_inputs, asked_timing
from fuselab.prove.asked_timing import MIXTURES, Mixture
from fuselab.prove.bar_of_end import bar_of_end
from fuselab.prove.bench_work import SLACK
from fuselab.prove.facts import Facts
from fuselab.prove.held import CandidateError, RemoteError, results, said
from fuselab.prove.outside_clock import Clock, drawn_change, own_copies, runs_at
from fuselab.prove.processes import CALL_LIMIT_S, Process

TOLERANCE = 0.05  # by how much a claim may lie below the slope's interval
_STEPS = (1, 2, 4)  # in units of K
_ROUNDS = (8, 16, 32)  # the next number is taken while the interval is wide
_WIDE = 0.5  # an interval whose lower end is below this share of the slope says too little
_ATTEMPTS = 3
_BATCH_S = 0.02  # what K calls should take
_MOST_CALLS = 2048
_MOST_SETS = 256
_MOST_BYTES = 1 << 26  # of the sets of inputs of a batch


@dataclass(frozen=True)
class Outside:
    """One claim beside the judge's own measurement; ``problem`` says what is wrong, if anything.

    Times are in microseconds; ``low_us`` to ``high_us`` is the 95 % interval of the slope.
    """

    case: str
    dtype: str
    provider: str
    claimed_us: float
    outside_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    judged_calls: int = 0
    problem: str | None = None

    @property
    def is_too_low(self) -> bool:
        """Whether the claim lies below what the clock outside shows."""
        return self.low_us is not None and self.claimed_us * (1 + TOLERANCE) < self.low_us

    @property
    def is_uncertain(self) -> bool:
        """Whether the claim lies below a slope whose interval is too wide to judge it."""
        if self.low_us is None or self.outside_us is None or self.is_too_low:
            return False
        is_wide = self.low_us < _WIDE * self.outside_us
        return is_wide and self.claimed_us * (1 + TOLERANCE) < self.outside_us

    def order(self) -> tuple[bool, float]:
        """Return what sorts measurements of one claim: wrong outputs first, then the fastest."""
        wrong = self.problem is not None and not (self.is_too_low or self.is_uncertain)
        return not wrong, self.outside_us or 0.0

    @property
    def line(self) -> str:
        """The measurement as a line of the screen."""
        name = f"{self.case}, {self.dtype}: {self.provider}"
        if self.outside_us is None:
            return f"{name}: {self.problem}"
        text = f"{name}: {self.outside_us:.4g} us ({self.low_us:.4g} to {self.high_us:.4g})"
        text += f" from outside, {self.claimed_us:.4g} us claimed"
        return text if self.problem is None else f"{text}: {self.problem}"


def measured_outside(
    spec: str,
    claims: Mapping[str, Any],
    providers: Sequence[str] | None = None,
    call_limit_s: float = CALL_LIMIT_S,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Outside]:
    """Measure every forward that ``claims``, the JSON of a benchmark on a CPU, gives a time for, of
    the implementations of the operator that ``spec`` names, or of those among ``providers``.

    One of which the claims say nothing is a problem too. A composition has no implementation.
    """
    cpu = torch.device("cpu")
    found = []
    with Process(spec, "reference", cpu, limit_s=call_limit_s) as reference:
        reference.start()
        if reference.is_whole:
            return []
        facts = Facts.of_plain(reference.ask(asked_inputs.operator_facts))
        names = [
            name
            for name, device in facts.implementations.items()
            if device == "cpu" and (providers is None or name in providers)
        ]
        for claim in _claims(claims, names):
            if claim.problem is None:
                progress(f"{facts.name}: {claim.case}, {claim.dtype}, {claim.provider}, outside")
                with Process(
                    spec, "candidate", cpu, claim.provider, limit_s=call_limit_s
                ) as candidate:
                    claim = _fastest(facts, reference, candidate, claim)
            found.append(claim)
    return found


def _claims(told: Mapping[str, Any], names: Sequence[str]) -> Iterator[Outside]:
    """Yield the claim on each implementation in each forward; with a problem where there is
    none."""
    groups = [group for group in told.get("groups", ()) if group.get("phase") == "forward"]
    if names and not groups:
        yield Outside("no case", "no dtype", names[0], 0.0, problem="nothing was measured")
    for group in groups:
        records = {record.get("provider"): record for record in group.get("records", ())}
        case, dtype = str(group.get("case")), str(group.get("dtype"))
        for name in names:
            status = records.get(name, {}).get("status")
            if status == "ok":
                yield Outside(case, dtype, name, float(records[name]["median_us"]))
            elif status is None:
                yield Outside(case, dtype, name, 0.0, problem="nothing was measured")


def _fastest(facts: Facts, reference: Process, candidate: Process, claim: Outside) -> Outside:
    """Measure a claim, and again where it seems too low or the clock is uncertain: other work on
    the machine makes the clock outside show more, never less."""
    found = _measured(facts, reference, candidate, claim)
    for _ in range(_ATTEMPTS - 1):
        if not (found.is_too_low or found.is_uncertain):
            break
        found = min(found, _measured(facts, reference, candidate, claim), key=Outside.order)
    return found


def _measured(facts: Facts, reference: Process, candidate: Process, claim: Outside) -> Outside:
    places = [place for place, case in enumerate(facts.cases) if case.name == claim.case]
    dtype = getattr(torch, claim.dtype, None)
    if not places or dtype not in facts.dtypes:
        return replace(claim, problem="the operator has no such case or dtype")
    chance = random.SystemRandom()
    cpu = torch.device("cpu")
    try:
        made, other = (
            reference.ask(
                asked_inputs.made, claim.provider, places[0], cpu, dtype, chance.randrange(1 << 31)
            )
            for _ in range(2)
        )
        if made is None:
            return replace(claim, problem="is refused with other values of the case")
        clock = Clock(candidate, reference)
        return _slope(Feed(clock, own_copies(made), other, chance), claim, chance)
    except (RemoteError, CandidateError) as error:
        return replace(claim, problem=said(error, 200))


class Feed:
    """The inputs of the calls of two processes: in every batch new ones, where two draws of a case
    can be mixed and the reference runs on the mixture, and a few other elements in every call."""

    def __init__(
        self, clock: Clock, args: list[Any], others: Sequence[Any] | None, chance: random.Random
    ) -> None:
        self.clock, self.args, self.chance = clock, args, chance
        self.mixture: Mixture | None = None
        for process in (clock.process, clock.beside):
            process.ask(asked_timing.prepare, args, False)
        if others is None:
            return
        seed = chance.randrange(1 << 31)
        mixture = Mixture(args, others, seed)
        if mixture.places and runs_at(clock.beside, results, *mixture.inputs(0)):
            self.mixture = mixture
            for process in (clock.process, clock.beside):
                process.ask(asked_timing.keep_mixture, list(others), seed)

    def batch(self, count: int) -> float:
        """Return the seconds of ``count`` calls, and leave in ``args`` what the last one found."""
        sets = count
        if self.mixture is not None:
            sets = min(count, _MOST_SETS, max(1, _MOST_BYTES // self.mixture.nbytes()))
            starts = self.chance.sample(range(MIXTURES), sets)
            self.clock.mix(starts)
            self.args = self.mixture.inputs(starts[(count - 1) % sets])
        change = drawn_change(
            self.args, self.chance, lambda some: runs_at(self.clock.beside, results, *some)
        )
        taken_s = self.clock.ask(change, count)
        turns = range(count) if self.mixture is None else range((count - 1) % sets, count, sets)
        for turn in turns:
            change.write(self.args, turn)
        return taken_s


def _slope(feed: Feed, claim: Outside, chance: random.Random) -> Outside:
    """Time batches of calls and judge the output of the last call of some, chosen afterwards."""
    clock = feed.clock
    once = median(feed.batch(1) for _ in range(3))
    unit = min(_MOST_CALLS, max(1, round(_BATCH_S / max(once, 1e-6))))
    slopes: list[float] = []
    judged = 0
    problem = None
    for number in range(_ROUNDS[-1]):
        if number in _ROUNDS and _is_narrow(slopes):
            break
        times: dict[int, float] = {}
        for step in chance.sample(_STEPS, len(_STEPS)):
            times[step] = feed.batch(step * unit)
            if problem is None and (chance.random() < 0.25 or (number == 0 and not judged)):
                problem = _problem(clock.beside, feed.args, clock.taken())
                judged += 1
        slopes.append((times[4] - times[1]) / (3 * unit) + clock.late / unit)
    middle, low, high = (max(one, 1e-9) * 1e6 for one in median_interval(slopes))
    found = replace(
        claim,
        outside_us=significant(middle),
        low_us=significant(low),
        high_us=significant(high),
        judged_calls=judged,
        problem=problem,
    )
    if problem is None and found.is_too_low:
        below = 100 * (1 - claim.claimed_us / low)
        text = f"the claim is {below:.0f} % below what the clock outside shows"
        return replace(found, problem=text)
    if problem is None and found.is_uncertain:
        return replace(found, problem="the claim is not judged: other work disturbs the clock")
    return found


def _is_narrow(slopes: Sequence[float]) -> bool:
    middle, low, _ = median_interval(slopes)
    return low >= _WIDE * middle


def _problem(reference: Process, args: Sequence[Any], found: Sequence[Any]) -> str | None:
    """Return what is wrong with the outputs of a timed call, or None."""
    bar = bar_of_end(reference, results, args, arguments=tuple, slack=SLACK)
    if len(found) != len(bar.eager):
        return f"a timed call returns {len(found)} outputs"
    problems = (judgement.problem for judgement in bar.judge(found))
    text = next((one for one in problems if one is not None), None)
    return None if text is None else f"the output of a timed call {text}"
