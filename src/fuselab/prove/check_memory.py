"""Checks of a call's effects on memory: outputs written, inputs unchanged, nothing remembered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove import asked_memory
from fuselab.prove.arguments import (
    at,
    copy_of_storage,
    filled,
    mapped,
    tensor_names,
    written_places,
)
from fuselab.prove.asked_calls import (
    Block,
    in_memory_that_torch_fills,
    in_poisoned_memory,
    in_used_memory,
    repeated,
    with_fresh_values,
    with_gradients,
)
from fuselab.prove.asked_memory import shareable, storage_bytes
from fuselab.prove.draw import LAYOUTS, VALUES, make_values
from fuselab.prove.held import results
from fuselab.prove.outputs import upstream_names
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, call_bar, has_gradient, judged


def output_is_written(subject: Subject, trial: Trial) -> Outcome:
    bar, ask = subject.bar(trial.args), subject.candidate.ask
    blocks = _blocks(bar.eager)
    for poison in (math.nan, 7.0):
        found = ask(in_poisoned_memory, poison, list(trial.args))
        outcome = judged(bar, found, after=" (in memory poisoned before)")
        if outcome.problem is not None:
            return outcome
        # The second call of the public function may run a cached launch plan.
        for _ in range(2):
            found = ask(in_used_memory, poison, blocks, subject.device, results, *trial.args)
            outcome = judged(bar, found, after=" (in memory used before)")
            if outcome.problem is not None:
                return outcome
    found = ask(in_memory_that_torch_fills, results, *trial.args)
    return judged(bar, found, after=" (in memory that torch filled)")


def gradients_are_written(subject: Subject, trial: Trial) -> Outcome:
    bar, asked = call_bar(subject, trial)
    ask, blocks = subject.candidate.ask, _blocks(bar.eager)
    for _ in range(2):
        found = ask(in_used_memory, math.nan, blocks, subject.device, *asked)
        outcome = judged(bar, found, after=" (in reused memory)")
        if outcome.problem is not None:
            return outcome
    found = ask(in_memory_that_torch_fills, *asked)
    return judged(bar, found, after=" (in memory that torch filled)")


def _blocks(results: Sequence[Tensor | None]) -> list[Block]:
    return [(tuple(one.shape), one.dtype) for one in results if one is not None]


def inputs_stay_as_they_are(subject: Subject, trial: Trial) -> Outcome:
    if subject.op.mutates:
        return only_the_declared_change(subject, trial)
    tensors, names = tensors_in(trial.args), tensor_names(subject.op, trial.args)
    ask, args = subject.candidate.ask, list(trial.args)
    problem = _changed(subject, tensors, names, results, 2, *trial.args)
    if problem is not None:
        return Outcome(problem)
    if subject.op.gradient is None:
        return Outcome(ask(asked_memory.marks_left, [], args, None))
    places, upstream = subject.differentiable(trial.args), subject.upstream(trial)
    problem = ask(asked_memory.marks_left, places, args, upstream)
    if problem is not None:
        return Outcome(problem)
    names = [*names, *upstream_names(subject.op, subject.expected(*trial.args))]
    values = [*trial.args, upstream]
    changed = _changed(subject, [*tensors, *upstream], names, with_gradients, 1, places, values)
    return Outcome(None if changed is None else f"{changed} by the backward")


def _changed(
    subject: Subject,
    tensors: Sequence[Tensor],
    names: Sequence[str],
    procedure: Any,
    times: int,
    *args: Any,
) -> str | None:
    """Return which of the tensors among ``args`` the candidate writes to when it runs a procedure,
    or None. Their bytes are compared here."""
    before = [(storage_bytes(one), one.shape, one.stride()) for one in tensors]
    after = subject.candidate.ask(asked_memory.arguments_after, procedure, times, *args)
    found = zip(names, before, after["tensors"], after["moved"], strict=True)
    for name, (content, shape, stride), tensor, moved in found:
        if tensor.shape != shape or tensor.stride() != stride:
            return f"{name} changed its shape or strides"
        if not torch.equal(storage_bytes(tensor), content):
            return f"{name} was written to"
        if moved:
            return f"{name} was written to (its version counter moved)"
    return None


def only_the_declared_change(subject: Subject, trial: Trial) -> Outcome:
    """Check that a mutating operator changes no other argument and no memory around its own."""
    places = set(written_places(subject.op, trial.args))
    names, tensors = tensor_names(subject.op, trial.args), tensors_in(trial.args)
    # A candidate in this process has the same tensors, so that what they hold is read before.
    read = [memory_around if place in places else storage_bytes for place in range(len(tensors))]
    before = [reader(tensor) for reader, tensor in zip(read, tensors, strict=True)]
    after = subject.candidate.ask(asked_memory.written_over, 2, list(trial.args))
    for place, (name, content, now) in enumerate(zip(names, before, after, strict=True)):
        if torch.equal(content, read[place](now)):
            continue
        if place in places:
            return Outcome(f"memory beside the elements of {name} was written to")
        return Outcome(f"{name} was written to")
    return Outcome()


def memory_around(tensor: Tensor) -> Tensor:
    """Copy a tensor's storage as bytes, with the tensor's own elements set to zero."""
    copy = copy_of_storage(tensor.detach())
    copy.zero_()
    return storage_bytes(copy)


def repeated_calls_agree(subject: Subject, trial: Trial) -> Outcome:
    first, *others = subject.candidate.ask(repeated, 4, list(trial.args))
    for number, again in enumerate(others, 2):
        if not same_bits(first, again):
            return Outcome(f"call {number} on the same inputs gives other bits than the first")
    return Outcome()


def same_bits(ones: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """Return whether two lists of results are the same, bit for bit."""
    return all(
        (one is None) == (other is None)
        and (one is None or other is None or torch.equal(storage_like(one), storage_like(other)))
        for one, other in zip(ones, others, strict=True)
    )


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
    places = subject.differentiable(trial.args) if subject.op.gradient is not None else []
    upstream = subject.upstream(trial) if places else ()
    # The candidate's own copies are written to, in one process as in two.
    given = mapped(_own, trial.args)
    states, steps = [given], []
    for attempt in range(3):
        fresh = _fresh_values(subject, trial, states[-1], one_element=attempt == 2)
        steps.append(fresh)
        states.append(_replaced(states[-1], fresh))
    bars = [subject.bar(args) for args in states]
    gradient_bars = bars
    if places:
        gradient_bars = [
            call_bar(subject, replace(trial, args=tuple(args)), upstream)[0] for args in states
        ]
    values = [*mapped(_own, given), upstream]
    found = subject.candidate.ask(with_fresh_values, steps, places, values)
    outcome = Outcome()
    for attempt, (bar, gradient_bar, given_back) in enumerate(
        zip(bars, gradient_bars, found, strict=True)
    ):
        count = len(bar.names)
        outcome = judged(bar, given_back[:count])
        if outcome.problem is None and places:
            outcome = judged(gradient_bar, given_back[count:])
        if outcome.problem is not None:
            seen = "" if attempt == 0 else " (new values in the same memory)"
            return Outcome(f"{outcome.problem}{seen}", outcome.ours_ulp, outcome.eager_ulp)
    return outcome


_MANY = 128  # elements from which on a kernel may look at some of them to know the inputs again


def near_values_count(subject: Subject, trial: Trial) -> Outcome:
    """Check that one other element, or two that change places, make a difference, and so does one
    other element of each tensor alone.

    A result that is kept for inputs with an equal sum, or with some equal elements, or for one of
    the arguments, shows here.
    """
    tensors = tensors_in(trial.args)
    places = subject.differentiable(trial.args)
    place = max(places, key=lambda place: tensors[place].numel(), default=None)
    if place is None or tensors[place].numel() < _MANY:
        return Outcome(untried=True)
    chance = torch.Generator().manual_seed(trial.draw.below(1 << 16))
    states, steps = [mapped(_own, trial.args)], []
    for is_swap in (False, True, False, True, False):
        near = _near(at(states[-1], [place])[0], chance, is_swap)
        steps.append([near if place == one else None for one in range(len(tensors))])
        states.append(filled(states[-1], [place], [near]))
    for other in places:
        if other != place and tensors[other].numel() > 1:
            near = _near(at(states[-1], [other])[0], chance, False)
            steps.append([near if other == one else None for one in range(len(tensors))])
            states.append(filled(states[-1], [other], [near]))
    upstream = () if subject.op.gradient is None else subject.upstream(trial)
    judges = [
        subject.bar(args)
        if not upstream
        else call_bar(subject, replace(trial, args=tuple(args)), upstream)[0]
        for args in states
    ]
    values = [*states[0], upstream]
    found = subject.candidate.ask(with_fresh_values, steps, places if upstream else [], values)
    for number, (bar, given) in enumerate(zip(judges, found, strict=True)):
        outcome = judged(bar, given[-len(bar.names) :])
        if outcome.problem is not None:
            how = ("", " (one element is another)", " (two elements changed places)")
            changed = number and (2 - number % 2 if number <= 5 else 1)
            return replace(outcome, problem=outcome.problem + how[changed])
    return Outcome()


def _near(tensor: Tensor, chance: torch.Generator, is_swap: bool) -> Tensor:
    """Return a copy in which one element is another, or two changed places."""
    near = tensor.detach().clone(memory_format=torch.contiguous_format)
    one, other = torch.randperm(near.numel(), generator=chance)[:2].tolist()
    flat = near.view(-1)
    if is_swap:
        flat[[one, other]] = flat[[other, one]]
    else:
        flat[one] = 1.5 - flat[one]
    return near


def _own(value: Any) -> Any:
    return copy_of_storage(value) if isinstance(value, Tensor) else value


def _replaced(args: Sequence[Any], fresh: Sequence[Tensor | None]) -> list[Any]:
    """Return the arguments with ``fresh`` values where there are some."""
    known = [place for place, values in enumerate(fresh) if values is not None]
    return filled(args, known, [values for values in fresh if values is not None])


def _fresh_values(
    subject: Subject, trial: Trial, args: Sequence[Any], one_element: bool
) -> list[Tensor | None]:
    """Return other values for each tensor of the arguments, None for one that stays.

    With ``one_element`` a floating tensor changes in one element. Only the operator knows which
    integers are valid, so it draws the whole case again, with the same shapes and other seeds.
    """
    tensors = tensors_in(args)
    fresh: list[Tensor | None] = [None] * len(tensors)
    for place in subject.differentiable(args):
        if tensors[place].numel():
            fresh[place] = _other_values(tensors[place], trial.draw.below(1 << 16), one_element)
    again = subject.redrawn(trial)
    for place, other in enumerate(() if again is None else tensors_in(again.args)):
        if not other.is_floating_point() and tensors[place].shape == other.shape:
            fresh[place] = other
    return fresh


def _other_values(tensor: Tensor, seed: int, one_element: bool) -> Tensor:
    """Return other values for a tensor; with ``one_element``, only one differs."""
    values = make_values("normal", tensor.shape, tensor.dtype, seed).to(tensor.device)
    if not one_element:
        return values
    kept = tensor.detach().clone(memory_format=torch.contiguous_format)
    place = seed % tensor.numel()
    kept.view(-1)[place] = values.view(-1)[place] + 3
    return kept


def outputs_are_fresh(subject: Subject, trial: Trial) -> Outcome:
    fresh: list[Tensor | None] = [None] * len(tensors_in(trial.args))
    for place in subject.differentiable(trial.args):
        (tensor,) = at(trial.args, [place])
        if tensor.numel():
            fresh[place] = _other_values(tensor, trial.draw.below(1 << 16), one_element=False)
    given = mapped(_own, trial.args)
    found = subject.candidate.ask(asked_memory.two_calls, given, fresh)
    if found["problem"] is not None:
        return Outcome(found["problem"])
    if not same_bits(found["before"], found["after"]):
        return Outcome("a second call changed the first call's output")
    return Outcome()


def written_arguments_are_told(subject: Subject, trial: Trial) -> Outcome:
    """Check that the version counter of every overwritten argument increases, and that the first
    one is returned.

    Autograd then refuses a backward that saved the old values, instead of computing a wrong
    gradient.
    """
    return Outcome(subject.candidate.ask(asked_memory.version_problem, list(trial.args)))


def shared_memory_is_refused(subject: Subject, trial: Trial) -> Outcome:
    """Check that a tensor to overwrite is refused if its elements share memory.

    Which of its values remains would depend on the order of the threads.
    """
    for place in written_places(subject.op, trial.args):
        args = mapped(_own, trial.args)
        (tensor,) = at(args, [place])
        expanded = shareable(tensor)
        if expanded is None:
            continue
        given = filled(args, [place], [expanded])
        if not subject.candidate.ask(asked_memory.refuses, given):
            name = tensor_names(subject.op, args)[place]
            return Outcome(f"writes over an expanded {name}, whose elements share memory")
    return Outcome()


def nothing_else_changes(subject: Subject, trial: Trial) -> Outcome:
    """Check that neither the import of the operator, nor a call, nor a backward changes the state
    of the process, and judge what they give: no call has come before the first trial's.

    What later calls on the same inputs give wrong, too, is a fault of values, and no state.
    """
    places = subject.differentiable(trial.args)
    upstream = None if subject.op.gradient is None else subject.upstream(trial)
    ask = subject.candidate.ask
    found = ask(asked_memory.changed_state, list(trial.args), places, upstream)
    outcome = Outcome(found["changed"])
    for given in found["results"]:
        if outcome.problem is None:
            is_backward = len(given) > len(subject.result_names(trial.args))
            bar = call_bar(subject, trial, upstream)[0] if is_backward else subject.bar(trial.args)
            outcome = judged(bar, given, after=" of the first calls")
            if outcome.problem is not None:
                values = [*trial.args, upstream]
                asked = (with_gradients, places, values) if is_backward else (results, *trial.args)
                later = judged(bar, ask(*asked))
                heading = "gradients" if is_backward else "shapes"
                outcome = outcome if later.problem is None else replace(later, heading=heading)
    return outcome


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
        quick=12,
        max_numel=4096,
        turns=True,
    ),
    # The same inputs give the same bits.
    Check("repeated", repeated_calls_agree, quick=4, full=12, applies=_deterministic),
    # Nothing is remembered from an earlier call.
    Check("fresh values", fresh_values_count, quick=4, full=12, max_numel=4096),
    # Nor from one on inputs that differ in an element, or in the order of two.
    Check(
        "near values",
        near_values_count,
        repeats=True,
        quick=2,
        full=8,
        max_numel=1024,
        non_empty=True,
        least_numel=_MANY,
        shrink_tries=8,
    ),
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
