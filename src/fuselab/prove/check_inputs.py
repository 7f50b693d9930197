"""Checks of unusual inputs: memory around them, tensors that share memory, dtypes that no list
names, upstream gradients with infinities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import FuselabError
from fuselab.op import dtype_name, tensors_in
from fuselab.prove.accuracy import Bar, upcast
from fuselab.prove.arguments import at, filled, mapped, tensor_names
from fuselab.prove.asked_calls import Results
from fuselab.prove.asked_edges import (
    guarded,
    with_inputs,
    with_read_only_inputs,
    written_beyond,
)
from fuselab.prove.asked_inputs import option_names, other_options, shown, unsupported
from fuselab.prove.asked_memory import storage_bytes
from fuselab.prove.check_memory import same_bits
from fuselab.prove.draw import LAYOUTS, lay_out
from fuselab.prove.held import CandidateError, Here, RemoteError, is_a, said
from fuselab.prove.outputs import output_names
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, call_bar, has_gradient, is_hurried, judged

_SCALE_BITS = 64  # log2 of the factor between upstream gradients that overflow and that do not
_HURRIED_FLOATS = 2  # other floats, with --quick under the interpreter
_OPTION_DRAWS = 24  # inputs that are drawn to see which options vary
_FLOAT_STEPS = 12  # factors of 4 above 16, and below a 16th, that a float is given
_VAST_BITS = 104  # the square of 2^104 overflows in float32, and its product with 2^12 does not
_NAN_KIND = 2  # of the special values that an upstream gradient has
_SPECIAL_SHARE = 16  # one upstream gradient's element in so many is special


def nothing_beyond_the_edges(subject: Subject, trial: Trial) -> Outcome:
    """Check that a call neither depends on memory around its inputs nor writes around its outputs.

    Every input lies between guards, once of NaN and once of ones; the results must have equal bits
    and the guards stay. Memory that the implementation allocates lies between guards too.
    """
    names = tensor_names(subject.op, trial.args)
    labels = [f"the {name}" for name in subject.result_names(trial.args)]
    places, upstream = None, None
    if subject.op.gradient is not None:
        places, upstream = subject.differentiable(trial.args), subject.upstream(trial)
        labels += [f"the gradient of {names[place]}" for place in places]
        names += ["an upstream gradient"] * len(upstream)
    # At first, because a write beyond an output may end the process elsewhere.
    problem = subject.candidate.ask(written_beyond, list(trial.args), upstream)
    if problem is not None:
        return Outcome(problem)
    found = []
    for fill in (math.nan, 1.0):
        values = [*trial.args] if upstream is None else [*trial.args, upstream]
        tensors = [guarded(tensor, fill) for tensor in tensors_in(values)]
        values = filled(values, range(len(tensors)), tensors)
        before = [storage_bytes(tensor) for tensor in tensors]
        after = subject.candidate.ask(with_inputs, places, values)
        for name, content, tensor in zip(names, before, after["tensors"], strict=True):
            if not torch.equal(content, storage_bytes(tensor)):
                return Outcome(f"{name}, or memory beside it, was written to")
        found.append(after["results"])
    if subject.op.nondeterministic is None:
        for label, one, other in zip(labels, *found, strict=True):
            if one is not None and other is not None and not same_bits([one], [other]):
                return Outcome(
                    f"{label} depends on memory beyond the inputs: its bits change with what lies "
                    "there"
                )
    # In this process, a write to such memory would end the judge.
    if subject.device.type == "cpu" and not isinstance(subject.candidate, Here):
        values = [*trial.args] if upstream is None else [*trial.args, upstream]
        problem = _write_that_is_undone(subject, places, values)
    return Outcome(problem)


def _write_that_is_undone(
    subject: Subject, places: Sequence[int] | None, values: Sequence[Any]
) -> str | None:
    """Return how a call fails on inputs in memory that may only be read, and behind which there is
    none; or None."""
    try:
        subject.candidate.ask(with_read_only_inputs, places, list(values))
    except CandidateError as error:
        return (
            "a call writes to an input, and puts back what was there, or reads beyond it: on "
            f"inputs in memory that can only be read, at the end of a page, {error}"
        )
    return None


def shared_arguments_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge calls in which one tensor is given twice, or lies within another one's memory."""
    outcome = Outcome(untried=True)
    for args, how in _sharing(subject, trial):
        if subject.reference.ask(unsupported, subject.implementation, args) is not None:
            continue
        bar, asked = call_bar(subject, replace(trial, args=tuple(args)))
        outcome = judged(bar, subject.candidate.ask(*asked), after=f" ({how})")
        if outcome.problem is not None:
            return replace(outcome, args=args)
    return outcome


