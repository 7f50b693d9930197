"""Running one check: trials over cases or draws, the smallest failing one, how to repeat it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fuselab.errors import TargetError
from fuselab.op import tensors_in
from fuselab.prove.accuracy import Bar, evaluations
from fuselab.prove.arguments import copy_of_storage, mapped
from fuselab.prove.asked_calls import each, with_gradients
from fuselab.prove.draw import LAYOUTS, SMALL_SWEPT, SWEPT, WINDOWS
from fuselab.prove.held import (
    CandidateError,
    RemoteError,
    fault_of,
    is_a,
    is_of_reference,
    kinds_of,
    results,
    runs_kernels,
)
from fuselab.prove.result import Result, Verdict
from fuselab.prove.shrink import shrink
from fuselab.prove.subject import Subject, Trial


@dataclass(frozen=True)
class Outcome:
    """The outcome of one trial: ``problem``, or none.

    ``refused`` is the text of a clear refusal, which is no failure. ``untried`` means that the
    question has no meaning for these inputs. ``not_judged`` says why the trial could not give an
    answer; it makes the whole check NOT JUDGED, unless another trial fails. ``tries`` bounds the
    search for a smaller case where each try is dear. ``args`` are the arguments of the call that
    failed, where they are not those of the trial. ``unvaried`` names options that the trial could
    not vary; those that all trials name are told of beside the verdict. ``of_declaration`` tells
    that the problem is one of what the operator declares, not of the implementation. ``heading`` is
    the check that the problem belongs to, where that is another one.
    """

    problem: str | None = None
    ours_ulp: float = 0.0
    eager_ulp: float = 0.0
    refused: str | None = None
    share_of_bar: float = 0.0
    untried: bool = False
    not_judged: str | None = None
    tries: int | None = None
    args: Sequence[Any] | None = None
    unvaried: Sequence[str] | None = None
    of_declaration: bool = False
    heading: str | None = None


@dataclass(frozen=True)
class Check:
    """One check: its name, and the trial that answers its question.

    ``layouts`` and ``values`` are the options of its draws; ``quick`` and ``full`` count the
    trials. ``applies(subject)`` returns None, or a verdict and the reason why the check cannot be
    made. ``source`` is where trials come from; ``shrink_tries`` bounds the search for the smallest
    failing case. With ``once``, --quick makes the check in the first dtype only. With ``turns``,
    layouts and values are taken in turn instead of by chance, from ``first_turn`` on. With
    ``swept``, one size is of a long list, which is taken in turn, or with --quick by chance. With
    ``non_empty``, inputs without elements are drawn anew, and those of which none has
    ``least_numel`` elements. One that ``repeats`` calls the implementation dozens of times in each
    trial. With ``simplest``, the first trial is the simplest there is: every size is 1. With
    ``together``, a trial judges the results of a call, or its results and gradients, and nothing
    else, so that many are made in one message.
    """

    name: str
    trial: Callable[[Subject, Trial], Outcome]
    layouts: Sequence[str] = ("contiguous",)
    values: Sequence[str] = ("normal",)
    quick: int = 6
    full: int = 24
    max_numel: int | None = None
    source: Literal["draws", "cases"] = "draws"
    applies: Callable[[Subject], tuple[Verdict, str] | None] = lambda subject: None
    shrink_tries: int = 60
    once: bool = False
    turns: bool = False
    first_turn: int = 0
    non_empty: bool = False
    least_numel: int = 0
    large: bool = False
    very_large: int = 0
    deep: bool = False
    swept: bool = False
    repeats: bool = False
    simplest: bool = False
    together: Literal["", "results", "gradients"] = ""


_ONE_VALUE = "of which draw gives one value, and no other was taken"
_COPIES_OF_A_SEARCH = 4
_TRIES_AFTER_A_DEATH = 12  # each starts a process, which takes up to a second
_WIDE_DRAWS = 6  # after so many, a large trial may have short rows
_DRAWS_OF_A_SIZE = 4
# With --quick, of trials under the interpreter, which takes 10 ms for a program.
MOST_INTERPRETED_ROWS = 200
_DRAWS_WHEN_LATE = 6
_DRAWS = 20  # how often a trial of a ``non_empty`` check is drawn anew
# Trials in one message: at first, at most, and the seconds after which fewer follow.
_FIRST_TOGETHER, _MOST_TOGETHER, _TOGETHER_S = 4, 64, 0.5
# The dimensions of which --quick takes all small sizes; of some inputs the second is left out.
QUICK_SWEEPS = (0, 1, 1)
_SPREAD = 7  # has no factor in common with the number of swept sizes
_SWEPT_BY_CHANCE = 40
LEAST_SHARE = 0.25  # the share of a check's trials that is run even after its time has ended


def run_check(
    subject: Subject, check: Check, case: str | None = None, until: float = float("inf")
) -> Result:
    """Run all trials of one check, or the one that ``case`` names (an operator's case, or choices).

    After ``until`` (a value of ``time.monotonic``) no trial begins once a quarter of them was made;
    the result then counts how many were ``planned``. An operator's own cases are all run, but in a
    hurry (``is_hurried``), where the smaller ones come first, and one trial of a check is enough,
    the smallest of several draws.
    """
    refusal = check.applies(subject)
    if refusal is not None:
        return Result(check.name, refusal[0], refusal[1])
    tried, untried, refused, made, unsupported = 0, 0, None, 0, 0
    not_judged = None
    worst = Outcome()
    unvaried: list[str] | None = None
    count = planned_trials(subject, check)
    if check.source == "cases":
        count = len(subject.small_cases())
    for label, trial, outcome in _attempts(subject, check, case, until):
        made += 1
        if trial is None:
            unsupported += 1
            continue
        if outcome.unvaried is not None:
            left = outcome.unvaried
            unvaried = [name for name in left if unvaried is None or name in unvaried]
        if outcome.untried:
            untried += 1
            continue
        if outcome.not_judged is not None:
            not_judged = outcome.not_judged
            continue
        if outcome.refused is not None:
            refused = outcome.refused
            continue
        tried += 1
        if outcome.share_of_bar > worst.share_of_bar:
            worst = outcome
        if outcome.problem is not None:
            return _failure(subject, check, label, trial, outcome, tried)
    planned = count - made if case is None else 0
    told = f"never varied: {', '.join(unvaried)} ({_ONE_VALUE})" if unvaried else None
    if not_judged is not None:
        return Result(check.name, Verdict.NOT_JUDGED, not_judged, unsupported=unsupported)
    if tried == 0:
        if refused is not None:
            return Result(check.name, Verdict.PASS, refused)
        reason = "the implementation supports no input drawn"
        if told is not None:
            reason = told
        elif untried and planned:
            reason = (
                f"no time was left for it: {made} of {count} trials were made, and the question "
            )
            reason += "has no meaning for their inputs"
        elif untried:
            reason = "the question has no meaning for any input drawn"
        return Result(check.name, Verdict.NOT_JUDGED, reason, unsupported=unsupported)
    return Result(
        check.name,
        Verdict.PASS,
        "; ".join(text for text in (refused, told) if text is not None) or None,
        tried,
        worst.ours_ulp,
        worst.eager_ulp,
        share_of_bar=worst.share_of_bar,
        planned=tried + planned,
        unsupported=unsupported,
    )


def _is_truncated(subject: Subject, trial: Trial) -> bool:
    """Return whether a call asks for an output in bfloat16 where the interpreter computes it, whose
    stores truncate instead of rounding to nearest."""
    return subject.interpreted and any(one is torch.bfloat16 for one in trial.args)


def is_hurried(subject: Subject) -> bool:
    """Return whether a trial can take as long as a hurried user waits for all of them."""
    return subject.interpreted and subject.quick


def planned_trials(subject: Subject, check: Check) -> int:
    """Return how many inputs a check draws: a third as many under the slow interpreter."""
    count = check.quick if subject.quick else check.full
    if check.swept and subject.quick and _turn_of(subject, check, 0) is None:
        count = _SWEPT_BY_CHANCE
    count = (count + 2) // 3 if subject.interpreted else count
    return count + _has_simplest(subject, check)


def _has_simplest(subject: Subject, check: Check) -> bool:
    """Return whether the simplest inputs are a trial too."""
    return check.simplest and not is_hurried(subject)


def attempt(subject: Subject, check: Check, trial: Trial) -> Outcome:
    """Run one trial, turning any exception and any end of the candidate's process into a
    problem."""
    try:
        return check.trial(subject, trial)
    except torch.OutOfMemoryError:
        raise
    except CandidateError as fault:
        return Outcome(str(fault), tries=0 if fault.hangs else _TRIES_AFTER_A_DEATH)
    except Exception as error:
        if is_a(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        return Outcome(fault_of(error, 200), of_declaration=is_of_reference(error))


Attempt = tuple[str | None, Trial | None, Outcome]


def _attempts(subject: Subject, check: Check, case: str | None, until: float) -> Iterator[Attempt]:
    """Yield the label, the trial (None where it is refused) and the outcome of every trial; the
    label is a case's name or choices joined by dots, else None.

    After ``until`` no trial begins once enough were made. A hurried row then takes the smallest of
    several draws.
    """
    if check.source == "cases":
        made = (
            (known.name, subject.from_case(check.name, known))
            for known in subject.small_cases()
            if case is None or case == known.name
        )
        hurried = is_hurried(subject)
        for number, (label, trial) in enumerate(sorted(made, key=_elements) if hurried else made):
            if hurried and number and time.monotonic() > until:
                return
            yield label, trial, _alone(subject, check, trial)
        return
    if case is not None:
        trial = _replay(subject, check, [int(choice) for choice in case.split(".")])
        yield case, trial, _alone(subject, check, trial)
        return
    count = planned_trials(subject, check) - _has_simplest(subject, check)
    least = 1 if is_hurried(subject) else max(1, round(count * LEAST_SHARE))
    if _has_simplest(subject, check):
        trial = _replay(subject, check, [])
        yield None, trial, _alone(subject, check, trial)
    begun, length = 0, _FIRST_TOGETHER
    while begun < count and (begun < least or time.monotonic() <= until):
        begin = time.monotonic()
        if not _is_together(subject, check):
            is_late = is_hurried(subject) and begin > until
            trial = (_smallest_drawn if is_late else _drawn)(subject, check, begun)
            yield None, trial, _alone(subject, check, trial)
            begun += 1
            continue
        end = count if begin <= until else least
        indices = range(begun, min(begun + length, end))
        for trial, outcome in _together(subject, check, indices):
            yield None, trial, outcome
        begun += len(indices)
        taken_s = time.monotonic() - begin
        length = min(2 * length, _MOST_TOGETHER) if taken_s < _TOGETHER_S else max(1, length // 2)


def _alone(subject: Subject, check: Check, trial: Trial | None) -> Outcome:
    """Return the outcome of one trial; untried where it is refused or cannot be judged."""
    if trial is None or _is_truncated(subject, trial):
        return Outcome(untried=True)
    return attempt(subject, check, trial)


def _is_together(subject: Subject, check: Check) -> bool:
    """Return whether several trials are made in one message. The interpreter, which takes the time
    itself, gains nothing."""
    return bool(check.together) and not subject.interpreted


def _together(
    subject: Subject, check: Check, indices: Sequence[int]
) -> Iterator[tuple[Trial | None, Outcome]]:
    """Yield the trials with these indices and their outcomes, made in one message to either
    process; one by one where that raises, so that the trial at fault is named. If none raises
    then, the last is at fault: a call that raises now and then is wrong."""
    trials = _drawn_together(subject, check, indices)
    kept = [trial for trial in trials if trial is not None and _has_meaning(check, trial)]
    try:
        outcomes = iter(_judged_together(subject, check, kept))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        alone = [attempt(subject, check, trial) for trial in kept]
        if alone and "WireError" not in kinds_of(error) and not any(one.problem for one in alone):
            alone[-1] = Outcome(f"{fault_of(error, 200)}, and not when it was called again")
        outcomes = iter(alone)
    for trial in trials:
        if trial is None or not _has_meaning(check, trial):
            yield trial, Outcome(untried=True)
        else:
            yield trial, next(outcomes)


def _has_meaning(check: Check, trial: Trial) -> bool:
    return check.together != "gradients" or trial.draw.reaches_its_size


def _judged_together(subject: Subject, check: Check, trials: Sequence[Trial]) -> list[Outcome]:
    """Return the outcomes of trials whose results, and gradients where ``check.together`` says so,
    are asked for in one message to either process."""
    # A trial that fails is drawn on when its smallest case is looked for.
    twins = [replace(trial, draw=trial.draw.twin()) for trial in trials]
    with_backward = check.together == "gradients" and subject.op.gradient is not None
    several: list[list[Any]] = [list(trial.args) for trial in twins]
    if with_backward:
        expected = subject.reference.ask(each, results, [tuple(args) for args in several])
        for args, twin, outputs in zip(several, twins, expected, strict=True):
            args.append(subject.upstream(twin, outputs))
    places = [subject.differentiable(trial.args) for trial in twins]

    def asked(place: int, values: Sequence[Any]) -> tuple[Any, ...]:
        return (places[place], list(values)) if with_backward else tuple(values)

    procedure = with_gradients if with_backward else results
    lists = [evaluations(mapped(_copied, values)) for values in several]
    found = iter(
        subject.reference.ask(
            each,
            procedure,
            [asked(place, values) for place, some in enumerate(lists) for values in some],
        )
    )
    bars = [
        subject.call_bar(
            values, places[place] if with_backward else None, [next(found) for _ in some]
        )
        for place, (values, some) in enumerate(zip(several, lists, strict=True))
    ]
    given = subject.candidate.ask(
        each, procedure, [asked(place, values) for place, values in enumerate(several)]
    )
    return [judged(bar, one) for bar, one in zip(bars, given, strict=True)]


def _copied(value: Any) -> Any:
    return copy_of_storage(value) if isinstance(value, Tensor) else value


def _drawn_together(subject: Subject, check: Check, indices: Sequence[int]) -> list[Trial | None]:
    """Draw the trials with these indices in one message; one by one where one does not suit the
    check, or where that raises."""
    try:
        trials = subject.draw_together(
            check.name,
            indices,
            [_turn_of(subject, check, index) for index in indices],
            **_options(subject, check),
        )
    except TargetError:
        return [_drawn(subject, check, index) for index in indices]
    again = check.non_empty or check.large or check.deep
    return [
        trial
        if trial is not None and (not again or _suits(check, trial, index))
        else _drawn(subject, check, index)
        for index, trial in zip(indices, trials, strict=True)
    ]


def _turn_of(subject: Subject, check: Check, index: int) -> int | None:
    """Return the number that decides what a trial takes in turn, None where chance decides.

    With --quick the small sizes are swept in the first dtype, of ``QUICK_SWEEPS``; in an order in
    which any quarter of them is spread over all.
    """
    if not check.turns:
        return None
    if not (check.swept and subject.quick):
        return index + check.first_turn
    if not subject.first or subject.interpreted or subject.device.type == "cuda":
        return None
    count = len(QUICK_SWEEPS) * SMALL_SWEPT
    sweep, number = divmod(index * _SPREAD % count, SMALL_SWEPT)
    return QUICK_SWEEPS[sweep] * len(SWEPT) + number if index < count else None


def _smallest_drawn(subject: Subject, check: Check, index: int) -> Trial | None:
    """Draw several trials, and return the one with the fewest rows, which tell how many programs of
    a kernel there are. One without elements shows nothing and comes last."""
    drawn = [_drawn(subject, check, index + again * (1 << 24)) for again in range(_DRAWS_WHEN_LATE)]
    return min(
        (trial for trial in drawn if trial is not None),
        key=lambda trial: (_is_empty(trial), _all_rows(trial)),
        default=None,
    )


def _is_empty(trial: Trial) -> bool:
    return not all(one.numel() for one in tensors_in(trial.args))


def _all_rows(trial: Trial) -> int:
    return sum(
        one.numel() // one.shape[-1] if one.ndim else 1
        for one in tensors_in(trial.args)
        if one.numel()
    )


def _elements(made: tuple[str, Trial | None]) -> int:
    return 0 if made[1] is None else sum(one.numel() for one in tensors_in(made[1].args))


def _drawn(subject: Subject, check: Check, index: int) -> Trial | None:
    """Draw the trial with this index, anew where it does not suit the check."""
    trial = None
    hurried = is_hurried(subject)
    often = check.non_empty or check.large or check.deep or hurried
    for again in range(_DRAWS_OF_A_SIZE if check.swept else _DRAWS if often else 1):
        found = subject.draw(
            check.name,
            index + again * (1 << 20),
            turn=_turn_of(subject, check, index),
            **_options(subject, check),
        )
        trial = found or trial
        if found is None or (hurried and rows_of(found) > MOST_INTERPRETED_ROWS):
            continue
        if _suits(check, found, index if again < _WIDE_DRAWS else None):
            return found
    return trial


def _suits(check: Check, trial: Trial, index: int | None) -> bool:
    """Return whether drawn inputs have the elements, or the dimensions, that the check needs.

    Three in four large ones with special values have long rows, which kernels take in pieces,
    unless ``index``, which counts the trials, is None.
    """
    if check.deep:
        shapes = [tensor.shape for tensor in tensors_in(trial.args)]
        return any(len(shape) >= 3 and min(shape) > 1 for shape in shapes)
    if not trial.draw.reaches_its_size:
        return False
    sizes = [tensor.numel() for tensor in tensors_in(trial.args)]
    largest = max(sizes, default=0)
    if check.large and len(check.values) > 1 and index is not None and index % 4 != 3:
        widest = max(
            (tensor.shape[-1] for tensor in tensors_in(trial.args) if tensor.ndim), default=0
        )
        return all(sizes) and widest > trial.draw.target
    is_large = not check.large or largest > trial.draw.target
    return all(sizes) and is_large and largest >= check.least_numel


def rows_of(trial: Trial) -> int:
    """Return the most rows that a tensor has, for each of which there may be a program."""
    return max(
        (
            one.numel() // one.shape[-1]
            for one in tensors_in(trial.args)
            if one.numel() and one.ndim
        ),
        default=0,
    )


def _replay(subject: Subject, check: Check, choices: Sequence[int]) -> Trial | None:
    return subject.draw(check.name, 0, replay=choices, **_options(subject, check))


def _options(subject: Subject, check: Check) -> dict[str, Any]:
    """Return the options of ``Subject.draw`` that a check's draws have."""
    has_windows = check.layouts is LAYOUTS and not subject.op.mutates
    return {
        "layouts": (*LAYOUTS, WINDOWS) if has_windows else check.layouts,
        "values": check.values,
        "max_numel": check.max_numel,
        "large": check.large and not check.very_large,
        "small": check.deep,
        "swept": check.swept,
        "very_large": check.very_large,
    }


def _failure(
    subject: Subject, check: Check, label: str | None, trial: Trial, outcome: Outcome, tried: int
) -> Result:
    """Return the failure with its smallest case; an operator's own case is not shrunk."""
    if check.source == "draws" and still_answers(subject):
        trial, outcome = _smallest(subject, check, trial, outcome)
    if check.source == "draws":
        label = ".".join(str(choice) for choice in trial.draw.choices)
    spec = subject.spec or subject.op.name
    where = f"{check.name}@{label}".replace(" ", "-")
    quick = " --quick" if subject.quick else ""
    return Result(
        outcome.heading or check.name,
        Verdict.FAIL,
        outcome.problem,
        tried,
        outcome.ours_ulp,
        outcome.eager_ulp,
        (trial.title, *trial.describe(subject.op, outcome.args)),
        f"fuselab check {spec} --implementation {subject.implementation} --dtype "
        f"{subject.dtype_name} --seed {subject.seed}{quick} --case {where}",
        f"fuselab.check({spec!r}, implementation={subject.implementation!r}, "
        f"dtype=torch.{subject.dtype_name}, seed={subject.seed}, quick={subject.quick}, "
        f"case={where!r})",
        outcome.share_of_bar,
        tried,
        of_declaration=outcome.of_declaration,
    )


def _smallest(
    subject: Subject, check: Check, trial: Trial, outcome: Outcome
) -> tuple[Trial, Outcome]:
    """Return the smallest case that was found to fail, and how it fails.

    The search judges with few copies, a narrower bar that takes a small part of the time. What it
    finds is held against the whole bar; if that accepts it, the search is made again with it.
    """
    found = _search(replace(subject, copies=_COPIES_OF_A_SEARCH), check, trial, outcome)
    if found[0] is trial or not still_answers(subject):
        return trial, outcome
    replayed = _replay(subject, check, found[0].draw.choices)
    if replayed is not None:
        confirmed = attempt(subject, check, replayed)
        if confirmed.problem is not None:
            return replayed, confirmed
    return _search(subject, check, trial, outcome) if still_answers(subject) else (trial, outcome)


def _search(
    subject: Subject, check: Check, trial: Trial, outcome: Outcome
) -> tuple[Trial, Outcome]:
    """Return the smallest case that fails by the subject's bar, and how; the given ones where no
    smaller case fails."""
    smallest = (trial, outcome)

    def fails(choices: Sequence[int]) -> Sequence[int] | None:
        nonlocal smallest
        replayed = _replay(subject, check, choices) if still_answers(subject) else None
        if replayed is None:
            return None
        found = attempt(subject, check, replayed)
        if found.problem is None:
            return None
        if len(replayed.draw.choices) <= len(smallest[0].draw.choices):
            smallest = (replayed, found)
        return list(replayed.draw.choices)

    tries = check.shrink_tries
    if outcome.tries is not None:
        tries = min(tries, outcome.tries)
    choices = shrink(trial.draw.choices, fails, tries)
    if smallest[0].draw.choices != choices and still_answers(subject):
        replayed = _replay(subject, check, choices)
        if replayed is not None:
            again = attempt(subject, check, replayed)
            smallest = (replayed, again if again.problem is not None else outcome)
    return smallest


def still_answers(subject: Subject) -> bool:
    """Return whether the candidate still runs kernels, in a fresh process where that is needed and
    possible."""
    if subject.device.type != "cuda":
        return True
    try:
        if subject.candidate.ask(runs_kernels, subject.device):
            return True
    except (CandidateError, RemoteError):
        pass
    return subject.candidate.renew()


def judged(
    bar: Bar, results: Sequence[Tensor | None], before: str = "", after: str = ""
) -> Outcome:
    """Judge the results of a call: the first problem, and the worst row. ``before`` and ``after``
    stand beside the name of the result that has the problem."""
    judgements = bar.judge(results)
    problem = next(
        (
            f"{before}{name}{after} {judgement.problem}"
            for name, judgement in zip(bar.names, judgements, strict=True)
            if judgement.problem is not None
        ),
        None,
    )
    if not judgements:
        return Outcome(problem)
    worst = max(judgements, key=lambda judgement: judgement.share_of_bar)
    return Outcome(problem, worst.ours_ulp, worst.eager_ulp, share_of_bar=worst.share_of_bar)


def has_gradient(subject: Subject) -> tuple[Verdict, str] | None:
    """Return None, or the verdict on a check of gradients of an operator without any."""
    return None if subject.op.gradient is not None else (Verdict.SKIPPED, "it declares no gradient")


def call_bar(
    subject: Subject, trial: Trial, upstream: Sequence[Tensor] | None = None
) -> tuple[Bar, tuple[Any, ...]]:
    """Return the bar for a call, and what to ask the candidate for, a procedure and its arguments,
    to get what is judged.

    These are the outputs and, if the operator has a gradient, every gradient under ``upstream``,
    which is drawn if it is None.
    """
    args = trial.args
    if subject.op.gradient is None:
        return subject.bar(args), (results, *args)
    places = subject.differentiable(args)
    values = [*args, subject.upstream(trial) if upstream is None else tuple(upstream)]
    return subject.call_bar(values, places), (with_gradients, places, values)
