"""Checks of a call's effects on memory: outputs written, inputs unchanged, nothing remembered."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.errors import FuselabError
from fuselab.op import tensors_in
from fuselab.prove.arguments import (
    at,
    copy_of_storage,
    filled,
    tensor_names,
    with_own_copies,
    written_places,
)
from fuselab.prove.draw import LAYOUTS, VALUES, make_values
from fuselab.prove.load import changed_by_import
from fuselab.prove.outputs import output_names, outputs_in, upstream_names
from fuselab.prove.process_state import ProcessState
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, call_bar, has_gradient, judged, with_gradients
from fuselab.runtime.dispatch.overlap import overlaps_itself
from fuselab.runtime.launch_recording import ALLOCATIONS


class PoisonedAllocations(TorchDispatchMode):
    """Fills the result of ``torch.empty`` and its variants, so that an unwritten element shows."""

    def __init__(self, poison: float) -> None:
        super().__init__()
        self.poison = poison

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            result.fill_(poison_of(result.dtype, self.poison))
        return result


def poison_of(dtype: torch.dtype, poison: float) -> float:
    """Return ``poison`` for a floating dtype, and a small integer otherwise, since a kernel may
    index with it."""
    return poison if dtype.is_floating_point else 1 if math.isnan(poison) else int(poison)


@contextlib.contextmanager
def filled_by_torch() -> Iterator[None]:
    """Make torch fill every empty tensor, also those of C++ callers, by its deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # this is a module whose attribute is a setting
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


def leave_poison_behind(like: Tensor, poison: float) -> None:
    """Free blocks of ``like``'s size that hold ``poison``; the allocator reuses them next."""
    blocks = [torch.full_like(like, poison_of(like.dtype, poison)) for _ in range(4)]
    del blocks


def output_is_written(subject: Subject, trial: Trial) -> Outcome:
    bar = subject.bar(trial.args)

    def outcome_of(results: Sequence[Tensor], where: str) -> Outcome:
        return judged(bar, results, after=f" (in memory {where})")

    for poison in (math.nan, 7.0):
        with PoisonedAllocations(poison):
            results = list(outputs_in(subject.call_alone(*trial.args)))
        outcome = outcome_of(results, "poisoned before")
        if outcome.problem is not None:
            return outcome
        # The second call of the public function may run a cached launch plan.
        for _ in range(2):
            for eager in tensors_in(bar.eager):
                leave_poison_behind(eager, poison)
            outcome = outcome_of(subject.results(*trial.args), "used before")
            if outcome.problem is not None:
                return outcome
    with filled_by_torch():
        results = subject.results(*trial.args)
    return outcome_of(results, "that torch filled")


def gradients_are_written(subject: Subject, trial: Trial) -> Outcome:
    bar, results_of = call_bar(subject, trial)
    for _ in range(2):
        for grad in bar.eager:
            if grad is not None:
                leave_poison_behind(grad, math.nan)
        outcome = judged(bar, results_of(subject.call), after=" (in reused memory)")
        if outcome.problem is not None:
            return outcome
    with filled_by_torch():
        results = results_of(subject.call)
    return judged(bar, results, after=" (in memory that torch filled)")