def _sharing(subject: Subject, trial: Trial) -> list[tuple[list[Any], str]]:
    """Return argument lists in which two floating tensors share memory, each with a sentence."""
    tensors, names = tensors_in(trial.args), tensor_names(subject.op, trial.args)
    found: list[tuple[list[Any], str]] = []
    for place, tensor in enumerate(tensors):
        for other_place, other in enumerate(tensors):
            if other_place == place or not tensor.is_floating_point() or not other.numel():
                continue
            if other.dtype != tensor.dtype or not tensor.is_contiguous():
                continue
            pair = f"{names[other_place]} and {names[place]}"
            if other.shape == tensor.shape and other_place > place:
                found.append(
                    (filled(trial.args, [other_place], [tensor]), f"{pair} are one tensor")
                )
            elif other.numel() < tensor.numel():
                start = tensor.storage_offset()
                if trial.draw.below(2):
                    start += (tensor.numel() - other.numel()) // 2
                strides = torch.empty(other.shape, device="meta").stride()
                within = torch.as_strided(tensor, other.shape, strides, start)
                found.append(
                    (filled(trial.args, [other_place], [within]), f"{pair} overlap in memory")
                )
    return found[:4]


def other_dtypes_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge calls in dtypes that the operator does not list: it refuses them, or is right."""
    op, outcome = subject.op, Outcome(untried=True)
    listed = set(op.dtypes)
    others = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype in others:
        if dtype in listed or (subject.interpreted and dtype == torch.bfloat16):
            continue
        places = [
            place
            for place, tensor in enumerate(tensors_in(trial.args))
            if tensor.dtype == subject.dtype
        ]
        args = filled(trial.args, places, [tensor.to(dtype) for tensor in at(trial.args, places)])
        if subject.reference.ask(unsupported, subject.implementation, args) is not None:
            continue
        try:
            bar = subject.bar(args)
        except (RemoteError, RuntimeError, TypeError, ValueError):
            continue  # the reference does not compute in this dtype
        try:
            found = subject.results(*args)
        except Exception as error:
            if not is_a(error, FuselabError, NotImplementedError, TypeError):
                raise
            outcome = Outcome(refused=f"refuses {dtype_name(dtype)}: {said(error, 200)}")
            continue
        outcome = judged(bar, found, after=f" in {dtype_name(dtype)}, which dtypes does not list")
        if outcome.problem is not None:
            return replace(outcome, args=args)
    return outcome


def mixed_dtypes_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge calls in which one tensor has another dtype of the operator's than the others: they are
    refused, or right."""
    floats = [dtype for dtype in subject.op.dtypes if dtype.is_floating_point]
    tensors, names = tensors_in(trial.args), tensor_names(subject.op, trial.args)
    places = [place for place, tensor in enumerate(tensors) if tensor.dtype == subject.dtype]
    others = [
        dtype
        for dtype in floats
        if dtype != subject.dtype and not (subject.interpreted and dtype == torch.bfloat16)
    ]
    if len(places) < 2 or not others:
        return Outcome(untried=True)
    place = places[trial.draw.below(len(places))]
    dtype = others[trial.draw.below(len(others))]
    args = filled(trial.args, [place], [tensors[place].to(dtype)])
    return _taken_is_right(subject, trial, args, f" with {names[place]} in {dtype_name(dtype)}")


