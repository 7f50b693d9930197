"""Checks of what a call returns: the type of its tensors, their strides, how long they live."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fuselab.prove.asked_outputs import NO_COUNT, leaked, shared_by_calls, undeclared
from fuselab.prove.draw import LAYOUTS
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome

HELD = 128  # calls whose results are alive at once
_SPAN = 128  # calls over which the memory in use must not grow


def results_are_as_declared(subject: Subject, trial: Trial) -> Outcome:
    """Check the type, the strides and the storage of every output and every gradient.

    What torch.compile compiles around the operator relies on the strides that its fake promises.
    """
    upstream = _upstream(subject, trial)
    return Outcome(subject.candidate.ask(undeclared, list(trial.args), upstream))


def results_do_not_share_memory(subject: Subject, trial: Trial) -> Outcome:
    """Check that the results of many calls, all of them alive, lie in memory of their own."""
    upstream, count = _upstream(subject, trial), _count(subject, HELD)
    return Outcome(subject.candidate.ask(shared_by_calls, list(trial.args), upstream, count))


def memory_does_not_grow(subject: Subject, trial: Trial) -> Outcome:
    """Check that a call keeps nothing: once its results are gone, no memory is in use that was not
    before."""
    upstream, count = _upstream(subject, trial), _count(subject, _SPAN)
    thoroughly = not subject.interpreted and (subject.first or not subject.quick)
    problem = subject.candidate.ask(leaked, list(trial.args), upstream, count, thoroughly)
    return Outcome(not_judged=problem) if problem == NO_COUNT else Outcome(problem)


def _upstream(subject: Subject, trial: Trial) -> Sequence[Tensor] | None:
    return None if subject.op.gradient is None else subject.upstream(trial)


def _count(subject: Subject, count: int) -> int:
    return count // 16 if subject.interpreted else count


def _returns_new(subject: Subject) -> tuple[Verdict, str] | None:
    return (Verdict.SKIPPED, "it writes over arguments") if subject.op.mutates else None


CHECKS = (
    # Plain tensors in the strides that fake promises.
    Check(
        "outputs",
        results_are_as_declared,
        layouts=LAYOUTS,
        quick=16,
        full=64,
        max_numel=1024,
        turns=True,
        applies=_returns_new,
    ),
    # Many results alive at once.
    Check(
        "held outputs",
        results_do_not_share_memory,
        repeats=True,
        quick=1,
        full=4,
        max_numel=256,
        applies=_returns_new,
        non_empty=True,
        shrink_tries=8,
    ),
    # Nothing stays when the results are gone.
    Check(
        "leaks",
        memory_does_not_grow,
        repeats=True,
        quick=1,
        full=2,
        max_numel=256,
        non_empty=True,
        shrink_tries=4,
    ),
)
