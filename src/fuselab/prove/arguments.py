"""Arguments as the verbs handle them: single tensors or sequences of them, some written to.

A tensor's *place* is its index among all tensors of the arguments, in the order of
``fuselab.op.tensors_in``; each tensor of a sequence has its own place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove.facts import Declared


def mapped(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Apply ``function`` to every value; a list or tuple becomes the tuple of its items'
    results."""
    return [
        tuple(map(function, value)) if isinstance(value, (list, tuple)) else function(value)
        for value in values
    ]


def at(values: Sequence[Any], places: Sequence[int]) -> list[Tensor]:
    """Return the tensors at ``places``."""
    tensors = tensors_in(values)
    return [tensors[place] for place in places]


def filled(values: Sequence[Any], places: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    """Return ``values`` with ``tensors`` put at ``places``."""
    others = dict(zip(places, tensors, strict=True))
    count = iter(range(len(tensors_in(values))))

    def chosen(value: Any) -> Any:
        return others.get(next(count), value) if isinstance(value, Tensor) else value

    return mapped(chosen, values)


def moved_towards_middle(args: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return arguments with other values at ``places``, each between its own and 0.5.

    This keeps the order of values, and probabilities stay probabilities.
    """
    return filled(args, places, [one.detach() * 0.75 + 0.125 for one in at(args, places)])


def tensor_names(op: Declared, args: Sequence[Any]) -> list[str]:
    """Return the name of the tensor at each place, such as ``bias`` or ``tables[2]``."""
    names = []
    for name, value in zip(op.parameters, args, strict=True):
        if isinstance(value, Tensor):
            names.append(name)
        elif isinstance(value, (list, tuple)):
            count = len(tensors_in(value))
            names += [f"{name}[{number}]" for number in range(count)]
    return names


def differentiable(op: Declared, args: Sequence[Any]) -> list[int]:
    """Return the places of the floating tensors that may have a gradient, which those of frozen
    arguments may not."""
    frozen = op.gradient.frozen if op.gradient is not None else {}
    return [
        place
        for place, (name, tensor) in enumerate(
            zip(tensor_names(op, args), tensors_in(args), strict=True)
        )
        if tensor.is_floating_point() and name.partition("[")[0] not in frozen
    ]


def needed(op: Declared, args: Sequence[Any]) -> list[bool]:
    """Return ``needs`` for a backward that computes every gradient: one flag per tensor of each
    tensor parameter, False for a parameter that is None."""
    constant = () if op.gradient is None else op.gradient.non_differentiable
    places = differentiable(op, args)
    count = iter(range(len(tensors_in(args))))
    needs = []
    for name, value in zip(op.parameters, args, strict=True):
        if name in op.tensor_parameters:
            tensors = tensors_in((value,))
            asked = [next(count) in places and name not in constant for _ in tensors]
            needs += asked if value is not None else [False]
    return needs


def written_places(op: Declared, args: Sequence[Any]) -> list[int]:
    """Return the places of the tensors that the operator overwrites."""
    names = tensor_names(op, args)
    return [place for place, name in enumerate(names) if name.partition("[")[0] in op.mutates]


def with_own_copies(op: Declared, args: Sequence[Any]) -> list[Any]:
    """Return ``args`` with every tensor that the operator overwrites replaced by its own copy."""
    places = written_places(op, args)
    known: Storages = {}
    return filled(args, places, [copy_of_storage(tensor, known) for tensor in at(args, places)])


Storages = dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]  # a storage and its copy


def copy_of_storage(tensor: Tensor, known: Storages | None = None) -> Tensor:
    """Copy a tensor together with its storage.

    The copy has the same values, strides, offset and surrounding memory; it is a leaf that needs a
    gradient if ``tensor`` does. Tensors in one storage, as the tables of a model in one buffer, are
    copied into one where the calls share ``known``.
    """
    original = tensor.untyped_storage()
    known = {} if known is None else known
    if original._cdata not in known:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        known[original._cdata] = original, whole.set_(original).clone().untyped_storage()
    _, storage = known[original._cdata]
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)
