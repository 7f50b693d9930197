"""``fuselab judge``: one verdict on each answer to a problem, every answer in a process of its own.

A problem defines ``Model`` and its inputs, an answer ``ModelNew``. An answer is right if its
outputs meet the bar of ``fuselab.prove.accuracy`` on inputs drawn after several seeds, if it writes
to none of them, and if the output of any timed call is right.

The judge holds the clock. A timed call is a question to the answer's process; what a question costs
without a call is measured beside it and subtracted. Every call has other inputs, drawn after
another seed. After some calls, chosen at random once they have ended, the judge takes the outputs
and judges them. What taking them costs more the first time than the second is part of the call's
time, so that a call which only computes when it is asked gains nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ArgumentError, TargetError
from fuselab.measure.statistics import significant
from fuselab.measure.verdict import Outcome, Verdict, verdict
from fuselab.op import tensors_in
from fuselab.prove import asked_problem, asked_timing
from fuselab.prove.accuracy import Bar
from fuselab.prove.asked_memory import arguments_after, storage_bytes
from fuselab.prove.asked_problem import ANSWER, PROBLEM, model_results
from fuselab.prove.asked_timing import Change
from fuselab.prove.check_memory import same_bits
from fuselab.prove.held import CandidateError, RemoteError, fault_of
from fuselab.prove.outside_clock import (
    Clock,
    drawn_change,
    own_copies,
    timed,
)
from fuselab.prove.problem import Problem
from fuselab.prove.processes import CALL_LIMIT_S, Process
from fuselab.runtime.dispatch.overlap import overlaps_itself

TRIALS = {True: 2, False: 5}  # by whether the judge is quick
TIMING_S = {True: 1.0, False: 4.0}
MANY_CALLS_S = {True: 1.0, False: 4.0}  # the time for many calls in a row
_MOST_CALLS = 2_000
# So many are made on a busy machine too, unless that takes so many times as long.
_LEAST_CALLS, _PATIENCE = 256, 10
_LOOKED_AT_AGAIN = 32  # outputs, after many calls
# Calls in one message: at most, and the seconds after which no more follow in the next one.
_CALLS_AT_ONCE, _MESSAGE_S = 64, 0.1
_TAKEN_BYTES = 1 << 24  # of outputs that are taken in one message
_ROUNDS = (12, 200)  # the fewest and the most
# A speedup says too little if the upper end of its interval is more than so many times the lower
# one. Rounds are added then, for ``_PATIENCE`` times as long at most.
_WIDE = 4.0
_UNCERTAIN = (
    "the interval of the speedup is wide: other work on the machine disturbs the clock, or the "
    "calls are too short for it"
)
# The share of calls whose outputs are taken and judged, and how many are judged at least. An answer
# whose median shows less work than it does must leave out half of its calls: of eight that are
# judged, none is then such a one in 1 of 256 runs.
_TAKEN = 0.25
_LEAST_JUDGED = 8


class Judgement(StrEnum):
    """The verdict on one answer."""

    RIGHT = "RIGHT"
    WRONG = "WRONG"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Speed:
    """The time of an answer's calls, and how it compares: a speedup above 1 is faster, ``low`` to
    ``high`` is its interval. Times are medians in microseconds. ``note`` says why the comparison is
    uncertain, where it is."""

    median_us: float
    against: dict[str, dict[str, Any]]
    rounds: int
    judged_calls: int
    note: str | None = None


@dataclass(frozen=True)
class AnswerReport:
    """The verdict on one answer, and why. ``calls`` counts those that were made in a row before any
    was timed; ``kept_from`` says what its process could not do."""

    candidate: str
    verdict: Judgement
    reason: str | None = None
    trials: int = 0
    share_of_bar: float = 0.0
    ours_ulp: float = 0.0
    eager_ulp: float = 0.0
    calls: int = 0
    speed: Speed | None = None
    kept_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProblemReport:
    """The verdicts on the answers to a problem, in the order in which they were given: on all
    ``candidates``, or while the judge works on those that are judged so far."""

    problem: str
    seed: int
    quick: bool
    device: str
    candidates: tuple[str, ...]
    answers: tuple[AnswerReport, ...]

    @property
    def complete(self) -> bool:
        """Whether every candidate has its verdict."""
        return len(self.answers) == len(self.candidates)

    @property
    def passed(self) -> bool:
        """Whether every candidate is right; no before all are judged."""
        return self.complete and all(one.verdict is Judgement.RIGHT for one in self.answers)

    def facts(self) -> dict[str, Any]:
        """Return the report as plain JSON values, as ``--json`` writes it under the common keys."""
        return asdict(self) | {"complete": self.complete, "passed": self.passed}


class _WrongError(Exception):
    """A sign that an answer is wrong; the message says which."""


def judge_problem(
    problem: str,
    candidates: Sequence[str],
    device: torch.device,
    seed: int | None = None,
    quick: bool = False,
    with_compile: bool = True,
    call_limit_s: float = CALL_LIMIT_S,
    memory_gib: float = 8.0,
    progress: Callable[[str], None] = lambda line: None,
    judged: Callable[[ProblemReport], None] = lambda report: None,
) -> ProblemReport:
    """Judge every answer to a problem, one after the other.

    Args:
        problem: a file with ``Model``, ``get_inputs`` and perhaps ``get_init_inputs``.
        candidates: files with ``ModelNew``.
        device: where models run.
        seed: seeds inputs and parameters; drawn and reported if None.
        quick: two sets of inputs and a second of timing, in place of five and four.
        with_compile: also time torch.compile of the problem's model.
        call_limit_s: the time for one call, five times as long for the first one.
        memory_gib: by how much an answer's process may grow.
        progress: called with a line for each answer, and with its verdict.
        judged: called with the report so far once the problem runs, and after every verdict.

    Raises TargetError for a problem that does not run, ArgumentError for limits that are not
    positive or a call without an answer.
    """
    if not call_limit_s > 0 or not memory_gib > 0:
        raise ArgumentError("the limits of time and memory must be above 0.")
    if not candidates:
        raise ArgumentError("there is no answer to judge; name at least one file.")
    for path in (problem, *candidates):
        if not os.path.isfile(path):
            raise TargetError(f"{path}: no such file.")
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    with contextlib.ExitStack() as stack:
        reference = stack.enter_context(
            Process(problem, "reference", device, limit_s=call_limit_s, model=PROBLEM)
        )
        reference.start()
        held = Problem(reference, device, seed)
        held.prepare(TRIALS[quick])
        others = {"eager": reference}
        if with_compile:
            others["compile"] = stack.enter_context(
                Process(problem, "reference", device, limit_s=call_limit_s, model=PROBLEM)
            )
        report = ProblemReport(problem, seed, quick, str(device), tuple(candidates), ())
        judged(report)
        for number, path in enumerate(candidates, start=1):
            progress(f"{number} of {len(candidates)}: {path}")
            answer = _judge(held, others, path, quick, call_limit_s, memory_gib)
            progress(f"{number} of {len(candidates)}: {answer.verdict}")
            report = replace(report, answers=(*report.answers, answer))
            judged(report)
    return report


def _judge(
    problem: Problem,
    others: dict[str, Process],
    path: str,
    quick: bool,
    call_limit_s: float,
    memory_gib: float,
) -> AnswerReport:
    with tempfile.TemporaryDirectory(prefix="fuselab-judge-") as scratch:
        sandbox = {"scratch": scratch, "memory_bytes": int(memory_gib * (1 << 30))}
        process = Process(
            path,
            "candidate",
            problem.device,
            limit_s=call_limit_s,
            model=ANSWER,
            sandbox=sandbox,
            prints=frozenset({asked_problem.build.__name__}),
        )
        report = AnswerReport(path, Judgement.FAILED)
        with process:
            try:
                process.start()
                report = _values(problem, process, path)
                report = replace(report, calls=_many_calls(problem, process, MANY_CALLS_S[quick]))
                speed = _speed(problem, others, process, TIMING_S[quick])
                report = _replaced(report, Judgement.RIGHT, None, speed=speed)
            except _WrongError as wrong:
                report = _replaced(report, Judgement.WRONG, str(wrong))
            except TargetError as error:
                report = _replaced(report, Judgement.FAILED, str(error))
            except (RemoteError, CandidateError) as error:
                report = _replaced(report, Judgement.FAILED, fault_of(error, 200))
            return _replaced(report, report.verdict, report.reason, kept_from=process.holds)


def _replaced(
    report: AnswerReport, found: Judgement, reason: str | None, **changes: Any
) -> AnswerReport:
    return AnswerReport(**{**_fields(report), "verdict": found, "reason": reason, **changes})


def _fields(report: AnswerReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__dataclass_fields__}


def _values(problem: Problem, process: Process, path: str) -> AnswerReport:
    """Judge the answer's outputs on every set of inputs, and that it leaves the inputs alone.

    Raises _WrongError.
    """
    state = _built(problem, process)
    share = ours = eager = 0.0
    sets = [
        (f"set {place + 1} of the inputs", problem.seed + place, args, bar)
        for place, (args, bar) in enumerate(problem.trials)
    ]
    near = [
        (f"set 1 of the inputs {how}", problem.seed, args, bar) for how, args, bar in problem.near
    ]
    for where, seed, args, bar in (sets[0], *near, *sets[1:]):
        values = [*args, torch.float32]
        results = process.ask(model_results, seed, values)
        found = _judged(bar, results, where)
        if found[0] >= share:
            share, ours, eager = found
    returned = process.ask(
        asked_problem.returned, problem.seed, [*problem.trials[0][0], torch.float32]
    )
    if returned != problem.returned:
        raise _WrongError(f"returns {returned}, the problem {problem.returned}")
    _judge_what_stays(problem, process)
    if problem.has_its_names(state):
        _judge_other_parameters(problem, process)
    _judge_what_is_outside(problem, process)
    args = problem.trials[0][0]
    before = [storage_bytes(one) for one in args if isinstance(one, Tensor)]
    values = [*args, torch.float32]
    after = process.ask(arguments_after, model_results, 1, problem.seed, values)["tensors"]
    for place, (one, other) in enumerate(zip(before, after, strict=True)):
        if not torch.equal(one, storage_bytes(other)):
            raise _WrongError(f"a call writes to input {place}")
    if problem.takes_read_only:
        _judge_read_only_inputs(problem, process)
    return AnswerReport(path, Judgement.RIGHT, None, len(problem.trials), share, ours, eager)


def _judge_read_only_inputs(problem: Problem, process: Process) -> None:
    """Judge a call on inputs in memory that may only be read: one that writes to them, and puts
    back what was there, ends its process.

    Raises _WrongError.
    """
    args, bar = problem.trials[0]
    try:
        results = process.ask(asked_problem.read_only_results, problem.seed, [*args, torch.float32])
    except CandidateError as error:
        if not any(name in str(error) for name in ("SIGSEGV", "SIGBUS")):
            raise
        raise _WrongError(
            "a call writes to an input, and puts back what was there: on inputs in memory that may "
            f"only be read, {error}"
        ) from error
    _judged(bar, results, "inputs that may only be read")


def _built(
    problem: Problem, process: Process, state: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Build the answer's model with the problem's state, or another one, and return its state.

    Raises _WrongError where its import or its constructor changes of the process what the
    problem's leaves.
    """
    found = problem.build(process, state)
    told = process.ask(asked_problem.changed_at_start)
    for step, known in problem.changes_at_start.items():
        others = [name for name in told.get(step, ()) if name not in known]
        if others:
            what = ", ".join(others)
            raise _WrongError(f"its {step} changes {what}, which the problem's leaves as it is")
    return found


