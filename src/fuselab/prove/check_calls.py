"""Checks of many calls: thousands in a row, on slices, from several threads, in every grad mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import mapped, moved_towards_middle, tensor_names
from fuselab.prove.asked_calls import with_gradients
from fuselab.prove.asked_many_calls import (
    THREADS,
    Stacks,
    from_threads,
    gradients_under_mode,
    in_turns,
    on_slices,
    under_mode,
    under_threads,
)
from fuselab.prove.check_memory import same_bits
from fuselab.prove.draw import LARGEST_TURN
from fuselab.prove.held import results
from fuselab.prove.outputs import output_names
from fuselab.prove.program_races import races
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, call_bar, judged

REPEATS = 4_100  # above twice 2,000, and thirteen times 300
_SETS = 3  # sets of values among which the calls take turns, so that a stale result shows
# Seconds that the calls may take, by whether the check is quick.
PATIENCE_S = {True: 10.0, False: 120.0}
_THREAD_CALLS = 150
# A C++ kernel lets Python's other threads run where its tensors have a MiB (launcher/read_plan.h).
_LARGE_BYTES = 1 << 20
_LARGE_THREAD_CALLS = 6


@dataclass(frozen=True)
class Kind:
    """One kind of call: the gradients of the tensors at ``places`` under ``upstream``, or the
    results alone; ``bar(args)`` is the bar for what it returns."""

    what: str
    places: list[int] | None
    upstream: tuple[Tensor, ...] | None
    bar: Callable[[Sequence[Any]], Bar]


def many_calls_agree(subject: Subject, trial: Trial) -> Outcome:
    """Check that thousands of calls on small inputs give the same bits as the first.

    The calls take turns among a few sets of values and never take one set twice in a row, so that
    the result of an earlier call shows. Where the operator declares that its order is not fixed,
    the largest and the smallest value of every element, over all calls, meet the bar.
    """
    several = _sets_of(subject, trial)
    order = torch.Generator().manual_seed(trial.draw.below(1 << 16))
    steps = torch.randint(1, max(2, len(several)), (REPEATS,), generator=order)
    turns = (steps.cumsum(0) % len(several)).tolist()
    kinds = _kinds(subject, trial)
    if subject.quick and not subject.first:
        kinds = kinds[:1]  # a backward takes ten times as long as a forward from a plan
    outcome = Outcome()
    for kind in kinds:
        outcome = _repeated(subject, several, turns, kind)
        if outcome.problem is not None or outcome.not_judged is not None:
            return outcome
    return outcome


def _repeated(
    subject: Subject, several: Sequence[Sequence[Any]], turns: Sequence[int], kind: Kind
) -> Outcome:
    """Make all calls of one kind and compare their results."""
    patience_s = PATIENCE_S[subject.quick]
    given = [list(args) for args in several]
    found = subject.candidate.ask(
        in_turns, given, turns, kind.places, kind.upstream, min(patience_s, 1e9)
    )
    if found["uneven"]:
        return Outcome(f"{len(turns)} calls on the same inputs do not give the same {kind.what}")
    if found["made"] < len(turns):
        return Outcome(
            not_judged=f"{found['made']} of {REPEATS} calls took {patience_s:.0f} s; fewer show "
            "little"
        )
    for place, (args, stacks) in enumerate(zip(several, found["stacks"], strict=True)):
        row = _first_difference(stacks)
        if row is None:
            continue
        if subject.op.nondeterministic is None:
            number = [call for call, turn in enumerate(turns, start=1) if turn == place][row - 1]
            return Outcome(
                f"call {number} of {len(turns)} gives other {kind.what} than the first "
                "call on the same inputs"
            )
        outcome = _extremes_judged(kind.bar(args), stacks, row, f" in one of {len(turns)} calls")
        if outcome.problem is not None:
            return outcome
    return Outcome()


def _first_difference(stacks: Stacks) -> int | None:
    """Return the first row of the stacks in which a result differs from row 0, bit for bit."""
    rows = []
    for stacked in stacks:
        if stacked is not None and stacked[0].numel():
            bits = bits_of(stacked)
            differs = (bits != bits[0]).reshape(len(bits), -1).any(1)
            rows += [int(differs.int().argmax())] if bool(differs.any()) else []
    return min(rows, default=None)


def _extremes_judged(bar: Bar, stacks: Stacks, row: int, after: str) -> Outcome:
    """Judge the least and the largest value of every element over all rows, and of integers the
    first row that differs."""
    outcome = Outcome()
    for pick in (torch.amin, torch.amax):
        extreme = [
            None
            if stacked is None
            else pick(stacked, 0)
            if stacked.dtype.is_floating_point
            else stacked[row]
            for stacked in stacks
        ]
        outcome = judged(bar, extreme, after=after)
        if outcome.problem is not None:
            return outcome
    return outcome


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
        places = subject.differentiable(several[-1])
        several.append(moved_towards_middle(several[-1], places))
    return several


def _kinds(subject: Subject, trial: Trial) -> list[Kind]:
    """Return the kinds of call: the forward, and the forward with its backward."""
    kinds = [Kind("results", None, None, subject.bar)]
    if subject.op.gradient is not None:
        upstream = subject.upstream(trial)
        places = subject.differentiable(trial.args)
        names = tensor_names(subject.op, trial.args)
        labels = [*output_names(subject.op), *(f"gradient of {names[place]}" for place in places)]
        kinds.append(
            Kind(
                "gradients",
                places,
                upstream,
                lambda args: subject.bar_for([*args, upstream], labels, with_gradients, places),
            )
        )
    return kinds


def slices_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge calls, with their gradients, on the slices of one tensor, one after the other.

    They differ in their offsets alone, so that what is kept for a storage, a shape and strides
    shows.
    """
    several = [list(args) for args in _sets_of(subject, trial)]
    shapes = {tuple(tensor.shape for tensor in tensors_in(args)) for args in several}
    if len(several) < 2 or len(shapes) > 1:
        return Outcome(untried=True)
    kind = _kinds(subject, trial)[-1]
    found = subject.candidate.ask(on_slices, several, kind.places, kind.upstream)
    outcome = Outcome()
    for number, (args, given) in enumerate(zip(several, found, strict=True)):
        outcome = judged(kind.bar(args), given, after=f" of slice {number} of one tensor")
        if outcome.problem is not None:
            return outcome
    return outcome


