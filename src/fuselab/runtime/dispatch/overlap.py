"""Memory shared by tensors: refused if one of them is written, copied if a result must be new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import OverlapError
from fuselab.op import FusedOp, tensors_in


def refuse_overlap(op: FusedOp, args: Sequence[Any]) -> None:
    """Raise if an argument to be written over shares memory with itself or another tensor.

    Two tensors count as overlapping if the ranges of their addresses overlap.

    Raises:
        OverlapError: names the operator and says what to do.
    """
    mutated = op.mutated(args)
    for tensor in mutated:
        if overlaps_itself(tensor):
            raise OverlapError(
                f"{op.short_name}: it cannot write over a tensor whose elements share memory "
                f"(shape {tuple(tensor.shape)}, strides {tensor.stride()}); clone it first."
            )
    written = set(map(id, mutated))
    ranges = [
        (tensor.data_ptr(), id(tensor) in written, _span(tensor))
        for tensor in tensors_in(args)
        if tensor.numel()
    ]
    ranges.sort()
    end, end_written = 0, 0  # of all ranges so far, and of those that are written
    for begin, is_written, span in ranges:
        if begin < (end if is_written else end_written):
            raise OverlapError(
                f"{op.short_name}: it cannot write over memory that another of its arguments "
                "lies in; clone one of them first."
            )
        end = max(end, begin + span)
        if is_written:
            end_written = max(end_written, begin + span)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements of the tensor share memory because a dimension has stride 0."""
    return not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def lies_in_memory(tensor: Tensor) -> bool:
    """Return whether address and strides tell which bytes a tensor has. They do not for sparse,
    nested, meta or fake tensors, for which no plan is kept."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested)
    )


def _span(tensor: Tensor) -> int:
    """Return the bytes from the first to the last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def not_aliased(output: Tensor, arguments: Sequence[Any]) -> Tensor:
    """Return ``output``, copied if it is a view of an argument; raw operators return new ones."""
    for value in arguments:
        if isinstance(value, Tensor) and (
            output is value or (output._is_view() and output._base is value)
        ):
            return output.clone()
    return output


def unshared(grads: Sequence[Tensor | None], arguments: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Return ``grads``, with a copy of each that shares memory with an argument or another one."""
    taken = {tensor.untyped_storage()._cdata for tensor in tensors_in(arguments)}
    fresh: list[Tensor | None] = []
    for grad in grads:
        if grad is not None and grad.untyped_storage()._cdata in taken:
            grad = grad.clone()
        if grad is not None:
            taken.add(grad.untyped_storage()._cdata)
        fresh.append(grad)
    return tuple(fresh)
