"""Procedures for a candidate's process: what a call does to memory and to global state.

What only that process can see, such as version counters and shared storages, is its own word; bytes
that it sends back are compared by the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import FuselabError
from fuselab.op import tensors_in
from fuselab.prove.arguments import (
    Storages,
    at,
    copy_of_storage,
    filled,
    tensor_names,
    with_own_copies,
    written_places,
)
from fuselab.prove.asked_calls import as_leaves, with_gradients
from fuselab.prove.held import Held, results
from fuselab.prove.load import changed_by_import
from fuselab.prove.outputs import output_names, outputs_in, pulled_back
from fuselab.prove.process_state import ProcessState
from fuselab.runtime.dispatch.overlap import overlaps_itself

_SHARED = 3  # tensors that two forwards have in common, one after the other
# Of the errors that autograd raises where a saved tensor, or an output that is a view, was written.
_NOTICED = ("modified by an inplace operation", "has been modified inplace")


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


def named_tensors(held: Held, args: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """Return every tensor among the arguments with its name."""
    return list(zip(tensor_names(held.op, args), tensors_in(args), strict=True))


def arguments_after(
    held: Held, procedure: Callable[..., Any], times: int, *args: Any
) -> dict[str, Any]:
    """Return the tensors among ``args`` after ``times`` runs of a procedure, with their memory, and
    which of their version counters moved."""
    tensors = _all_tensors(args)
    versions = [tensor._version for tensor in tensors]
    for _ in range(times):
        procedure(held, *args)
    moved = [tensor._version != version for tensor, version in zip(tensors, versions, strict=True)]
    return {"tensors": tensors, "moved": moved}


def marks_left(
    held: Held, places: Sequence[int], args: Sequence[Any], upstream: Sequence[Tensor] | None
) -> str | None:
    """Return what a call, or a backward where there is an ``upstream`` gradient, leaves on the
    tensors that it was given, beside what their elements are; None if it leaves nothing."""
    leaves = as_leaves(args, places)
    tensors = named_tensors(held, leaves)
    tensors += [("an upstream gradient", one) for one in upstream or ()]
    before = [_marks(tensor) for _, tensor in tensors]
    outputs = outputs_in(held(*leaves))
    problem = _new_mark(tensors, before, "a call")
    if problem is None and upstream is not None:
        pulled_back(outputs, at(leaves, places), upstream)
        problem = _new_mark(tensors, before, "a backward")
    return problem


def _marks(tensor: Tensor) -> dict[str, Any]:
    """Return what a tensor carries beside its elements, under the words that tell of a change."""
    return {
        "lies in other memory": tensor.data_ptr(),
        "needs a gradient or no longer does": tensor.requires_grad,
        "has a gradient": tensor.grad is None,
        "is the result of an operator": tensor.is_leaf,
        "has another hook": [
            list(getattr(tensor, name) or ())
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ],
        "has another attribute": sorted(vars(tensor)),
    }


def _new_mark(
    tensors: Sequence[tuple[str, Tensor]], before: Sequence[dict[str, Any]], by: str
) -> str | None:
    for (name, tensor), marks in zip(tensors, before, strict=True):
        for words, now in _marks(tensor).items():
            if now != marks[words]:
                return f"{name} {words} after {by}"
    return None


def _all_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _all_tensors(item)]
    return []


def written_over(held: Held, times: int, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among copies of the arguments, with their memory, after calls of the
    public function that write over them."""
    args = with_own_copies(held.op, args)
    for _ in range(times):
        held.public(*args)
    return list(tensors_in(args))


def refuses(held: Held, args: Sequence[Any]) -> bool:
    """Return whether the public function refuses arguments with a typed error."""
    try:
        held.public(*args)
    except FuselabError:
        return True
    return False


def version_problem(held: Held, args: Sequence[Any]) -> str | None:
    """Return what is wrong with how a call tells autograd of the arguments that it writes over."""
    args = with_own_copies(held.op, args)
    tensors, names = tensors_in(args), tensor_names(held.op, args)
    places = written_places(held.op, args)
    for _ in range(2):  # the second call may run a cached launch plan
        versions = [tensor._version for tensor in tensors]
        output = held.public(*args)
        if tensors_in((output,))[0] is not tensors[places[0]]:
            return f"does not return the argument {names[places[0]]} itself"
        for place in places:
            if tensors[place]._version <= versions[place]:
                return f"writes over {names[place]}, whose version counter does not move"
    return None


def shareable(tensor: Tensor) -> Tensor | None:
    """Return the tensor with its first slice repeated, or None where its elements then share no
    memory."""
    expanded = tensor[:1].expand(tensor.shape) if tensor.ndim and tensor.numel() else tensor
    return expanded if overlaps_itself(expanded) else None