def threads_agree(subject: Subject, trial: Trial) -> Outcome:
    """Check that three threads that call at once get what one thread gets.

    Each thread has inputs of its own, of equal shapes; PyTorch's own threads run below either.
    """
    return _agreeing(subject, trial, _kinds(subject, trial), _THREAD_CALLS)


def large_threads_agree(subject: Subject, trial: Trial) -> Outcome:
    """Check the same of a few forwards on tensors so large that C++ kernels run at once."""
    if sum(one.nbytes for one in tensors_in(trial.args)) < _LARGE_BYTES:
        return Outcome(untried=True)
    return _agreeing(subject, trial, _kinds(subject, trial)[:1], _LARGE_THREAD_CALLS)


def _agreeing(subject: Subject, trial: Trial, kinds: Sequence[Kind], calls: int) -> Outcome:
    several = [list(args) for args in _sets_of(subject, trial)]
    if len(several) < 2:
        return Outcome(untried=True)
    outcome = Outcome()
    for kind in kinds:
        found = subject.candidate.ask(from_threads, several, calls, kind.places, kind.upstream)
        for args, stacks in zip(several, found, strict=True):
            row = 0 if stacks is None else _first_difference(stacks)
            if row is None:
                continue
            if stacks is None or subject.op.nondeterministic is None:
                return Outcome(
                    f"{len(several)} threads that call at once get other {kind.what} than one"
                )
            outcome = _extremes_judged(kind.bar(args), stacks, row, f" from {len(several)} threads")
            if outcome.problem is not None:
                return outcome
    return outcome


def programs_are_independent(subject: Subject, trial: Trial) -> Outcome:
    """Check that no program of a Triton launch depends on what another one of it has done before.

    The interpreter runs them in turn, so that such a kernel gives right results there.
    """
    ask = subject.candidate.ask
    if subject.op.gradient is None:
        return Outcome(ask(races, results, *trial.args))
    places, upstream = subject.differentiable(trial.args), subject.upstream(trial)
    return Outcome(ask(races, with_gradients, places, [*trial.args, upstream]))


