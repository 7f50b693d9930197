"""Checks of gradients: present, right for any upstream gradient, repeatable, and their second
derivative right or refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from fuselab.errors import DifferentiationError
from fuselab.op import tensors_in
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import at, moved_towards_middle, tensor_names
from fuselab.prove.asked_calls import (
    as_leaves,
    gradient_presence,
    needs_gradient,
    penalty_gradients,
    second_derivatives,
    summed_gradients,
    with_gradients,
)
from fuselab.prove.asked_memory import gradients_after_write, several_backwards
from fuselab.prove.asked_torch import numeric_derivatives
from fuselab.prove.check_memory import same_bits
from fuselab.prove.draw import LAYOUTS
from fuselab.prove.held import CandidateError, RemoteError, is_a, results
from fuselab.prove.outputs import floating, output_names, upstream_names
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, call_bar, has_gradient, judged
from fuselab.runtime.dispatch.overlap import overlaps_itself

# largest count of inputs for which gradcheck compares the Jacobian column by column
_MOST_NUMBERS = 64


def gradient_is_present(subject: Subject, trial: Trial) -> Outcome:
    """Check that inputs which need a gradient get one; opcheck accepts an operator without any."""
    places = subject.differentiable(trial.args)
    names = tensor_names(subject.op, trial.args)
    ours, eager = (
        end.ask(gradient_presence, places, list(trial.args))
        for end in (subject.candidate, subject.reference)
    )
    for name, has, needs in zip(
        output_names(subject.op), ours["outputs"], eager["outputs"], strict=True
    ):
        if needs and not has:
            return Outcome(f"the {name} of inputs that need a gradient has none (no grad_fn)")
    for place, has, needs in zip(places, ours["inputs"], eager["inputs"], strict=True):
        if needs and not has:
            return Outcome(f"{names[place]} gets no gradient (None), the reference's gets one")
    return Outcome()


def undefined_is_refused(subject: Subject, trial: Trial) -> Outcome:
    """Check that an undeclared gradient is refused for each tensor, and never returned as a
    constant.

    The tensors are all floating ones if the operator has no gradient, otherwise those of frozen
    arguments.
    """
    tensors, names = tensors_in(trial.args), tensor_names(subject.op, trial.args)
    defined = subject.differentiable(trial.args) if subject.op.gradient is not None else []
    refused: str | None = None
    for place, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
        if place in defined or not tensor.is_floating_point():
            continue
        leaves = as_leaves(trial.args, [place])
        if not subject.reference.ask(needs_gradient, leaves):
            continue
        try:
            subject.candidate.ask(results, *leaves)
        except (DifferentiationError, RemoteError) as error:
            if not is_a(error, DifferentiationError):
                raise
            refused = str(error)
            continue
        return Outcome(
            f"declares no gradient of {name}, yet does not refuse a {name} that needs one"
        )
    return Outcome(refused=refused)


def presence(subject: Subject, trial: Trial) -> Outcome:
    """Check that declared gradients are present and undeclared ones are refused."""
    outcome = undefined_is_refused(subject, trial)
    if subject.op.gradient is None or outcome.problem is not None:
        return outcome
    return gradient_is_present(subject, trial)


def gradients_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge every output and every gradient, under drawn upstream gradients."""
    bar, asked = call_bar(subject, trial)
    return judged(bar, subject.candidate.ask(*asked))


def summed_output(subject: Subject, trial: Trial) -> Outcome:
    """Judge ``output.sum().backward()``, whose upstream gradient is one number with strides of 0.
    Of several outputs, each has a number of its own.

    The bar treats that gradient as a full-size input, whose moved copies have unequal elements.
    With equal elements a gradient of softmax cancels in eager to exactly zero, which another
    correct order of the same operations need not do.
    """
    expected = floating(subject.expected(*trial.args))
    numbers = [trial.draw.gradient(1, dtype=output.dtype) for output in expected]
    upstream = [
        number.reshape([1] * output.ndim).expand(output.shape)
        for number, output in zip(numbers, expected, strict=True)
    ]
    bar, _ = call_bar(subject, trial, upstream)
    places = subject.differentiable(trial.args)
    if not any(gradient.numel() for gradient in upstream):
        return Outcome()
    found = subject.candidate.ask(summed_gradients, places, list(trial.args), numbers)
    return judged(bar, found)


