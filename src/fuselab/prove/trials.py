"""Running one check: trials over cases or draws, the smallest failing one, how to repeat it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fuselab.errors import summary
from fuselab.op import tensors_in
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import at, filled, tensor_names
from fuselab.prove.draw import shrink
from fuselab.prove.outputs import output_names, outputs_in, pulled_back
from fuselab.prove.result import Result, Verdict
from fuselab.prove.subject import Subject, Trial

Results = list[Tensor | None]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one trial: ``problem``, or none.

    ``refused`` is the text of a clear refusal, which is no failure. ``untried`` means that the
    question has no meaning for these inputs. ``not_judged`` says why the trial could not give an
    answer; it makes the whole check NOT JUDGED, unless another trial fails.
    """

    problem: str | None = None
    ours_ulp: float = 0.0
    eager_ulp: float = 0.0
    refused: str | None = None
    share_of_bar: float = 0.0
    untried: bool = False
    not_judged: str | None = None


@dataclass(frozen=True)
class Check:
    """One check: its name, and the trial that answers its question.

    ``layouts`` and ``values`` are the options of its draws; ``quick`` and ``full`` count the
    trials. ``applies(subject)`` returns None, or a verdict and the reason why the check cannot be
    made. ``source`` is where trials come from; ``shrink_tries`` bounds the search for the smallest
    failing case. With ``once``, --quick makes the check in the first dtype only. With ``turns``,
    layouts and values are taken in turn instead of by chance. With ``non_empty``, inputs without
    elements are drawn anew.
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
    large: bool = False
    deep: bool = False


_DRAWS = 20  # how often a trial of a ``non_empty`` check is drawn anew
LEAST_SHARE = 0.25  # the share of a check's trials that is run even after its time has ended


def run_check(
    subject: Subject, check: Check, case: str | None = None, until: float = float("inf")
) -> Result:
    """Run all trials of one check, or the one that ``case`` names (an operator's case, or choices).

    After ``until`` (a value of ``time.monotonic``) no trial begins once a quarter of them was made;
    the result then counts how many were ``planned``. An operator's own cases are all run.
    """
    refusal = check.applies(subject)
    if refusal is not None:
        return Result(check.name, refusal[0], refusal[1])
    tried, untried, refused, planned, unsupported = 0, 0, None, 0, 0
    not_judged = None
    worst = Outcome()
    count = planned_trials(subject, check)
    least = max(1, round(count * LEAST_SHARE))
    for begun, (label, trial) in enumerate(_trials(subject, check, case)):
        if check.source == "draws" and begun >= least and time.monotonic() > until:
            planned = count - begun
            break
        if trial is None:
            unsupported += 1
            continue
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


def planned_trials(subject: Subject, check: Check) -> int:
    """Return how many inputs a check draws: a third as many under the slow interpreter."""
    count = check.quick if subject.quick else check.full
    return (count + 2) // 3 if subject.interpreted else count


def attempt(subject: Subject, check: Check, trial: Trial) -> Outcome:
    """Run one trial, turning any exception into a problem.

    An error that its kernels meet after the call returned is a problem too. If the call leaves
    another CUDA stream current, the former one is restored.
    """
    stream = torch.cuda.current_stream(subject.device) if subject.device.type == "cuda" else None
    try:
        outcome = check.trial(subject, trial)
        if stream is not None:
            torch.cuda.synchronize(subject.device)
        return outcome
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return Outcome(f"raised {summary(error, 200)}")
    finally:
        if stream is not None:
            torch.cuda.set_stream(stream)


def _trials(subject: Subject, check: Check, case: str | None) -> Any:
    """Yield (label, trial) pairs; the label is a case's name or choices joined by dots, else
    None."""
    if check.source == "cases":
        for known in subject.small_cases():
            if case is None or case == known.name:
                yield known.name, subject.from_case(check.name, known)
        return
    if case is not None:
        yield case, _replay(subject, check, [int(choice) for choice in case.split(".")])
        return
    for index in range(planned_trials(subject, check)):
        yield None, _drawn(subject, check, index)


def _drawn(subject: Subject, check: Check, index: int) -> Trial | None:
    """Draw the trial with this index, anew where the check needs elements and there are none."""
    trial = None
    for again in range(_DRAWS if check.non_empty or check.large or check.deep else 1):
        found = subject.draw(
            check.name,
            index + again * (1 << 20),
            check.layouts,
            check.values,
            max_numel=check.max_numel,
            turn=index if check.turns else None,
            large=check.large,
            small=check.deep,
        )
        trial = found or trial
        if found is not None and _suits(check, found):
            return found
    return trial


def _suits(check: Check, trial: Trial) -> bool:
    """Return whether drawn inputs have the elements, or the dimensions, that the check needs."""
    if check.deep:
        shapes = [tensor.shape for tensor in tensors_in(trial.args)]
        return any(len(shape) >= 3 and min(shape) > 1 for shape in shapes)
    sizes = [tensor.numel() for tensor in tensors_in(trial.args)]
    return all(sizes) and (not check.large or max(sizes, default=0) > trial.draw.target)


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
    )


def _failure(
    subject: Subject, check: Check, label: str | None, trial: Trial, outcome: Outcome, tried: int
) -> Result:
    """Return the failure with its smallest case; an operator's own case is not shrunk."""
    if check.source == "draws" and still_answers(subject.device):
        smallest = (trial, outcome)

        def fails(choices: Sequence[int]) -> Sequence[int] | None:
            nonlocal smallest
            replayed = _replay(subject, check, choices) if still_answers(subject.device) else None
            if replayed is None:
                return None
            found = attempt(subject, check, replayed)
            if found.problem is None:
                return None
            if len(replayed.draw.choices) <= len(smallest[0].draw.choices):
                smallest = (replayed, found)
            return list(replayed.draw.choices)

        choices = shrink(trial.draw.choices, fails, check.shrink_tries)
        if smallest[0].draw.choices != choices and still_answers(subject.device):
            replayed = _replay(subject, check, choices)
            if replayed is not None:
                again = attempt(subject, check, replayed)
                smallest = (replayed, again if again.problem is not None else outcome)
        trial, outcome = smallest
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
        (trial.title, *trial.describe(subject.op)),
        f"fuselab check {spec} --implementation {subject.implementation} --dtype "
        f"{subject.dtype_name} --seed {subject.seed}{quick} --case {where}",
        f"fuselab.check({spec!r}, implementation={subject.implementation!r}, "
        f"dtype=torch.{subject.dtype_name}, seed={subject.seed}, quick={subject.quick}, "
        f"case={where!r})",
        outcome.share_of_bar,
        tried,
    )