def _judge_other_parameters(problem: Problem, process: Process) -> None:
    """Judge the outputs on the first inputs with other parameters, as training leaves them, and
    once the problem's own are written into the same model, which has been called by then.

    Raises _WrongError.
    """
    if all(same_bits([problem.state[name]], [one]) for name, one in problem.moved.items()):
        return
    args, bar = problem.trials[0]
    asked = model_results, problem.seed, [*args, torch.float32]
    _built(problem, process, problem.moved)
    problem.build(problem.reference, problem.moved)
    try:
        results = process.ask(*asked)
        _judged(problem.bar(args), results, "with other parameters than the constructor's")
    finally:
        problem.build(problem.reference)
    process.ask(asked_problem.load_state, problem.state)
    where = "once other parameters are loaded into a model that has been called"
    _judged(bar, process.ask(*asked), where)
    _built(problem, process)


def _judge_what_is_outside(problem: Problem, process: Process) -> None:
    """Judge that a call changes nothing of its process that the problem's model does not change.

    Raises _WrongError.
    """
    values = [*problem.trials[0][0], torch.float32]
    changed = process.ask(asked_problem.changed_by_a_call, problem.seed, values)
    others = [name for name in changed if name not in problem.changes_outside]
    if others:
        raise _WrongError(
            f"a call changes {', '.join(others)}, which the problem's model leaves as it is"
        )
    _built(problem, process)