def backward_repeats(subject: Subject, trial: Trial) -> Outcome:
    """Check that three backward calls with retain_graph give the same bits and leave what was saved
    unchanged, the third one after a forward on other values; and further ones after forwards that
    share one tensor with the first.

    Where the operator declares that its order is not fixed, each meets the bar instead.
    """
    places, upstream = subject.differentiable(trial.args), subject.upstream(trial)
    args, others = list(trial.args), moved_towards_middle(trial.args, places)
    found = subject.candidate.ask(several_backwards, places, args, others, upstream)
    if found["changed"] is not None:
        return Outcome(found["changed"])
    if subject.op.nondeterministic is not None:
        return _every_run_judged(subject, trial, upstream, found["runs"])
    names = tensor_names(subject.op, trial.args)
    for number, later in enumerate(found["runs"][1:], start=2):
        for place, first, again in zip(places, found["runs"][0], later, strict=True):
            name = names[place]
            if (first is None) != (again is None):
                return Outcome(f"the gradient of {name} is not there in every backward")
            if not same_bits([first], [again]):
                after = " (after a forward on other values)" if number > 2 else ""
                if number > 3:
                    kept = names[places[number - 4]]
                    after = f" (after a forward on the same {kept} and other values besides)"
                return Outcome(
                    f"backward {number}{after} gives another gradient of {name} than the first"
                )
    return Outcome()


def _every_run_judged(
    subject: Subject,
    trial: Trial,
    upstream: Sequence[Tensor],
    runs: Sequence[Sequence[Tensor | None]],
) -> Outcome:
    """Judge the gradients of every backward through one graph."""
    bar, _ = call_bar(subject, trial, upstream)
    outputs = bar.eager[: len(bar.eager) - len(runs[0])]  # which the other checks judge
    outcome = Outcome()
    for number, gradients in enumerate(runs, start=1):
        outcome = judged(bar, [*outputs, *gradients], after=f" in backward {number}")
        if outcome.problem is not None:
            return outcome
    return outcome


# Tensors into which a trial writes before a backward; each takes a call.
_MOST_WRITES = 12


def writes_are_noticed(subject: Subject, trial: Trial) -> Outcome:
    """Judge the gradients of calls after which one argument, or one output, was written over in
    place, before the backward.

    Autograd refuses such a backward where it needs the tensor. A backward that is not refused gives
    the gradients for the values of the forward, unless the reference's gives others itself.
    """
    places, upstream = subject.differentiable(trial.args), subject.upstream(trial)
    bar, _ = call_bar(subject, trial, upstream)
    outputs = bar.eager[: len(bar.eager) - len(places)]
    values, outcome = [*trial.args, upstream], Outcome(untried=True)
    for place, name, fresh in _writes(subject, trial, outputs):
        asked = (gradients_after_write, place, fresh, places, values)
        found = subject.candidate.ask(*asked)
        if found is None:
            outcome = Outcome() if outcome.untried else outcome
            continue
        after = f" after {name} was written over in place, which autograd was not told of,"
        one = judged(bar, [*outputs, *found], after=after)
        if one.problem is not None and _is_noticed_by_eager(subject, bar, outputs, asked):
            return one
        outcome = one if one.problem is None else outcome
    return outcome


def _is_noticed_by_eager(
    subject: Subject, bar: Bar, outputs: Sequence[Tensor | None], asked: Sequence[Any]
) -> bool:
    """Return whether the reference's backward is refused after a write, or right in spite of
    it."""
    found = subject.reference.ask(*asked)
    return found is None or judged(bar, [*outputs, *found]).problem is None


def _writes(
    subject: Subject, trial: Trial, outputs: Sequence[Tensor | None]
) -> list[tuple[int, str, Tensor]]:
    """Return the tensors to write over: the place of each among the arguments and then the outputs,
    its name, and its new values.

    Floating values move towards 0.5. Integers, which have to be valid, are those of another draw
    with the same choices.
    """
    tensors, names = tensors_in(trial.args), tensor_names(subject.op, trial.args)
    moved = tensors_in(moved_towards_middle(trial.args, range(len(tensors))))
    again = None if all(map(torch.is_floating_point, tensors)) else subject.redrawn(trial)
    drawn = tensors if again is None else tensors_in(again.args)
    found = []
    for place, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
        fresh = moved[place] if tensor.is_floating_point() else None
        if fresh is None and len(drawn) == len(tensors):
            fresh = drawn[place]
        if fresh is not None and _can_take(tensor, fresh):
            found.append((place, name, fresh))
    for number, (name, output) in enumerate(zip(output_names(subject.op), outputs, strict=True)):
        if output is not None and output.is_floating_point() and output.numel():
            fresh = output.detach() * 0.75 + 0.125
            found.append((len(tensors) + number, f"the {name}", fresh))
    start = trial.draw.below(max(1, len(found) - _MOST_WRITES + 1))
    return found[start : start + _MOST_WRITES]