def storage_bytes(tensor: Tensor) -> Tensor:
    """Copy a tensor's whole storage as bytes, including memory around and between its elements."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole.clone()


class Snapshot:
    """Bytes, version, shape and strides of some tensors, to be compared later."""

    def __init__(self, tensors: Sequence[tuple[str, Any]]) -> None:
        self.entries = [
            (name, tensor, storage_bytes(tensor), tensor._version, tensor.shape, tensor.stride())
            for name, tensor in tensors
            if isinstance(tensor, Tensor)
        ]

    def changed(self) -> str | None:
        """Return what has changed since, or None."""
        for name, tensor, before, version, shape, stride in self.entries:
            if tensor.shape != shape or tensor.stride() != stride:
                return f"{name} changed its shape or strides"
            if not torch.equal(storage_bytes(tensor), before):
                return f"{name} was written to"
            if tensor._version != version:
                return f"{name} was written to (its version counter moved)"
        return None


def inputs_stay_as_they_are(subject: Subject, trial: Trial) -> Outcome:
    if subject.op.mutates:
        return only_the_declared_change(subject, trial)
    named = list(zip(tensor_names(subject.op, trial.args), tensors_in(trial.args), strict=True))
    before = Snapshot(named)
    for _ in range(2):
        subject.call(*trial.args)
    problem = before.changed()
    if problem is not None or subject.op.gradient is None:
        return Outcome(problem)
    places = subject.differentiable(trial.args)
    upstream = subject.upstream(trial)
    names = upstream_names(subject.op, subject.expected(*trial.args))
    before = Snapshot([*named, *zip(names, upstream, strict=True)])
    with_gradients(subject.call, places, [*trial.args, upstream])
    changed = before.changed()
    return Outcome(None if changed is None else f"{changed} by the backward")


def only_the_declared_change(subject: Subject, trial: Trial) -> Outcome:
    """Check that a mutating operator changes no other argument and no memory around its own."""
    args = with_own_copies(subject.op, trial.args)
    tensors, names = tensors_in(args), tensor_names(subject.op, args)
    places = written_places(subject.op, args)
    others = Snapshot(
        [
            (name, tensor)
            for place, (name, tensor) in enumerate(zip(names, tensors, strict=True))
            if place not in places
        ]
    )
    surroundings = [memory_around(tensors[place]) for place in places]
    for _ in range(2):
        subject.public_named(*args)
    for place, before in zip(places, surroundings, strict=True):
        if not torch.equal(memory_around(tensors[place]), before):
            return Outcome(f"memory beside the elements of {names[place]} was written to")
    return Outcome(others.changed())


def memory_around(tensor: Tensor) -> Tensor:
    """Copy a tensor's storage as bytes, with the tensor's own elements set to zero."""
    copy = copy_of_storage(tensor.detach())
    copy.zero_()
    return storage_bytes(copy)


def repeated_calls_agree(subject: Subject, trial: Trial) -> Outcome:
    first = [storage_like(result) for result in subject.results(*trial.args)]
    for number in range(2, 5):
        again = [storage_like(result) for result in subject.results(*trial.args)]
        if not all(map(torch.equal, first, again)):
            return Outcome(f"call {number} on the same inputs gives other bits than the first")
    return Outcome()


def storage_like(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as bytes, so that NaN equals NaN and -0.0 differs from
    0.0."""
    # A tensor of one element counts as contiguous whatever its stride, so .view() alone would fail.
    return (
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        .copy_(tensor.detach())
        .reshape(-1)
        .as_strided((tensor.numel(),), (1,))
        .view(torch.uint8)
    )


def fresh_values_count(subject: Subject, trial: Trial) -> Outcome:
    """Check that new values in the same buffers are used.

    They are written through ``.data``, which does not change the version counter.
    """
    places = subject.differentiable(trial.args)
    upstream = None if subject.op.gradient is None else subject.upstream(trial)
    outcome = Outcome()
    for attempt in range(4):
        if upstream is not None:
            bar, results_of = call_bar(subject, trial, upstream)
            outcome = judged(bar, results_of(subject.call))
        if outcome.problem is None:
            outcome = judged(subject.bar(trial.args), subject.results(*trial.args))
        if outcome.problem is not None:
            seen = "" if attempt == 0 else " (new values in the same memory)"
            return Outcome(f"{outcome.problem}{seen}", outcome.ours_ulp, outcome.eager_ulp)
        for tensor in at(trial.args, places):
            _refill(tensor, trial.draw.below(1 << 16), one_element=attempt == 2)
        _redraw_integers(subject, trial)
    return outcome


def _redraw_integers(subject: Subject, trial: Trial) -> None:
    """Write other values into the memory of the integer tensors.

    Only the operator knows which values are valid, so it draws the whole case again, with the same
    shapes and other seeds.
    """
    again = subject.redrawn(trial)
    if again is None:
        return
    for tensor, fresh in zip(tensors_in(trial.args), tensors_in(again.args), strict=True):
        if not tensor.is_floating_point() and tensor.shape == fresh.shape:
            tensor.data.copy_(fresh)


def _refill(tensor: Tensor, seed: int, one_element: bool) -> None:
    """Write other values into a tensor's memory; with ``one_element``, change only one element."""
    if tensor.numel() == 0:
        return
    values = make_values("normal", tensor.shape, tensor.dtype, seed).to(tensor.device)
    if one_element:
        kept = tensor.detach().clone()
        place = seed % tensor.numel()
        kept.view(-1)[place] = values.view(-1)[place] + 3
        values = kept
    tensor.data.copy_(values)


def outputs_are_fresh(subject: Subject, trial: Trial) -> Outcome:
    first = subject.results(*trial.args)
    others = list(zip(tensor_names(subject.op, trial.args), tensors_in(trial.args), strict=True))
    for own, output in zip(output_names(subject.op), first, strict=True):
        for name, value in others:
            if _overlap(output, value):
                return Outcome(f"the {own} shares its memory with {name}")
        others.append((f"the {own}", output))
    held = list(map(storage_like, first))
    for tensor in at(trial.args, subject.differentiable(trial.args)):
        _refill(tensor, trial.draw.below(1 << 16), one_element=False)
    second = subject.results(*trial.args)
    if any(_overlap(one, other) for one in first for other in second):
        return Outcome("two calls return the same memory")
    if not all(map(torch.equal, held, map(storage_like, first))):
        return Outcome("a second call changed the first call's output")
    return Outcome()


