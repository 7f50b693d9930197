"""Checks of unusual inputs: memory around them, tensors that share memory, dtypes that no list
names, upstream gradients with infinities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.errors import FuselabError
from fuselab.op import dtype_name, tensors_in
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import at, filled, needed, tensor_names
from fuselab.prove.check_calls import bits_of
from fuselab.prove.check_memory import poison_of, storage_bytes
from fuselab.prove.draw import LAYOUTS
from fuselab.prove.outputs import as_declared, output_names, outputs_in
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import (
    Check,
    Outcome,
    Results,
    call_bar,
    has_gradient,
    judged,
    with_gradients,
)
from fuselab.runtime import dispatch
from fuselab.runtime.launch_recording import ALLOCATIONS

GUARD = 64  # elements before and behind a tensor, which keep its alignment
_SPECIAL_SHARE = 16  # one upstream gradient's element in so many is special


# The memory around inputs and outputs


def guarded(tensor: Tensor, fill: float) -> Tensor:
    """Return a copy with the same strides, with ``GUARD`` elements of ``fill`` before and behind.

    The memory around integers holds one of them, because only those are known to be valid.
    """
    if tensor.numel() == 0:
        return tensor
    if not tensor.is_floating_point():
        fill = tensor.reshape(-1)[0].item()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    buffer = torch.full((extent + 2 * GUARD,), fill, dtype=tensor.dtype, device=tensor.device)
    view = torch.as_strided(buffer, tensor.shape, tensor.stride(), GUARD)
    torch.as_strided(buffer, (extent,), (1,), GUARD).copy_(
        torch.as_strided(tensor.detach(), (extent,), (1,), tensor.storage_offset())
    )
    return view


def edges_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a copy of the bytes before and behind a guarded tensor."""
    whole = storage_bytes(tensor)
    width = GUARD * tensor.element_size()
    return whole[:width], whole[-width:]


def nothing_beyond_the_edges(subject: Subject, trial: Trial) -> Outcome:
    """Check that a call neither depends on memory around its inputs nor writes around its outputs.

    Every input lies between guards, once of NaN and once of ones; the results must have equal bits
    and the guards stay. Memory that the implementation allocates lies between guards too.
    """
    places = list(range(len(tensors_in(trial.args))))
    upstream = subject.upstream(trial) if subject.op.gradient is not None else ()
    found: list[Results] = []
    for fill in (math.nan, 1.0):
        inputs = [guarded(tensor, fill) for tensor in at(trial.args, places)]
        given = tuple(guarded(tensor, fill) for tensor in upstream)
        named = list(zip(tensor_names(subject.op, trial.args), inputs, strict=True))
        watched = [(name, one) for name, one in named if one.numel()]
        watched += [("an upstream gradient", one) for one in given if one.numel()]
        before = [edges_of(one) for _, one in watched]
        args = filled(trial.args, places, inputs)
        found.append(_called(subject, args, given))
        for (name, one), edges in zip(watched, before, strict=True):
            if not all(map(torch.equal, edges, edges_of(one))):
                return Outcome(f"memory beside {name} was written to")
    problem = _first_difference(subject, trial, *found)
    return Outcome(problem or _written_beyond(subject, trial, upstream))


def _called(subject: Subject, args: Sequence[Any], upstream: Sequence[Tensor]) -> Results:
    if subject.op.gradient is None:
        return [*subject.results(*args)]
    return with_gradients(subject.call, subject.differentiable(args), [*args, upstream])


def _first_difference(subject: Subject, trial: Trial, one: Results, other: Results) -> str | None:
    """Return which result depends on the memory around the inputs, or None."""
    if subject.op.nondeterministic is not None:
        return None
    arguments = tensor_names(subject.op, trial.args)
    names = [f"the {name}" for name in subject.result_names(trial.args)]
    names += [f"the gradient of {arguments[place]}" for place in subject.differentiable(trial.args)]
    for name, first, second in zip(names, one, other, strict=False):
        if first is None or second is None or torch.equal(bits_of(first), bits_of(second)):
            continue
        return f"{name} depends on memory beyond the inputs: its bits change with what lies there"
    return None


