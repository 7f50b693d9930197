"""Check of the kinds of tensor: a call depends on numbers, dtypes, shapes and strides alone."""

from __future__ import annotations

from typing import Any

from fuselab.prove.asked_kinds import KINDS, in_kind, with_gradients_of_another_thread
from fuselab.prove.check_memory import same_bits
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, call_bar, is_hurried, judged

_HURRIED_KINDS = 2  # with --quick under the interpreter


def every_kind_agrees(subject: Subject, trial: Trial) -> Outcome:
    """Judge the results, and every gradient, of calls on equal numbers in tensors of each kind, and
    the gradients of a backward in another thread than the forward's."""
    bar, asked = call_bar(subject, trial)
    places, values = None, list(trial.args)
    if subject.op.gradient is not None:
        _, places, values = asked
    asks: list[tuple[str, tuple[Any, ...]]] = [
        (f" of {kind}", (in_kind, kind, places, values)) for kind in KINDS
    ]
    if places is not None:
        apart = with_gradients_of_another_thread, places, values
        asks.append((" of a backward in another thread", apart))
    if is_hurried(subject):
        start = trial.draw.below(len(asks))
        asks = [*asks[start:], *asks[:start]][:_HURRIED_KINDS]
    outcome, accepted = Outcome(), None
    for after, procedure in asks:
        found = subject.candidate.ask(*procedure)
        if accepted is None or not same_bits(accepted, found):
            outcome = judged(bar, found, after=after)
            if outcome.problem is not None:
                return outcome
            accepted = found
    return outcome


def _returns_new(subject: Subject) -> tuple[Verdict, str] | None:
    return (Verdict.SKIPPED, "it writes over arguments") if subject.op.mutates else None


CHECKS = (
    # Parameters, views, results of operators, any address and any memory.
    Check(
        "kinds of tensor",
        every_kind_agrees,
        quick=2,
        full=8,
        max_numel=512,
        applies=_returns_new,
        repeats=True,
        non_empty=True,
        shrink_tries=8,
    ),
)
