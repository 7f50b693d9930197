"""Running one check: trials over cases or draws, the smallest failing one, how to repeat it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import tensor_names
from fuselab.prove.asked_calls import with_gradients
from fuselab.prove.draw import shrink
from fuselab.prove.held import CandidateError, RemoteError, is_a, results, runs_kernels, said
from fuselab.prove.outputs import output_names
from fuselab.prove.result import Result, Verdict
from fuselab.prove.subject import Subject, Trial


@dataclass(frozen=True)
class Outcome:
    """The outcome of one trial: ``problem``, or none.

    ``refused`` is the text of a clear refusal, which is no failure. ``untried`` means that the
    question has no meaning for these inputs. ``not_judged`` says why the trial could not give an
    answer; it makes the whole check NOT JUDGED, unless another trial fails. ``tries`` bounds the
    search for a smaller case where each try is dear. ``args`` are the arguments of the call that
    failed, where they are not those of the trial.
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


@dataclass(frozen=True)
class Check:
    """One check: its name, and the trial that answers its question.

    ``layouts`` and ``values`` are the options of its draws; ``quick`` and ``full`` count the
    trials. ``applies(subject)`` returns None, or a verdict and the reason why the check cannot be
    made. ``source`` is where trials come from; ``shrink_tries`` bounds the search for the smallest
    failing case. With ``once``, --quick makes the check in the first dtype only. With ``turns``,
    layouts and values are taken in turn instead of by chance. With ``swept``, one size is of a long
    list, which is taken in turn, or with --quick by chance. With ``non_empty``, inputs without
    elements are drawn anew, and those of which none has ``least_numel`` elements. One that
    ``repeats`` calls the implementation dozens of times in each trial. With ``simplest``, the first
    trial is the simplest there is: every size is 1.
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
    non_empty: bool = False
    least_numel: int = 0
    large: bool = False
    deep: bool = False
    swept: bool = False
    repeats: bool = False
    simplest: bool = False


_COPIES_OF_A_SEARCH = 4
_TRIES_AFTER_A_DEATH = 12  # each starts a process, which takes up to a second
_WIDE_DRAWS = 6  # after so many, a large trial may have short rows
_DRAWS_OF_A_SIZE = 4
# With --quick, of trials under the interpreter, which takes 10 ms for a program.
MOST_INTERPRETED_ROWS = 200
_DRAWS_WHEN_LATE = 6
_DRAWS = 20  # how often a trial of a ``non_empty`` check is drawn anew
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
    tried, untried, refused, planned, unsupported = 0, 0, None, 0, 0
    not_judged = None
    worst = Outcome()
    hurried = is_hurried(subject)
    ends = check.source == "draws" or hurried
    count = planned_trials(subject, check)
    if check.source == "cases":
        count = len(subject.small_cases())
    least = 1 if hurried else max(1, round(count * LEAST_SHARE))
    for begun, (label, trial) in enumerate(_trials(subject, check, case, until)):
        if ends and begun >= least and time.monotonic() > until:
            planned = count - begun
            break
        if trial is None:
            unsupported += 1
            continue
        outcome = Outcome(untried=True)
        if not _is_truncated(subject, trial):
            outcome = attempt(subject, check, trial)
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
    if not_judged is not None:
        return Result(check.name, Verdict.NOT_JUDGED, not_judged, unsupported=unsupported)
    if tried == 0:
        if refused is not None:
            return Result(check.name, Verdict.PASS, refused)
        reason = "the implementation supports no input drawn"
        if untried:
            reason = "the question has no meaning for any input drawn"
        return Result(check.name, Verdict.NOT_JUDGED, reason, unsupported=unsupported)
    return Result(
        check.name,
        Verdict.PASS,
        refused,
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
        return Outcome(f"raised {said(error, 200)}")


def _trials(subject: Subject, check: Check, case: str | None, until: float) -> Any:
    """Yield (label, trial) pairs; the label is a case's name or choices joined by dots, else None.
    After ``until`` a hurried row takes the smallest of several draws."""
    if check.source == "cases":
        made = (
            (known.name, subject.from_case(check.name, known))
            for known in subject.small_cases()
            if case is None or case == known.name
        )
        yield from sorted(made, key=_elements) if is_hurried(subject) else made
        return
    if case is not None:
        yield case, _replay(subject, check, [int(choice) for choice in case.split(".")])
        return
    if _has_simplest(subject, check):
        yield None, _replay(subject, check, [])
    for index in range(planned_trials(subject, check) - _has_simplest(subject, check)):
        is_late = is_hurried(subject) and time.monotonic() > until
        yield (
            None,
            _smallest_drawn(subject, check, index) if is_late else _drawn(subject, check, index),
        )


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
            check.layouts,
            check.values,
            max_numel=check.max_numel,
            turn=index if check.turns and not (check.swept and subject.quick) else None,
            large=check.large,
            small=check.deep,
            swept=check.swept,
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
    return subject.draw(
        check.name,
        0,
        check.layouts,
        check.values,
        replay=choices,
        max_numel=check.max_numel,
        large=check.large,
        small=check.deep,
        swept=check.swept,
    )


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
        check.name,
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
    names = tensor_names(subject.op, args)
    labels = [*output_names(subject.op), *(f"gradient of {names[place]}" for place in places)]
    bar = subject.bar_for(values, labels, with_gradients, places)
    return bar, (with_gradients, places, values)