class GuardedAllocations(TorchDispatchMode):
    """Puts ``GUARD`` elements before and behind every tensor that ``torch.empty`` and its variants
    return."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS and isinstance(result, Tensor) and result.numel():
            result = guarded(result.fill_(poison_of(result.dtype, math.nan)), 7.0)
            self.watched.append((result, edges_of(result)))
        return result

    def written(self) -> bool:
        """Return whether any guard was written to."""
        return any(
            not all(map(torch.equal, edges, edges_of(tensor))) for tensor, edges in self.watched
        )


def _written_beyond(subject: Subject, trial: Trial, upstream: Sequence[Tensor]) -> str | None:
    """Return which part of the implementation writes beyond what it allocates, or None."""
    op, implementation = subject.op, subject.op.implementations[subject.implementation]
    with GuardedAllocations() as forward:
        output = subject.call_alone(*trial.args)
    if forward.written():
        return "the forward writes beyond a tensor that it allocates"
    if op.gradient is None or implementation.backward is None:
        return None
    saved = op.gradient.save(output, *trial.args)
    given = as_declared(op, outputs_in(output), upstream)
    needs = needed(op, trial.args)
    if implementation.supports_backward(needs, given, *saved) is not None:
        return None
    with torch.no_grad(), GuardedAllocations() as backward:
        implementation.backward(needs, given, *saved)
    return "the backward writes beyond a tensor that it allocates" if backward.written() else None


# Tensors that share memory


def shared_arguments_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge calls in which one tensor is given twice, or lies within another one's memory."""
    outcome = Outcome(untried=True)
    for args, how in _sharing(subject, trial):
        try:
            subject.op.validate(*args)
        except FuselabError:
            continue
        if dispatch.why_not(subject.op, subject.implementation, args) is not None:
            continue
        shared = Trial(tuple(args), trial.draw, trial.title)
        bar, results_of = call_bar(subject, shared)
        outcome = judged(bar, results_of(subject.call), after=f" ({how})")
        if outcome.problem is not None:
            return outcome
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
                start = tensor.storage_offset() + (tensor.numel() - other.numel()) // 2
                strides = torch.empty(other.shape, device="meta").stride()
                within = torch.as_strided(tensor, other.shape, strides, start)
                found.append(
                    (filled(trial.args, [other_place], [within]), f"{pair} overlap in memory")
                )
    return found[:4]


# Other dtypes


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
        try:
            op.validate(*args)
            if dispatch.why_not(op, subject.implementation, args) is not None:
                continue
            bar = subject.bar(args)
        except (FuselabError, RuntimeError, TypeError):
            continue  # the operator or the reference refuses this dtype
        try:
            results = subject.results(*args)
        except (FuselabError, NotImplementedError, TypeError) as error:
            outcome = Outcome(refused=f"refuses {dtype_name(dtype)}: {error}")
            continue
        outcome = judged(bar, results, after=f" in {dtype_name(dtype)}, which dtypes does not list")
        if outcome.problem is not None:
            return outcome
    return outcome


def _lists_not_all(subject: Subject) -> tuple[Verdict, str] | None:
    if not subject.dtype.is_floating_point:
        return Verdict.SKIPPED, "its arguments are integers"
    if len([dtype for dtype in subject.op.dtypes if dtype.is_floating_point]) >= 4:
        return Verdict.SKIPPED, "the operator lists every floating dtype"
    return None


# Upstream gradients with infinities


def overflow_is_passed_on(subject: Subject, trial: Trial) -> Outcome:
    """Check that infinities, NaN and overflow of an upstream gradient show in the gradients.

    A loss scaler skips a step if it finds one that is not finite. How the terms of a derivative
    are bracketed decides between an infinity and NaN, and whether an infinity times zero counts, so
    less is asked than of numbers: where eager and float64 both give an infinity, the result is not
    finite; a gradient in which both have something that is not finite has something too; and what
    is finite in all three meets the bar.
    """
    places = subject.differentiable(trial.args)
    upstream = tuple(
        _with_specials(gradient, trial.draw.below(1 << 16), trial.draw.below(4))
        for gradient in subject.upstream(trial)
    )
    if not any(gradient.numel() for gradient in upstream):
        return Outcome(untried=True)
    bar, results_of = call_bar(subject, trial, upstream)
    results = results_of(subject.call)
    names = tensor_names(subject.op, trial.args)
    count = len(output_names(subject.op))
    for number, place in enumerate(places, start=count):
        problem = _hidden(results[number], bar.eager[number], bar.exact[number])
        if problem is not None:
            return Outcome(f"gradient of {names[place]} {problem}")
    return judged(bar, _finite_in_all(bar, results, count))


def _with_specials(gradient: Tensor, seed: int, kind: int) -> Tensor:
    """Return a copy in which a few elements are infinite, NaN or the largest number."""
    limit = torch.finfo(gradient.dtype).max
    copy = gradient.detach().clone(memory_format=torch.contiguous_format)
    places = torch.randperm(copy.numel(), generator=torch.Generator().manual_seed(seed))
    chosen = places[: max(1, copy.numel() // _SPECIAL_SHARE)].to(copy.device)
    copy.view(-1)[chosen] = (math.inf, -math.inf, math.nan, limit)[kind]
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


def _finite_in_all(bar: Bar, results: Results, count: int) -> Results:
    """Put zeros into the gradients of the bar and of ``results`` where any of them is not
    finite."""
    kept = list(results)
    for place in range(count, len(results)):
        ours, eager, exact = results[place], bar.eager[place], bar.exact[place]
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
    # Infinities, NaN and overflow in the upstream gradient.
    Check(
        "upstream overflow",
        overflow_is_passed_on,
        layouts=LAYOUTS,
        quick=12,
        full=48,
        max_numel=2048,
        applies=has_gradient,
    ),
)
