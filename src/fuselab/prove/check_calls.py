"""Checks of many calls: thousands in a row, from two threads, in every grad mode."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import at, filled, mapped, tensor_names
from fuselab.prove.outputs import output_names
from fuselab.prove.process_state import quick_thread_switches
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, judged, with_gradients

REPEATS = 4_100  # above twice 2,000, and thirteen times 300
_SETS = 3  # sets of values among which the calls take turns, so that a stale result shows
_CHUNK = 512  # results that are compared at once
# Seconds that the calls may take, by whether the check is quick.
PATIENCE_S = {True: 10.0, False: 120.0}
_THREAD_CALLS = 150

Results = list[Tensor | None]


@dataclass(frozen=True)
class Kind:
    """One kind of call: ``make(args)`` makes it, and ``bar(args)`` is the bar for its results."""

    what: str
    make: Callable[[Sequence[Any]], Results]
    bar: Callable[[Sequence[Any]], Bar]


def many_calls_agree(subject: Subject, trial: Trial) -> Outcome:
    """Check that thousands of calls on small inputs give the same bits as the first.

    The calls take turns among a few sets of values and never take one set twice in a row, so that
    the result of an earlier call shows. Where the operator declares that its order is not fixed,
    the largest and the smallest value of every element, over all calls, meet the bar.
    """
    several = _sets_of(subject, trial)
    order = torch.Generator().manual_seed(trial.draw.below(1 << 16))
    steps = torch.randint(1, max(2, len(several)), (REPEATS,), generator=order).tolist()
    outcome = Outcome()
    kinds = _kinds(subject, trial)
    if subject.quick and not subject.first:
        kinds = kinds[:1]  # a backward takes ten times as long as a forward from a plan
    for kind in kinds:
        outcome = _repeated(subject, several, steps, kind)
        if outcome.problem is not None or outcome.not_judged is not None:
            return outcome
    return outcome


def _repeated(
    subject: Subject, several: Sequence[Sequence[Any]], steps: Sequence[int], kind: Kind
) -> Outcome:
    """Make all calls of one kind and compare their results, a chunk at a time."""
    compared = [_Repeats(kind.make(args)) for args in several]
    patience_s = PATIENCE_S[subject.quick]
    begin, turn = time.monotonic(), 0
    for number, step in enumerate(steps, start=1):
        turn = (turn + step) % len(several)
        one = compared[turn]
        one.add(number, kind.make(several[turn]))
        if number % 64 == 0 and time.monotonic() - begin > patience_s:
            return Outcome(
                not_judged=f"{number} of {REPEATS} calls took {patience_s:.0f} s; fewer show little"
            )
    for args, one in zip(several, compared, strict=True):
        one.compare()
        if one.differs_in is None:
            continue
        if subject.op.nondeterministic is None:
            return Outcome(
                f"call {one.differs_in} of {len(steps)} gives other {kind.what} than the first "
                "call on the same inputs"
            )
        bar = kind.bar(args)
        for extreme in (one.least, one.most):
            outcome = judged(bar, extreme, after=f" in one of {len(steps)} calls")
            if outcome.problem is not None:
                return outcome
    return Outcome()


class _Repeats:
    """The results of calls on one set of inputs, compared with those of the first."""

    def __init__(self, first: Results) -> None:
        self.least, self.most = list(first), list(first)
        self.first = [None if result is None else bits_of(result) for result in first]
        self.pending: list[Results] = []
        self.numbers: list[int] = []
        self.differs_in: int | None = None  # the number of the first call that gave other bits

    def add(self, number: int, results: Results) -> None:
        self.pending.append(results)
        self.numbers.append(number)
        if len(self.pending) == _CHUNK:
            self.compare()

    def compare(self) -> None:
        """Compare the pending results with the first, and forget them."""
        if not self.pending:
            return
        for place, column in enumerate(zip(*self.pending, strict=True)):
            first, least, most = self.first[place], self.least[place], self.most[place]
            results = [result for result in column if result is not None]
            if first is None or least is None or most is None or len(results) < len(column):
                if first is not None or results:
                    self.differs_in = self.differs_in or self.numbers[0]
                continue
            stacked = torch.stack(results)
            differs = (bits_of(stacked) != first).flatten(1).any(1)
            if not bool(differs.any()):
                continue
            number = self.numbers[int(differs.int().argmax())]
            self.differs_in = min(number, self.differs_in or number)
            if stacked.dtype.is_floating_point:
                self.least[place] = torch.minimum(least, stacked.amin(0))
                self.most[place] = torch.maximum(most, stacked.amax(0))
            else:
                self.most[place] = stacked[int(differs.int().argmax())]
        self.pending, self.numbers = [], []


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as integers of their size, so that NaN equals NaN."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def _sets_of(subject: Subject, trial: Trial) -> list[Sequence[Any]]:
    """Return the trial's arguments, and further ones of the same shapes with other values."""
    several: list[Sequence[Any]] = [trial.args]
    if not subject.differentiable(trial.args):
        again = subject.redrawn(trial)
        return several if again is None else [*several, again.args]
    for _ in range(_SETS - 1):
        # This keeps the order of values, and probabilities stay probabilities.
        places = subject.differentiable(several[-1])
        moved = [tensor.detach() * 0.75 + 0.125 for tensor in at(several[-1], places)]
        several.append(filled(several[-1], places, moved))
    return several