def still_answers(device: torch.device) -> bool:
    """Return whether a device still runs kernels; an illegal access ends its context for good."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.rand(1, device=device).item()
    except RuntimeError:
        return False
    return True


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


def with_gradients(
    function: Callable[..., Any], places: Sequence[int], values: Sequence[Any]
) -> Results:
    """Return the outputs and the gradients of the tensors at ``places``.

    ``values`` are the arguments followed by the tuple of upstream gradients.
    """
    *args, upstream = values
    leaves = as_leaves(args, places)
    outputs = outputs_in(function(*leaves))
    grads = pulled_back(outputs, at(leaves, places), upstream)
    return [*(output.detach() for output in outputs), *grads]


def as_leaves(args: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return the arguments with fresh leaves (same memory, same strides) at ``places``."""
    leaves = [tensor.detach().requires_grad_() for tensor in at(args, places)]
    return filled(args, places, leaves)


def has_gradient(subject: Subject) -> tuple[Verdict, str] | None:
    """Return None, or the verdict on a check of gradients of an operator without any."""
    return None if subject.op.gradient is not None else (Verdict.SKIPPED, "it declares no gradient")


def call_bar(
    subject: Subject, trial: Trial, upstream: Sequence[Tensor] | None = None
) -> tuple[Bar, Callable[[Callable[..., Any]], Results]]:
    """Return the bar for a call, and a function of ``subject.call``, or its like, that makes the
    call and returns what is judged.

    These are the outputs and, if the operator has a gradient, every gradient under ``upstream``,
    which is drawn if it is None.
    """
    args = trial.args
    if subject.op.gradient is None:
        return subject.bar(args), lambda function: [*outputs_in(function(*args))]
    places, reference = subject.differentiable(args), subject.op.reference
    values = [*args, subject.upstream(trial) if upstream is None else tuple(upstream)]
    names = tensor_names(subject.op, args)
    labels = [*output_names(subject.op), *(f"gradient of {names[place]}" for place in places)]
    bar = Bar(lambda values: with_gradients(reference, places, values), values, labels)
    return bar, lambda function: with_gradients(function, places, values)