def _can_take(tensor: Tensor, fresh: Tensor) -> bool:
    """Return whether values can be written into a tensor and change it."""
    alike = fresh.shape == tensor.shape and fresh.dtype == tensor.dtype
    return alike and not overlaps_itself(tensor) and not torch.equal(fresh, tensor)


# Beyond this many tensors only some subsets of them are asked for their gradients.
_MOST_SUBSETS = 8


def some_gradients(subject: Subject, trial: Trial) -> Outcome:
    """Judge the gradients when only some inputs need one, and all gradients when a single output
    has an upstream gradient.

    Of three tensors every subset is asked for; of more, each tensor alone and a drawn choice of the
    other subsets.
    """
    places = subject.differentiable(trial.args)
    upstream = subject.upstream(trial)
    arguments = tensor_names(subject.op, trial.args)
    asked: list[tuple[list[int], tuple[Tensor | None, ...], str]] = [
        (of, upstream, "alone" if len(of) == 1 else f"of {len(of)} of {len(places)} that need one")
        for of in _subsets(places, trial)
    ]
    if len(upstream) > 1:
        names = upstream_names(subject.op, subject.expected(*trial.args))
        for number, name in enumerate(names):
            one = tuple(value if place == number else None for place, value in enumerate(upstream))
            asked.append((places, one, f"by {name} alone"))
    outcome = Outcome()
    for of, given, how in asked:
        labels = [*output_names(subject.op), *(f"gradient of {arguments[at]} {how}" for at in of)]
        values = [*trial.args, given]
        bar = subject.bar_for(values, labels, with_gradients, of)
        outcome = judged(bar, subject.candidate.ask(with_gradients, of, values))
        if outcome.problem is not None:
            return outcome
    return outcome


def _subsets(places: Sequence[int], trial: Trial) -> list[list[int]]:
    """Return the sets of places to ask for: each place alone, then larger sets without the whole
    one."""
    alone = [[place] for place in places]
    if len(places) <= 3:
        return alone + [
            list(some)
            for size in range(2, len(places))
            for some in itertools.combinations(places, size)
        ]
    larger = {
        tuple(place for number, place in enumerate(places) if mask >> number & 1)
        for mask in (trial.draw.below(1 << len(places)) for _ in range(_MOST_SUBSETS))
    }
    return alone + [list(some) for some in sorted(larger) if 1 < len(some) < len(places)]


def second_derivative(subject: Subject, trial: Trial) -> Outcome:
    places = subject.differentiable(trial.args)
    upstream = subject.upstream(trial)
    weights = [
        trial.draw.gradient(*tensor.shape, dtype=tensor.dtype) for tensor in at(trial.args, places)
    ]
    arguments = tensor_names(subject.op, trial.args)
    names = [
        *(f"second derivative by {arguments[place]}" for place in places),
        *(
            f"second derivative by {name}"
            for name in upstream_names(subject.op, subject.expected(*trial.args))
        ),
    ]
    values = [*trial.args, upstream, *weights]
    try:
        bar = subject.bar_for(values, names, second_derivatives, places)
    except (RemoteError, RuntimeError):
        return Outcome(untried=True)  # PyTorch's own does not take these inputs
    try:
        ours = subject.candidate.ask(second_derivatives, places, values)
    except CandidateError:
        raise
    except Exception as error:
        return _refusal(error)
    return judged(bar, ours)


def _refusal(error: Exception) -> Outcome:
    """Return a clear refusal to differentiate twice as an Outcome; raise any other error again."""
    text = str(error)
    if is_a(error, DifferentiationError, NotImplementedError) or "once_differentiable" in text:
        return Outcome(refused=f"refuses: {text.splitlines()[0]}")
    raise error


def gradient_penalty(subject: Subject, trial: Trial) -> Outcome:
    """Judge the gradient of a loss that contains the squared norm of a gradient."""
    places = subject.differentiable(trial.args)
    arguments = tensor_names(subject.op, trial.args)
    names = [f"penalty's gradient by {arguments[place]}" for place in places]
    try:
        bar = subject.bar_for(trial.args, names, penalty_gradients, places)
    except (RemoteError, RuntimeError):
        return Outcome(untried=True)  # PyTorch's own does not take these inputs
    try:
        ours = subject.candidate.ask(penalty_gradients, places, list(trial.args))
    except CandidateError:
        raise
    except Exception as error:
        return _refusal(error)
    return judged(bar, ours)