def every_mode_agrees(subject: Subject, trial: Trial) -> Outcome:
    """Judge the output under no_grad and inference_mode, also where the inputs need a gradient or
    were made in inference mode; and in each of ``_OF_A_BACKWARD``."""
    bar = subject.bar(trial.args)
    needing = mapped(_needing, trial.args)
    outcome = Outcome()
    for mode, args, in_inference, which in (
        ("torch.no_grad()", trial.args, False, ""),
        ("torch.no_grad()", needing, False, " of inputs that need a gradient"),
        ("torch.inference_mode()", trial.args, False, ""),
        ("torch.inference_mode()", needing, False, " of inputs that need a gradient"),
        ("torch.inference_mode()", trial.args, True, " of inputs made in it"),
        ("torch.enable_grad()", trial.args, True, " of inputs made in inference mode"),
        *((mode, trial.args, False, "") for mode in _OF_A_BACKWARD),
    ):
        for found in subject.candidate.ask(under_mode, mode, in_inference, list(args)):
            outcome = judged(bar, found, after=f" under {mode}{which}")
            if outcome.problem is not None:
                return outcome
    return outcome if subject.op.gradient is None else _every_backward_agrees(subject, trial)


def every_number_of_threads_agrees(subject: Subject, trial: Trial) -> Outcome:
    """Judge the output and every gradient with few and with many of PyTorch's threads."""
    bar, asked = call_bar(subject, trial)
    found = subject.candidate.ask(under_threads, THREADS, *asked)
    outcome, accepted = Outcome(), None
    for count, given in zip(THREADS, found, strict=True):
        if accepted is None or not same_bits(accepted, given):
            outcome = judged(bar, given, after=f" under torch.set_num_threads({count})")
            if outcome.problem is not None:
                return outcome
            accepted = given
    return outcome


def _every_backward_agrees(subject: Subject, trial: Trial) -> Outcome:
    """Judge the gradients in each of ``_OF_A_BACKWARD``."""
    places, upstream = subject.differentiable(trial.args), subject.upstream(trial)
    bar, _ = call_bar(subject, trial, upstream)
    outcome = Outcome()
    for mode in _OF_A_BACKWARD:
        found = subject.candidate.ask(gradients_under_mode, mode, places, [*trial.args, upstream])
        outcome = judged(bar, found, after=f" under {mode}")
        if outcome.problem is not None:
            return outcome
    return outcome


_OF_A_BACKWARD = (
    "torch.set_default_dtype(torch.float64)",
    "gc.disable()",
    "a profiler",
    "sys.settrace",
    "torch.autograd.set_detect_anomaly(True)",
)


def _needing(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _interpreted(subject: Subject) -> tuple[Verdict, str] | None:
    """Return None where Triton's interpreter runs the kernels, whose loads and stores it shows."""
    if not subject.interpreted:
        return Verdict.SKIPPED, "only Triton's interpreter shows what a program loads and stores"
    return None


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
    # Tensors that differ in their offsets alone.
    Check(
        "slices",
        slices_are_right,
        quick=2,
        full=8,
        max_numel=512,
        non_empty=True,
        shrink_tries=8,
    ),
    # No program of a launch needs another one of it to come first.
    Check(
        "programs",
        programs_are_independent,
        quick=9,
        full=24,
        max_numel=2048,
        applies=_interpreted,
        non_empty=True,
        shrink_tries=8,
    ),
    # Three threads get what one gets.
    Check(
        "several threads",
        threads_agree,
        quick=2,
        full=6,
        max_numel=1024,
        applies=_compiled,
        non_empty=True,
        shrink_tries=0,
    ),
    # The same where kernels run long enough to meet.
    Check(
        "several large threads",
        large_threads_agree,
        quick=4,
        full=8,
        applies=_compiled,
        turns=True,
        first_turn=LARGEST_TURN,  # the first trial of a row that is late is large enough
        large=True,
        once=True,
        shrink_tries=0,
    ),
    # Any number of threads, whatever this machine has.
    Check(
        "thread counts",
        every_number_of_threads_agrees,
        quick=2,
        full=6,
        max_numel=1024,
        applies=_compiled,
        repeats=True,
        non_empty=True,
        shrink_tries=8,
    ),
    # With gradients, without, in inference mode; another default dtype; without Python's garbage
    # collector, under a profiler, traced, in anomaly mode.
    Check(
        "modes",
        every_mode_agrees,
        quick=3,
        full=12,
        max_numel=1024,
        repeats=True,
        non_empty=True,
        shrink_tries=8,
    ),
)
