"""Memory shared by tensors: refused if one of them is written, copied if a result must be new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fuselab.errors import OverlapError
from fuselab.op import FusedOp, tensors_in

Result = TypeVar("Result", Tensor, Tensor | None)


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


def unshared(results: Sequence[Result], arguments: Sequence[Any]) -> tuple[Result, ...]:
    """Return ``results``, with a copy of each tensor that shares memory with an argument or with a
    result before it: a raw operator returns new tensors."""
    # PyTorch keeps one Python object per storage, for fake tensors too, which have no address.
    taken = [tensor.untyped_storage() for tensor in tensors_in(arguments)]
    fresh: list[Result] = []
    for result in results:
        if result is not None and any(result.untyped_storage() is storage for storage in taken):
            result = result.clone()
        if result is not None:
            taken.append(result.untyped_storage())
        fresh.append(result)
    return tuple(fresh)


def unlike(results: Sequence[Result], arguments: Sequence[Any]) -> tuple[Result, ...]:
    """Return ``results``, with a copy of each tensor that shares memory with an argument: the
    gradient of a bias of one row is the upstream gradient, and a raw operator returns none of its
    arguments. Results may share memory with each other."""
    taken = [tensor.untyped_storage() for tensor in tensors_in(arguments)]
    return tuple(
        result
        if result is None or not any(result.untyped_storage() is storage for storage in taken)
        else result.clone()
        for result in results
    )