def dtypes_in_turn_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge calls on tensors of equal shapes in each of the operator's dtypes, one after the other
    in one process: what is built or kept for shapes alone shows."""
    places = [
        place
        for place, tensor in enumerate(tensors_in(trial.args))
        if tensor.dtype == subject.dtype
    ]
    others = [
        dtype
        for dtype in subject.op.dtypes
        if dtype.is_floating_point
        and dtype != subject.dtype
        and not (subject.interpreted and dtype == torch.bfloat16)
    ]
    if not places or not others:
        return Outcome(untried=True)
    first = trial.draw.below(len(others))
    outcome = Outcome(untried=True)
    for dtype in (subject.dtype, *others[first:], *others[:first], subject.dtype):
        tensors = [tensor.to(dtype) for tensor in at(trial.args, places)]
        args = filled(trial.args, places, tensors)
        if subject.reference.ask(unsupported, subject.implementation, args) is not None:
            continue
        bar, asked = call_bar(subject, replace(trial, args=tuple(args)))
        found = subject.candidate.ask(*asked)
        outcome = judged(bar, found, after=f" in {dtype_name(dtype)} between calls in other dtypes")
        if outcome.problem is not None:
            return replace(outcome, args=args)
    return outcome


def other_floats_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge calls whose floats are others than were drawn.

    First, floats that neither 16 bits nor float32 hold, next to those that were drawn: a kernel
    that rounds them is right for 0.5 and wrong for 0.1. Each moves towards 0, so that a share or a
    probability stays one. Then, if eager and float64 give numbers for them, floats of 0 and of the
    other sign, and for each float one after the other numbers of another magnitude, of either sign.
    """
    places = [place for place, value in enumerate(trial.args) if isinstance(value, float)]
    numbers = {place: trial.args[place] for place in places}
    part = (1 + 2 * trial.draw.below(8)) * 2.0**-12 + 2.0**-31
    outcome = Outcome(untried=True)
    if any(value and math.isfinite(value) for value in numbers.values()):
        near = {place: value * (1 - part) for place, value in numbers.items()}
        outcome = _with_floats(subject, trial, near)
    others = [{place: value * factor for place, value in numbers.items()} for factor in (0.0, -1.0)]
    for place in places:
        part, first = 1 + trial.draw.below(8) / 8, trial.draw.below(_FLOAT_STEPS)
        for step in range(first, first + _FLOAT_STEPS, _FLOAT_STEPS // 3):  # one of each third
            large = part * 2.0 ** (4 + 2 * (step % _FLOAT_STEPS))
            others += [{place: number} for number in (large, -large, 1 / large, -1 / large)]
        vast = part * 2.0**_VAST_BITS
        others += [{place: number} for number in (vast, -vast, 1 / vast, -1 / vast)]
    if is_hurried(subject):
        start = trial.draw.below(len(others))
        others = [*others[start:], *others[:start]][:_HURRIED_FLOATS]
    for changed in others if numbers else ():
        if outcome.problem is None:
            other = _with_floats(subject, trial, changed, finite=True)
            outcome = outcome if other.untried else other
    return outcome


def _with_floats(
    subject: Subject, trial: Trial, changed: Mapping[int, float], finite: bool = False
) -> Outcome:
    """Judge the call with other floats among its arguments; where ``finite``, only if eager and
    float64 give numbers."""
    args = [changed.get(place, value) for place, value in enumerate(trial.args)]
    shown = zip(subject.op.parameters, args, strict=True)
    floats = ", ".join(f"{name}={value!r}" for name, value in shown if isinstance(value, float))
    return _taken_is_right(subject, trial, args, f" with {floats}", finite)


def _takes_floats(subject: Subject) -> tuple[Verdict, str] | None:
    return None if subject.op.float_parameters else (Verdict.SKIPPED, "it takes no float")


def other_options_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge calls with options that no input drawn has: the defaults, a bool the other way, an
    optional argument left out or given, a dimension counted from the other end.

    An option of which the inputs drawn have one value, and for which no other was taken, is told of
    as one that was never varied.
    """
    seen = _options_drawn(subject)
    outcome, varied = Outcome(untried=True), {name for name, some in seen.items() if len(some) > 1}
    for changed in subject.reference.ask(other_options, list(trial.args), seen):
        if set(changed) <= varied and any(isinstance(one, Tensor) for one in changed.values()):
            continue  # a tensor of another shape was taken
        named = zip(subject.op.parameters, trial.args, strict=True)
        args = [changed.get(name, value) for name, value in named]
        how = ", ".join(f"{name}={shown(value)}" for name, value in changed.items())
        other = _taken_is_right(subject, trial, args, f" with {how}")
        if other.problem is not None:
            return other
        if not other.untried:
            varied |= set(changed)
            outcome = other if outcome.untried or outcome.refused is not None else outcome
    unvaried = [name for name in seen if name not in varied]
    return replace(outcome, unvaried=unvaried, untried=outcome.untried and bool(unvaried))


def _options_drawn(subject: Subject) -> dict[str, list[str]]:
    """Return the values that each option has among some inputs drawn and the operator's cases."""
    drawn = subject.draw_together(
        "coverage",
        range(_OPTION_DRAWS),
        [None] * _OPTION_DRAWS,
        layouts=("contiguous",),
        values=("normal",),
        max_numel=512,
    )
    cases = [subject.from_case("coverage", case) for case in subject.small_cases()]
    calls = [
        dict(zip(subject.op.parameters, one.args, strict=True))
        for one in (*drawn, *cases)
        if one is not None
    ]
    return {
        name: sorted({shown(call[name]) for call in calls})
        for name in subject.reference.ask(option_names)
    }


def _takes_options(subject: Subject) -> tuple[Verdict, str] | None:
    if subject.reference.ask(option_names):
        return None
    return Verdict.SKIPPED, "it takes no option"


# Dimensions that are put before those of a tensor; those of size 1 hide no stride.
_LEADING = ((2,), (2, 1), (1, 2, 2), (2, 1, 1, 2), (1, 2, 1, 1, 2))


def _around(tensor: Tensor) -> float:
    """Return what the memory between the elements of a tensor holds: a valid integer, or NaN."""
    return math.nan if tensor.is_floating_point() else 0


def other_dimensions_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge calls on tensors of four dimensions to eight, contiguous and not, and of none: they
    are refused, or right.

    Integers are 0 in these calls: an index that the operator drew counts into dimensions that are
    others now, and one out of range ends the work of a GPU.
    """
    tensors = [
        tensor if tensor.is_floating_point() else torch.zeros_like(tensor)
        for tensor in tensors_in(trial.args)
    ]
    most = max((tensor.ndim for tensor in tensors), default=0)
    places = [place for place, tensor in enumerate(tensors) if tensor.ndim == most]
    outcome = Outcome(untried=True)
    for lead in _LEADING:
        count = most + len(lead)
        if count < 4:
            continue
        more = [
            torch.stack([tensors[place]] * math.prod(lead)).reshape(*lead, *tensors[place].shape)
            for place in places
        ]
        layout = LAYOUTS[1 + trial.draw.below(len(LAYOUTS) - 1)]
        strided = [
            lay_out(one.detach().cpu(), layout, subject.place, around=_around(one)) for one in more
        ]
        for given, how in ((more, ""), (strided, f", {layout}")):
            args = filled(trial.args, places, given)
            outcome = _taken_is_right(subject, trial, args, f" of {count} dimensions{how}")
            if outcome.problem is not None:
                return outcome
    if not all(tensor.numel() for tensor in tensors):
        return outcome
    scalars = [tensor.reshape(-1)[0].clone() for tensor in tensors]
    args = filled(trial.args, range(len(tensors)), scalars)
    none = _taken_is_right(subject, trial, args, " of no dimension")
    return outcome if none.untried else none


def _taken_is_right(
    subject: Subject, trial: Trial, args: Sequence[Any], after: str, finite: bool = False
) -> Outcome:
    """Judge a call with arguments that the operator's draw does not give, if everything that the
    operator declares, and the reference, takes them, where ``finite`` with numbers for results. Any
    error is a refusal."""
    try:
        if subject.reference.ask(unsupported, subject.implementation, list(args)) is not None:
            return Outcome(untried=True)
        bar, asked = call_bar(subject, replace(trial, args=tuple(args)))
    except CandidateError:
        raise
    except Exception:
        return Outcome(untried=True)  # the reference, or what is declared, does not take them
    if finite and not all(
        one is None or bool(one.isfinite().all()) for one in (*bar.eager, *bar.exact)
    ):
        return Outcome(untried=True)
    try:
        found = subject.candidate.ask(*asked)
    except CandidateError:
        raise
    except Exception as error:
        return Outcome(refused=f"refuses arguments{after}: {said(error, 100)}")
    outcome = judged(bar, found, after=after)
    return outcome if outcome.problem is None else replace(outcome, args=args)


def _lists_not_all(subject: Subject) -> tuple[Verdict, str] | None:
    if not subject.dtype.is_floating_point:
        return Verdict.SKIPPED, "its arguments are integers"
    if len([dtype for dtype in subject.op.dtypes if dtype.is_floating_point]) >= 4:
        return Verdict.SKIPPED, "the operator lists every floating dtype"
    return None


def overflow_is_passed_on(subject: Subject, trial: Trial) -> Outcome:
    """Check that infinities, NaN and overflow of an upstream gradient show in the gradients.

    A loss scaler skips a step if it finds one that is not finite. How the terms of a derivative
    are bracketed decides between an infinity and NaN, and whether an infinity times zero counts, so
    less is asked than of numbers: where eager and float64 both give an infinity, the result is not
    finite; a gradient in which both have something that is not finite has something too; and what
    is finite in all three meets the bar. No bracket makes a number of NaN: where that is all an
    upstream gradient has, a gradient has NaN wherever the bar asks for it.
    """
    places = subject.differentiable(trial.args)
    drawn = subject.upstream(trial)
    kinds = [(trial.draw.below(1 << 16), trial.draw.below(8)) for _ in drawn]
    upstream = tuple(
        _with_specials(gradient, *kind) for gradient, kind in zip(drawn, kinds, strict=True)
    )
    if not any(gradient.numel() for gradient in upstream):
        return Outcome(untried=True)
    bar, asked = call_bar(subject, trial, upstream)
    found = subject.candidate.ask(*asked)
    names = tensor_names(subject.op, trial.args)
    count = len(output_names(subject.op))
    if subject.dtype == torch.float64:
        bar.exact[count:] = _without_overflow_on_the_way(bar)[count:]
    for number, place in enumerate(places, start=count):
        problem = _hidden(found[number], bar.eager[number], bar.exact[number])
        if problem is not None:
            return Outcome(f"gradient of {names[place]} {problem}")
    if all(kind % 4 == _NAN_KIND for _, kind in kinds):
        return judged(bar, _numbers_of_eager(bar, found, count))
    return judged(bar, _finite_in_all(bar, found, count))


def _without_overflow_on_the_way(bar: Bar) -> Results:
    """Return float64's results, whose gradients are infinite only where they have no number.

    A gradient is linear in the upstream gradients, so theirs are scaled by a power of two, which
    rounds nothing, and so no term that is within range in the end overflows before it is
    multiplied or added.
    """
    *args, upstream = mapped(upcast, bar.values)
    small = tuple(gradient * 2.0**-_SCALE_BITS for gradient in upstream)
    found = bar.evaluate([*args, small])
    return [None if one is None else one * 2.0**_SCALE_BITS for one in found]


def _with_specials(gradient: Tensor, seed: int, kind: int) -> Tensor:
    """Return a copy in which a few elements, or most, are infinite, NaN or the largest number."""
    limit = torch.finfo(gradient.dtype).max
    copy = gradient.detach().clone(memory_format=torch.contiguous_format)
    places = torch.randperm(copy.numel(), generator=torch.Generator().manual_seed(seed))
    count = copy.numel() // _SPECIAL_SHARE if kind < 4 else copy.numel() - copy.numel() // 4
    chosen = places[: max(1, count)].to(copy.device)
    copy.view(-1)[chosen] = (math.inf, -math.inf, math.nan, limit)[kind % 4]
    return copy


def _hidden(ours: Tensor | None, eager: Tensor | None, exact: Tensor | None) -> str | None:
    """Return how a gradient hides what is not finite in eager's and in float64's, or None."""
    if eager is None or exact is None or not eager.is_floating_point():
        return None
    rounded = exact.to(eager.dtype)
    expected = ~eager.isfinite() & ~rounded.isfinite()
    if not bool(expected.any()):
        return None
    if ours is None:
        return "is missing (None) where eager's is not finite"
    if ours.shape != eager.shape:
        return None  # the bar says so
    if bool(ours.isfinite().all()):
        return "is finite everywhere; eager's and float64's are not, so a loss scaler misses it"
    hidden = eager.isinf() & rounded.isinf() & ours.isfinite()
    if bool(hidden.any()):
        where = tuple(hidden.nonzero()[0].tolist())
        return f"is {ours[where].item():.6g} at {list(where)} where eager and float64 are infinite"
    return None


def _numbers_of_eager(bar: Bar, found: Results, count: int) -> Results:
    """Return what was found with eager's numbers where a gradient is NaN and eager's is not."""
    return [
        torch.where(ours.isnan() & eager.isfinite(), eager, ours)
        if number >= count and ours is not None and eager is not None and ours.shape == eager.shape
        else ours
        for number, (ours, eager) in enumerate(zip(found, bar.eager, strict=True))
    ]


def _finite_in_all(bar: Bar, found: Results, count: int) -> Results:
    """Put zeros into the gradients of the bar and of ``found`` where any of them is not
    finite."""
    kept = list(found)
    for place in range(count, len(found)):
        ours, eager, exact = found[place], bar.eager[place], bar.exact[place]
        if ours is None or eager is None or exact is None or ours.shape != eager.shape:
            continue
        finite = ours.isfinite() & eager.isfinite() & exact.to(eager.dtype).isfinite()
        kept[place] = torch.where(finite, ours, torch.zeros_like(ours))
        bar.eager[place] = torch.where(finite, eager, torch.zeros_like(eager))
        bar.exact[place] = torch.where(finite, exact, torch.zeros_like(exact))
    return kept


def _returns_new(subject: Subject) -> tuple[Verdict, str] | None:
    return (Verdict.SKIPPED, "it writes over arguments") if subject.op.mutates else None


CHECKS = (
    # Nothing is read or written beyond the edges.
    Check(
        "guards", nothing_beyond_the_edges, quick=8, full=24, max_numel=4096, applies=_returns_new
    ),
    # One tensor given twice, or within another one's memory.
    Check(
        "aliases",
        shared_arguments_are_right,
        quick=4,
        full=16,
        max_numel=4096,
        applies=_returns_new,
    ),
    # Dtypes that the operator takes without listing them.
    Check(
        "other dtypes",
        other_dtypes_are_right,
        quick=2,
        full=6,
        max_numel=1024,
        applies=_lists_not_all,
        once=True,
    ),
    # One tensor in another dtype than the others.
    Check("mixed dtypes", mixed_dtypes_are_right, quick=4, full=12, max_numel=512),
    # Equal shapes in each dtype, one after the other.
    Check("dtypes in turn", dtypes_in_turn_are_right, quick=2, full=8, max_numel=512, once=True),
    # Floats that 16 bits do not hold, nor float32.
    Check(
        "other floats",
        other_floats_are_right,
        quick=3,
        full=12,
        max_numel=256,
        applies=_takes_floats,
        non_empty=True,
    ),
    # Options that the operator does not draw.
    Check(
        "other options",
        other_options_are_right,
        quick=4,
        full=12,
        max_numel=256,
        applies=_takes_options,
        non_empty=True,
    ),
    # More dimensions than the operator draws, and none.
    Check("dimensions", other_dimensions_are_right, quick=2, full=8, max_numel=256, once=True),
    # Infinities, NaN and overflow in the upstream gradient.
    Check(
        "upstream overflow",
        overflow_is_passed_on,
        layouts=LAYOUTS,
        quick=16,
        full=48,
        max_numel=2048,
        applies=has_gradient,
    ),
)