def _kinds(subject: Subject, trial: Trial) -> list[Kind]:
    """Return the kinds of call: the forward, and the forward with its backward."""
    kinds = [Kind("results", lambda args: [*subject.results(*args)], subject.bar)]
    if subject.op.gradient is not None:
        upstream = subject.upstream(trial)
        places = subject.differentiable(trial.args)
        names = tensor_names(subject.op, trial.args)
        labels = [*output_names(subject.op), *(f"gradient of {names[place]}" for place in places)]
        reference = functools.partial(with_gradients, subject.op.reference, places)
        kinds.append(
            Kind(
                "gradients",
                lambda args: with_gradients(subject.call, places, [*args, upstream]),
                lambda args: Bar(reference, [*args, upstream], labels),
            )
        )
    return kinds


def threads_agree(subject: Subject, trial: Trial) -> Outcome:
    """Check that two threads that call at once get what one thread gets.

    Each thread has inputs of its own, of equal shapes; PyTorch's own threads run below either.
    """
    several = _sets_of(subject, trial)[:2]
    if len(several) < 2:
        return Outcome(untried=True)
    outcome = Outcome()
    for kind in _kinds(subject, trial):
        alone = [kind.make(args) for args in several]
        found, errors = _from_threads(kind, several)
        if errors:
            raise errors[0]
        for args, first, results in zip(several, alone, found, strict=True):
            other = next((again for again in results if not _same_bits(first, again)), None)
            if other is None:
                continue
            if subject.op.nondeterministic is None:
                return Outcome(f"two threads that call at once get other {kind.what} than one")
            outcome = judged(kind.bar(args), other, after=" from two threads")
            if outcome.problem is not None:
                return outcome
    return outcome


def _same_bits(first: Results, again: Results) -> bool:
    return all(
        one is other if one is None or other is None else torch.equal(bits_of(one), bits_of(other))
        for one, other in zip(first, again, strict=True)
    )


def _from_threads(
    kind: Kind, several: Sequence[Sequence[Any]]
) -> tuple[list[list[Results]], list[Exception]]:
    """Call from one thread per set of arguments; return every thread's results, and the errors."""
    found: list[list[Results]] = [[] for _ in several]
    errors: list[Exception] = []
    start = threading.Barrier(len(several))

    def work(place: int) -> None:
        try:
            start.wait()
            for _ in range(_THREAD_CALLS):
                found[place].append(kind.make(several[place]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(several))]
    with quick_thread_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found, errors


def every_mode_agrees(subject: Subject, trial: Trial) -> Outcome:
    """Judge the output under no_grad and inference_mode, also where the inputs need a gradient or
    were made in inference mode."""
    bar = subject.bar(trial.args)
    needing = mapped(_needing, trial.args)
    with torch.inference_mode():
        inference = mapped(_made_here, trial.args)
    outcome = Outcome()
    for mode, name, args, which in (
        (torch.no_grad, "no_grad", trial.args, ""),
        (torch.no_grad, "no_grad", needing, " of inputs that need a gradient"),
        (torch.inference_mode, "inference_mode", trial.args, ""),
        (torch.inference_mode, "inference_mode", needing, " of inputs that need a gradient"),
        (torch.inference_mode, "inference_mode", inference, " of inputs made in it"),
        (torch.enable_grad, "enable_grad", inference, " of inputs made in inference mode"),
    ):
        for _ in range(2):  # the second call may run a launch plan
            with mode():
                results = [result.clone() for result in subject.results(*args)]
            outcome = judged(bar, results, after=f" under torch.{name}(){which}")
            if outcome.problem is not None:
                return outcome
    return outcome


def _needing(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _made_here(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value) if 0 not in value.stride() else value.clone()


def _compiled(subject: Subject) -> tuple[Verdict, str] | None:
    """Return None unless Triton's interpreter runs the kernels, which is slow and has one
    thread."""
    if subject.interpreted:
        return Verdict.NOT_JUDGED, "the interpreter is too slow for it; judged on a GPU"
    return None


CHECKS = (
    # Thousands of calls give what the first one gave.
    Check(
        "many calls",
        many_calls_agree,
        quick=1,
        full=2,
        max_numel=64,
        applies=_compiled,
        non_empty=True,
        shrink_tries=0,
    ),
    # Two threads get what one gets.
    Check(
        "two threads",
        threads_agree,
        quick=2,
        full=6,
        max_numel=1024,
        applies=_compiled,
        non_empty=True,
        shrink_tries=0,
    ),
    # With gradients, without, and in inference mode.
    Check(
        "modes", every_mode_agrees, quick=3, full=12, max_numel=1024, non_empty=True, shrink_tries=8
    ),
)