def _judge_what_stays(problem: Problem, process: Process) -> None:
    """Judge that the outputs of a call stay when the next one is made, and that a call leaves the
    parameters and buffers that the problem's model leaves, where the answer's have its names.

    Raises _WrongError.
    """
    state = _built(problem, process)
    (first, _), (second, _) = problem.trials[:2]
    seed = problem.seed
    before = process.ask(asked_problem.kept_results, seed, [*first, torch.float32])
    left = process.ask(asked_problem.state_of)
    after = process.ask(asked_problem.results_kept, seed, [*second, torch.float32])
    if not same_bits(before, after):
        raise _WrongError("later calls write over the outputs of an earlier one")
    if not _are_own(process, before) and _are_own(problem.reference, problem.kept_results()):
        raise _WrongError(
            "its outputs change when its inputs are written over, so they share their memory; "
            "those of the problem's model do not"
        )
    if not problem.has_its_names(state) or left.keys() != state.keys():
        return  # it keeps its numbers in a form of its own
    for name, one in problem.state.items():
        if name not in problem.changes and not same_bits([one], [left[name]]):
            raise _WrongError(f"a call changes {name}, which the problem's model leaves as it is")
    if problem.left is not None:
        problem.build(problem.reference)  # timed calls of an earlier answer have changed it
        judgements = problem.left.judge([left[name] for name in problem.state])
        for name, judgement in zip(problem.state, judgements, strict=True):
            if judgement.problem is not None:
                raise _WrongError(f"what a call leaves in {name}: {judgement.problem}")


