"""Arguments as the verbs handle them: tensors stand alone or in sequences, and some are written to.

A tensor's *place* is its index among all tensors of the arguments, in order, those of a sequence
one by one: ``fuselab.op.tensors_in``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp, tensors_in


def mapped(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """``function`` of every value; of a list or tuple, of every item, as a tuple."""
    return [
        tuple(map(function, value)) if isinstance(value, (list, tuple)) else function(value)
        for value in values
    ]


def at(values: Sequence[Any], places: Sequence[int]) -> list[Tensor]:
    """The tensors at ``places``."""
    tensors = tensors_in(values)
    return [tensors[place] for place in places]


def filled(values: Sequence[Any], places: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    """``values`` with ``tensors`` at ``places``."""
    others = dict(zip(places, tensors, strict=True))
    count = iter(range(len(tensors_in(values))))

    def chosen(value: Any) -> Any:
        return others.get(next(count), value) if isinstance(value, Tensor) else value

    return mapped(chosen, values)


def tensor_names(op: FusedOp, args: Sequence[Any]) -> list[str]:
    """What to call the tensor at each place: ``bias``, or ``tables[2]``."""
    names = []
    for name, value in zip(op.signature.parameters, args, strict=True):
        if isinstance(value, Tensor):
            names.append(name)
        elif isinstance(value, (list, tuple)):
            count = len(tensors_in(value))
            names += [f"{name}[{number}]" for number in range(count)]
    return names


def differentiable(op: FusedOp, args: Sequence[Any]) -> list[int]:
    """Places of the floating tensors that may have a gradient: not those of frozen arguments."""
    frozen = op.gradient.frozen if op.gradient is not None else {}
    return [
        place
        for place, (name, tensor) in enumerate(
            zip(tensor_names(op, args), tensors_in(args), strict=True)
        )
        if tensor.is_floating_point() and name.partition("[")[0] not in frozen
    ]


def needed(op: FusedOp, args: Sequence[Any]) -> list[bool]:
    """``needs`` of a backward that gives every gradient: one flag per tensor of each tensor
    parameter, False for one that is None."""
    places = differentiable(op, args)
    count = iter(range(len(tensors_in(args))))
    needs = []
    for name, value in zip(op.signature.parameters, args, strict=True):
        if name in op.tensor_parameters:
            tensors = tensors_in((value,))
            needs += [next(count) in places for _ in tensors] if value is not None else [False]
    return needs


def written_places(op: FusedOp, args: Sequence[Any]) -> list[int]:
    """Places of the tensors that the operator writes over."""
    names = tensor_names(op, args)
    return [place for place, name in enumerate(names) if name.partition("[")[0] in op.mutates]


def with_own_copies(op: FusedOp, args: Sequence[Any]) -> list[Any]:
    """``args`` with a copy of its own of every tensor that the operator writes over."""
    places = written_places(op, args)
    return filled(args, places, [copy_of_storage(tensor) for tensor in at(args, places)])


def copy_of_storage(tensor: Tensor) -> Tensor:
    """A tensor in a copy of the storage: the same values, strides, offset and memory around the
    elements, and a leaf that needs a gradient if ``tensor`` does."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = whole.set_(tensor.untyped_storage()).clone().untyped_storage()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two of its elements share memory by a stride of 0."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
