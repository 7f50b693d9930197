"""All checks of one implementation and dtype, in their order and within their time."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.prove import (
    check_calls,
    check_declaration,
    check_device,
    check_gradients,
    check_inputs,
    check_kinds,
    check_memory,
    check_outputs,
    check_torch,
    check_values,
    check_very_large,
)
from fuselab.prove.held import CandidateError
from fuselab.prove.result import Group, Result, Verdict
from fuselab.prove.subject import Subject
from fuselab.prove.trials import Check, is_hurried, planned_trials, run_check, still_answers
from fuselab.runtime import fallback

CHECKS: tuple[Check, ...] = (
    *check_memory.STATE_CHECKS,  # these run before anything else has called the implementation
    *check_declaration.CHECKS,
    *check_values.CHECKS,
    *check_very_large.CHECKS,
    *check_memory.CHECKS,
    *check_inputs.CHECKS,
    *check_kinds.CHECKS,
    *check_outputs.CHECKS,
    *check_calls.CHECKS,
    *check_gradients.CHECKS,
    *check_torch.CHECKS,
    *check_device.CHECKS,
)

QUICK_BUDGET_S = 20.0  # seconds for the checks of one implementation and dtype
BUDGET_S = 1200.0


def run_group(
    subject: Subject,
    case: str | None,
    huge_room: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Group:
    """Run all checks of one implementation and dtype, or only the trial ``case``.

    Huge cases run in a context that ``huge_room`` makes, which waits until there is memory for
    them.
    """
    where = "interpreter" if subject.interpreted else subject.device.type
    if case is None and (reason := check_declaration.takes_nothing(subject)) is not None:
        nothing = Result("coverage", Verdict.NOT_JUDGED, reason)
        return Group(subject.implementation, subject.dtype_name, where, (nothing,))
    results: list[Result] = []
    checks = CHECKS if case is None else (check_of(case),)
    begin, budget_s = time.monotonic(), subject.budget_s
    if budget_s is None:
        budget_s = QUICK_BUDGET_S if subject.quick else BUDGET_S
    total = sum(planned_trials(subject, known) for known in checks)
    planned, broken = 0, not still_answers(subject)
    for known in checks:
        planned += planned_trials(subject, known)
        if broken:
            reason = "an earlier kernel broke this process's CUDA context"
            results.append(Result(known.name, Verdict.NOT_JUDGED, reason))
        elif _is_once(subject, known) and case is None:
            reason = "with --quick made in the first dtype only"
            results.append(Result(known.name, Verdict.SKIPPED, reason))
        elif known.repeats and is_hurried(subject) and time.monotonic() > begin + budget_s:
            reason = "with --quick no time was left for its many calls under the interpreter"
            results.append(Result(known.name, Verdict.NOT_JUDGED, reason))
        else:
            # Each check ends early enough for the checks after it; the first half of the budget is
            # open to any check.
            until = begin + budget_s * max(0.5, planned / total)
            results.append(_run(subject, known, case, until))
            if known in check_memory.STATE_CHECKS:
                begin = time.monotonic()  # what the first calls built is not the checks' time
            broken = results[-1].verdict is Verdict.FAIL and not still_answers(subject)
    if case is None and not subject.quick and not broken:
        with huge_room():
            results.append(check_device.huge_cases(subject))
    return Group(subject.implementation, subject.dtype_name, where, tuple(_headed(checks, results)))


_OF_VALUES = {"cases", "shapes", "sizes", "gradients"}


def _headed(checks: Sequence[Check], results: Sequence[Result]) -> list[Result]:
    """Return the results without those failures of the first calls that checks of values find too:
    what every call does wrong is no matter of state, and is shown under what it is."""
    of_state = {known.name for known in check_memory.STATE_CHECKS}
    found = list(results)
    for place, (known, result) in enumerate(zip(checks, results, strict=False)):
        if known.name not in of_state or result.verdict is not Verdict.FAIL:
            continue
        failures = [one for one in results[place + 1 :] if one.verdict is Verdict.FAIL]
        of_values = result.check != known.name and any(one.check in _OF_VALUES for one in failures)
        if of_values or any(one.reason == result.reason for one in failures):
            reason = "its calls give wrong values, or raise, which other checks show"
            found[place] = Result(known.name, Verdict.NOT_JUDGED, reason, seconds=result.seconds)
    return found


def _is_once(subject: Subject, known: Check) -> bool:
    """Return whether --quick leaves a check to the first dtype, as it does with large inputs under
    the interpreter."""
    is_once = known.once or (known.large and subject.interpreted)
    return is_once and subject.quick and not subject.first


def _run(subject: Subject, known: Check, case: str | None, until: float) -> Result:
    fallback.forget()
    begin = time.monotonic()
    try:
        only = None if case is None else case.partition("@")[2]
        result = run_check(subject, known, only, until)
        return replace(result, seconds=time.monotonic() - begin)
    except torch.OutOfMemoryError:
        return Result(known.name, Verdict.NOT_JUDGED, "the device ran out of memory")
    except CandidateError as fault:  # while its inputs were drawn
        return Result(known.name, Verdict.FAIL, str(fault))


def check_of(case: str) -> Check:
    """Return the check that ``case`` names, which is ``CHECK@CASE`` as a failure prints it.

    Raises UnknownNameError or ArgumentError where it names no trial.
    """
    names = {known.name.replace(" ", "-"): known for known in CHECKS}
    wanted, _, choices = case.partition("@")
    if wanted not in names:
        raise UnknownNameError("check", wanted, names)
    if names[wanted].source == "draws" and not re.fullmatch(r"\d+(\.\d+)*", choices):
        raise ArgumentError(
            f"the case '{case}' names no trial of '{wanted}', whose inputs are drawn: behind the @ "
            "stand the numbers of a failure's own command, such as 3.1.4."
        )
    return names[wanted]