def _many_calls(problem: Problem, process: Process, budget_s: float) -> int:
    """Judge outputs of many calls, which take turns among two sets of inputs and find no others
    than these, and return how many calls there were: as many as ``budget_s`` seconds hold, and on a
    busy machine ``_LEAST_CALLS`` if they take no more than ten times as long.

    The outputs of some calls are taken, chosen by the judge, and of all where they are small. A
    result that is wrong from some call on shows, and where outputs are small one that is wrong
    once. Half of the calls find their inputs where those of an earlier call lay, which are gone. In
    the end some outputs, all of which stay alive, must be what they were.

    Raises _WrongError.
    """
    _built(problem, process)
    sets = problem.trials[:2]
    process.ask(asked_problem.keep_several, [[*args, torch.float32] for args, _ in sets])
    accepted: list[list[Any] | None] = [None] * len(sets)
    bytes_of_a_call = sum(one.nbytes for _, bar in sets[:1] for one in tensors_in(bar.eager))
    most = max(1, _TAKEN_BYTES // max(1, bytes_of_a_call))
    chance, begin, made, count = random.SystemRandom(), time.monotonic(), 0, 1
    calls: list[int] = []  # the set of each
    while made < _MOST_CALLS:
        taken_s = time.monotonic() - begin
        if made and taken_s > budget_s * (1 if made >= _LEAST_CALLS else _PATIENCE):
            break
        turns = [chance.randrange(len(sets)) for _ in range(count)]
        copied = [number for number in range(count) if chance.randrange(2)]
        calls += turns
        taken = sorted(chance.sample(range(count), min(count, most)))
        taken_s, found = timed(
            functools.partial(
                process.ask, asked_problem.many_results, problem.seed, turns, copied, taken
            )
        )
        for number, results in zip(taken, found, strict=True):
            place = turns[number]
            known = accepted[place]
            if known is None or not _are_equal(known, results):
                _, bar = sets[place]
                _judged(bar, results, f"call {made + number + 1} of many")
                accepted[place] = results
        made += count
        count = min(2 * count, _CALLS_AT_ONCE) if taken_s < _MESSAGE_S else max(1, count // 2)
    if not problem.changes:
        some = sorted(chance.sample(range(made), min(made, most, _LOOKED_AT_AGAIN)))
        found = process.ask(asked_problem.results_alive, some)
        for number, results in zip(some, found, strict=False):
            known = accepted[calls[number]]
            if known is not None and not _are_equal(known, results):
                _, bar = sets[calls[number]]
                _judged(bar, results, f"call {number + 1} of many, looked at after {made} calls")
    process.ask(asked_problem.keep_several, [])
    return made


def _are_equal(known: Sequence[Any], results: Sequence[Any]) -> bool:
    """Return whether a call gives the bits that another one has given."""
    if len(known) != len(results) or not all(isinstance(one, Tensor) for one in results):
        return False
    alike = all(
        one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
        for one, other in zip(known, results, strict=True)
    )
    return alike and same_bits(known, results)


def _are_own(process: Process, before: Sequence[Any]) -> bool:
    """Return whether the outputs that the process has kept stay as they were ``before`` when its
    inputs are written over."""
    return same_bits(before, process.ask(asked_problem.results_kept_without_inputs))


def _judged(bar: Bar, results: Sequence[Any], where: str) -> tuple[float, float, float]:
    """Return the largest share of the bar with both errors in ulp. Raises _WrongError."""
    if len(results) != len(bar.eager):
        raise _WrongError(f"{where}: returns {len(results)} outputs, the problem {len(bar.eager)}")
    for name, one in zip(bar.names, results, strict=True):
        if not isinstance(one, Tensor):
            raise _WrongError(f"{where}: {name} is of type {type(one).__name__}, not a tensor")
    for name, one, eager in zip(bar.names, results, bar.eager, strict=True):
        if overlaps_itself(one) and not (eager is None or overlaps_itself(eager)):
            raise _WrongError(
                f"{where}: {name} has strides {list(one.stride())} for shape {list(one.shape)}, so "
                "its elements share memory; those of the problem's output do not"
            )
    own = copy.copy(bar)  # its errors grow while it judges
    own.eager_error = list(bar.eager_error)
    judgements = own.judge(results)
    for name, judgement in zip(bar.names, judgements, strict=True):
        if judgement.problem is not None:
            raise _WrongError(f"{where}: {name} {judgement.problem}")
    worst = max(judgements, key=lambda one: one.share_of_bar)
    return worst.share_of_bar, worst.ours_ulp, worst.eager_ulp


def _speed(
    problem: Problem, others: dict[str, Process], process: Process, budget_s: float
) -> Speed:
    """Time the answer beside the problem's own model, in rounds, and judge outputs of timed calls.

    Raises _WrongError.
    """
    chance = random.SystemRandom()
    args = own_copies(problem.trials[0][0])
    clocks = {"answer": Clock(process, problem.reference)}
    clocks |= {name: Clock(one, one) for name, one in others.items()}
    for name, clock in clocks.items():
        if name == "compile":
            problem.build(clock.process)
        clock.process.ask(asked_timing.prepare, args, name == "compile")
        clock.rest()
    judged = 0

    def compared() -> dict[str, Verdict]:
        ours = clocks["answer"].times_us
        return {name: verdict(ours, clocks[name].times_us) for name in others}

    def is_narrow() -> bool:
        return not any(map(_is_wide, compared().values()))

    for number in _rounds(budget_s, is_narrow):
        args, change = _next_inputs(problem, clocks, args, chance)
        order = list(clocks)
        chance.shuffle(order)
        taken: dict[str, list[Tensor]] = {}
        seed = chance.randrange(1 << 31)
        missing = _LEAST_JUDGED - judged
        share = max(_TAKEN, missing / max(1, _ROUNDS[0] - number))
        for name in order:
            clocks[name].call(change, seed)
            # Decided once the call has ended, and done before a thread could end what it left.
            if chance.random() < share:
                taken[name] = clocks[name].taken()
            clocks[name].rest()
        if "answer" in taken:
            _judged(problem.bar(args, seed), taken["answer"], "a timed call")
            judged += 1
    ours = clocks["answer"].times_us
    against = {
        name: {
            "median_us": significant(median(clocks[name].times_us)),
            "outcome": str(Outcome.UNCLEAR if _is_wide(found) else found.outcome),
            "speedup": significant(found.speedup),
            "low": significant(found.low),
            "high": significant(found.high),
        }
        for name, found in compared().items()
    }
    note = None if is_narrow() else _UNCERTAIN
    return Speed(significant(median(ours)), against, len(ours), judged, note)


def _is_wide(found: Verdict) -> bool:
    """Return whether the interval of a speedup is too wide to say which side is faster."""
    return found.high > _WIDE * found.low


def _next_inputs(
    problem: Problem, clocks: dict[str, Clock], args: list[Any], chance: random.Random
) -> tuple[list[Any], Change]:
    """Give every process inputs in which all values are other ones, and return them; where the
    problem always makes the same ones, return a change of a few elements that the call will make.

    A call that keeps the rows of earlier inputs, and computes those that differ, gains nothing.
    """
    fresh = problem.fresh_inputs(chance)
    if fresh is None:
        change = drawn_change(args, chance, problem.runs)
        change.write(args, 0)
        return args, change
    usual_s, _ = timed(lambda: problem.reference.ask(asked_timing.renew, fresh))
    for clock in clocks.values():
        if clock.process is not problem.reference:
            clock.renew(fresh, usual_s)
    return fresh, Change()


def _rounds(budget_s: float, is_narrow: Callable[[], bool]) -> Iterator[int]:
    """Yield the numbers of the rounds that ``budget_s`` seconds hold, and of more until the
    intervals are narrow, for ``_PATIENCE`` times as long at most."""
    least, most = _ROUNDS
    begin = time.monotonic()
    for number in range(most):
        taken_s = time.monotonic() - begin
        if number >= least and (
            taken_s > _PATIENCE * budget_s or (taken_s > budget_s and is_narrow())
        ):
            return
        yield number