def two_calls(held: Held, args: Sequence[Any], fresh: Sequence[Tensor | None]) -> dict[str, Any]:
    """Make a call, write ``fresh`` values into the arguments' memory, and make a second one.

    Returns the first call's outputs as they were before the second one and as they are after it,
    and which memory is shared, if any is.
    """
    first = results(held, *args)
    problem = None
    others = named_tensors(held, args)
    for own, output in zip(output_names(held.op), first, strict=True):
        for name, value in others:
            if _overlap(output, value):
                problem = problem or f"the {own} shares its memory with {name}"
        others.append((f"the {own}", output))
    before = [output.detach().clone() for output in first]
    for tensor, values in zip(tensors_in(args), fresh, strict=True):
        if values is not None:
            tensor.data.copy_(values)
    second = results(held, *args)
    if any(_overlap(one, other) for one in first for other in second):
        problem = problem or "two calls return the same memory"
    return {"problem": problem, "before": before, "after": [one.detach() for one in first]}


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share a storage; empty storages never do."""
    first, second = one.untyped_storage(), other.untyped_storage()
    return first.nbytes() > 0 and second.nbytes() > 0 and first.data_ptr() == second.data_ptr()


def several_backwards(
    held: Held,
    places: Sequence[int],
    args: Sequence[Any],
    others: Sequence[Any],
    upstream: Sequence[Tensor],
) -> dict[str, Any]:
    """Return the gradients of three backward calls and more with ``retain_graph``, and what they
    changed of the saved tensors, arguments and outputs.

    Before the third one a forward runs on ``others``, arguments of the same shapes, as a second
    micro-batch, or a layer that is used twice, makes it. Where several tensors have a gradient,
    one more follows for each of the first of them: after a forward on that tensor and ``others``
    besides, as two layers that have one input make it.
    """
    op = held.op
    leaves = as_leaves(args, places)
    outputs = results(held, *leaves)
    nodes = dict.fromkeys(output.grad_fn for output in outputs)
    saved = [tensor for node in nodes for tensor in getattr(node, "saved_tensors", ())]
    watched = Snapshot(
        [
            *((f"saved tensor {place}", tensor) for place, tensor in enumerate(saved)),
            *named_tensors(held, leaves),
            *((f"the {name}", one) for name, one in zip(output_names(op), outputs, strict=True)),
        ]
    )
    inputs = at(leaves, places)
    runs: list[list[Tensor | None]] = []
    shared = places[:_SHARED] if len(places) > 1 else []
    for number in range(3 + len(shared)):
        if number >= 2:
            given = as_leaves(others, places)
            kept = shared[number - 3 : number - 2] if number > 2 else []
            results(held, *filled(given, kept, at(leaves, kept)))
        grads = pulled_back(outputs, inputs, upstream, retain_graph=True)
        runs.append([None if grad is None else grad.detach().clone() for grad in grads])
        changed = watched.changed()
        if changed is not None:
            return {"changed": f"{changed} by the backward", "runs": []}
    return {"changed": None, "runs": runs}


def gradients_after_write(
    function: Callable[..., Any],
    place: int,
    fresh: Tensor,
    places: Sequence[int],
    values: Sequence[Any],
) -> list[Tensor | None] | None:
    """Return the gradients of a call after which ``fresh`` values were written into one tensor,
    before the backward; None where autograd refuses the backward because of it.

    ``place`` counts the tensors among the arguments and then the outputs. The version counter of
    the tensor moves, as by any operator that works in place.
    """
    *args, upstream = values
    known: Storages = {}
    own = [copy_of_storage(tensor.detach(), known) for tensor in tensors_in(args)]
    leaves = as_leaves(filled(args, range(len(own)), own), places)
    outputs = outputs_in(function(*leaves))
    try:
        (*tensors_in(leaves), *outputs)[place].detach().copy_(fresh)
        return list(pulled_back(outputs, at(leaves, places), upstream))
    except RuntimeError as error:
        if any(text in str(error) for text in _NOTICED):
            return None
        raise


def changed_state(
    held: Held, args: Sequence[Any], places: Sequence[int], upstream: Sequence[Tensor] | None
) -> dict[str, Any]:
    """Return which state of the process the import of the operator, a call, or a backward where
    there is an ``upstream`` gradient, changes (``changed``, None if nothing does), and what the
    call and the backward gave (``results``), which may be the first ones of this process.

    What changed is given back, so that it spoils no other check.
    """
    by_import = changed_by_import(held.op)
    if by_import:
        return {"changed": f"importing it changes {', '.join(by_import)}", "results": []}
    before, by = ProcessState(), "a call"
    try:
        found: list[list[Tensor | None]] = [[*results(held, *args)]]
        changed = before.changed()
        if not changed and upstream is not None:
            before, by = ProcessState(), "a backward"
            found.append(with_gradients(held, places, [*args, tuple(upstream)]))
            changed = before.changed()
    finally:
        before.restore()
    text = f"{by} changes {', '.join(changed)}" if changed else None
    return {"changed": text, "results": found}