def written_arguments_are_told(subject: Subject, trial: Trial) -> Outcome:
    """Check that the version counter of every overwritten argument increases, and that the first
    one is returned.

    Autograd then refuses a backward that saved the old values, instead of computing a wrong
    gradient.
    """
    args = with_own_copies(subject.op, trial.args)
    tensors, names = tensors_in(args), tensor_names(subject.op, args)
    places = written_places(subject.op, args)
    for _ in range(2):  # the second call may run a cached launch plan
        versions = [tensor._version for tensor in tensors]
        output = subject.public_named(*args)
        if tensors_in((output,))[0] is not tensors[places[0]]:
            return Outcome(f"does not return the argument {names[places[0]]} itself")
        for place in places:
            if tensors[place]._version <= versions[place]:
                return Outcome(f"writes over {names[place]}, whose version counter does not move")
    return Outcome()


def shared_memory_is_refused(subject: Subject, trial: Trial) -> Outcome:
    """Check that a tensor to overwrite is refused if its elements share memory.

    Which of its values remains would depend on the order of the threads.
    """
    args = with_own_copies(subject.op, trial.args)
    for place in written_places(subject.op, args):
        (tensor,) = at(args, [place])
        expanded = tensor[:1].expand(tensor.shape) if tensor.ndim and tensor.numel() else tensor
        if not overlaps_itself(expanded):
            continue
        try:
            subject.public_named(*filled(args, [place], [expanded]))
        except FuselabError:
            continue
        name = tensor_names(subject.op, args)[place]
        return Outcome(f"writes over an expanded {name}, whose elements share memory")
    return Outcome()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share a storage; empty storages never do."""
    first, second = one.untyped_storage(), other.untyped_storage()
    return first.nbytes() > 0 and second.nbytes() > 0 and first.data_ptr() == second.data_ptr()


def nothing_else_changes(subject: Subject, trial: Trial) -> Outcome:
    """Check that neither the import of the operator, nor a call, nor a backward changes the state
    of the process. What a call changes is given back, so that it spoils no other check."""
    by_import = changed_by_import(subject.op)
    if by_import:
        return Outcome(f"importing it changes {', '.join(by_import)}")
    before = ProcessState()
    try:
        subject.call(*trial.args)
        changed, by = before.changed(), "a call"
        if not changed and subject.op.gradient is not None:
            upstream = subject.upstream(trial)
            before, by = ProcessState(), "a backward"
            places = subject.differentiable(trial.args)
            with_gradients(subject.call, places, [*trial.args, upstream])
            changed = before.changed()
    finally:
        before.restore()
    return Outcome(f"{by} changes {', '.join(changed)}" if changed else None)


def _deterministic(subject: Subject) -> tuple[Verdict, str] | None:
    if subject.op.nondeterministic is None:
        return None
    return Verdict.SKIPPED, f"the operator says: {subject.op.nondeterministic}"


def _writes_over(subject: Subject) -> tuple[Verdict, str] | None:
    return None if subject.op.mutates else (Verdict.SKIPPED, "it writes over no argument")


def _returns_new(subject: Subject) -> tuple[Verdict, str] | None:
    return (Verdict.SKIPPED, "it writes over arguments") if subject.op.mutates else None


STATE_CHECKS = (
    # A call changes nothing outside.
    Check("global state", nothing_else_changes, quick=2, full=4),
)

CHECKS = (
    # Every element of the output is written.
    Check("written", output_is_written, full=16, max_numel=4096),
    # Every element of every gradient is written.
    Check(
        "gradients written",
        gradients_are_written,
        quick=4,
        full=12,
        max_numel=4096,
        applies=has_gradient,
    ),
    # Forward and backward write to no input.
    Check(
        "inputs unchanged",
        inputs_stay_as_they_are,
        layouts=LAYOUTS,
        values=VALUES,
        quick=8,
        max_numel=4096,
    ),
    # The same inputs give the same bits.
    Check("repeated", repeated_calls_agree, quick=4, full=12, applies=_deterministic),
    # Nothing is remembered from an earlier call.
    Check("fresh values", fresh_values_count, quick=4, full=12, max_numel=4096),
    # Outputs share no memory with inputs or earlier outputs.
    Check(
        "fresh outputs", outputs_are_fresh, quick=4, full=12, max_numel=4096, applies=_returns_new
    ),
    # Autograd hears of every argument that is written over.
    Check(
        "version counters",
        written_arguments_are_told,
        layouts=LAYOUTS,
        quick=4,
        full=12,
        max_numel=4096,
        applies=_writes_over,
    ),
    # A tensor to write over whose elements share memory is refused.
    Check("shared memory", shared_memory_is_refused, quick=4, max_numel=4096, applies=_writes_over),
)