def numeric_gradient(subject: Subject, trial: Trial) -> Outcome:
    """Run torch.autograd.gradcheck, and gradgradcheck unless the second derivative is refused.

    An output narrower than float64 (an operator that takes its output's dtype) is a staircase: its
    finite differences are 0 or a jump, and do not approach a Jacobian. Those of an output that is
    not finite, as the mean loss of no rows, are NaN. The gradient of a reference that detaches
    something, as a straight-through estimator does, is not the derivative of its values. Such a
    trial is skipped as ``untried``; the other checks judge that output's gradient.

    Beyond ``_MOST_NUMBERS`` inputs a random projection of the Jacobian is compared instead of every
    column, because comparing every column of 33 tables of 17 rows took 16 s a trial.
    """
    places = subject.differentiable(trial.args)
    outputs = floating(subject.expected(*trial.args))
    if not all(one.dtype == torch.float64 and bool(one.isfinite().all()) for one in outputs):
        return Outcome(untried=True)
    tolerance = 0.0 if subject.op.nondeterministic is None else 1e-10
    fast = sum(tensor.numel() for tensor in at(trial.args, places)) > _MOST_NUMBERS
    asked = (numeric_derivatives, places, list(trial.args), tolerance, fast, subject.seed)
    try:
        subject.candidate.ask(*asked)
    except Exception as error:
        if is_a(error, GradcheckError) and not _is_derivative(subject, asked):
            return Outcome(untried=True)
        raise
    return Outcome()


def _is_derivative(subject: Subject, asked: Sequence[Any]) -> bool:
    """Return whether the reference's gradient is what its finite differences approach."""
    try:
        subject.reference.ask(*asked)
    except Exception as error:
        if is_a(error, GradcheckError):
            return False
        raise
    return True


def _has_wide_gradient(subject: Subject) -> tuple[Verdict, str] | None:
    """Return None in float32 and float64; in 16 bits second derivatives lie within eager's
    rounding."""
    if subject.dtype not in (torch.float32, torch.float64):
        return Verdict.SKIPPED, "second derivatives are judged in float32 and float64"
    return has_gradient(subject)


def _has_float64_gradient(subject: Subject) -> tuple[Verdict, str] | None:
    if subject.dtype != torch.float64:
        return Verdict.SKIPPED, "numeric derivatives need float64"
    return has_gradient(subject)


CHECKS = (
    # Inputs that need a gradient get one, or are refused.
    Check("gradient present", presence, quick=2, full=4),
    # Every gradient, for any upstream gradient.
    Check(
        "gradients",
        gradients_are_right,
        values=(
            *("normal", "wide", "zeros", "equal", "large negative", "subnormal"),
            *("infinities", "masked", "NaN"),
        ),
        quick=32,
        full=160,
        max_numel=4096,
        turns=True,
        simplest=True,
        together="gradients",
        applies=has_gradient,
    ),
    # Upstream gradients of any stride.
    Check(
        "upstream",
        gradients_are_right,
        layouts=LAYOUTS,
        quick=36,
        full=60,
        max_numel=4096,
        turns=True,
        together="gradients",
        applies=has_gradient,
    ),
    # The gradients of ``output.sum().backward()``.
    Check("summed", summed_output, quick=8, full=24, max_numel=4096, applies=has_gradient),
    # Three backward calls agree and leave what was saved alone.
    Check(
        "backward twice",
        backward_repeats,
        layouts=("contiguous", "one element"),
        quick=4,
        full=12,
        max_numel=4096,
        applies=has_gradient,
    ),
    # A backward after a tensor was written over.
    Check(
        "writes before backward",
        writes_are_noticed,
        layouts=("contiguous", "transposed"),
        quick=4,
        full=12,
        max_numel=512,
        non_empty=True,
        shrink_tries=20,
        applies=has_gradient,
    ),
    # A gradient for one input alone.
    Check("some gradients", some_gradients, quick=6, max_numel=4096, applies=has_gradient),
    # Right or refused, never silently wrong.
    Check(
        "second derivative",
        second_derivative,
        quick=8,
        full=32,
        max_numel=1024,
        applies=_has_wide_gradient,
    ),
    # A loss that contains a gradient.
    Check(
        "gradient penalty",
        gradient_penalty,
        quick=4,
        full=12,
        max_numel=1024,
        applies=_has_wide_gradient,
    ),
    # Derivatives against finite differences.
    Check(
        "gradcheck",
        numeric_gradient,
        quick=4,
        full=12,
        max_numel=12,
        applies=_has_float64_gradient,
        shrink_tries=10,
    ),
)
