"""Vocabulary look-up in plain PyTorch, and the tensors that make a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fuselab.errors import ArgumentError


class Vocabulary(NamedTuple):
    """The ids of every column, sorted for binary search: three tensors to register as buffers.

    ``sorted_keys`` int64 [K]: the ids of all columns in turn, ascending within a column. ``slots``
    int64 [K]: the index of each in its column's vocabulary. ``offsets`` int64 [columns + 1]: the
    keys of column t are at places ``offsets[t]`` to ``offsets[t + 1]``.
    """

    sorted_keys: Tensor
    slots: Tensor
    offsets: Tensor


def vocabulary(columns: Sequence[Sequence[int] | Tensor]) -> Vocabulary:
    """Return the vocabulary whose column t maps ``columns[t][i]`` to the index i.

    Raises:
        ArgumentError: a column contains an id twice.
    """
    keys, slots, offsets = [], [], [0]
    for column, ids in enumerate(columns):
        sorted_ids, order = torch.as_tensor(ids, dtype=torch.int64).cpu().sort()
        twice = (sorted_ids[1:] == sorted_ids[:-1]).nonzero()
        if len(twice):
            raise ArgumentError(
                f"vocabulary: 'columns' has the id {int(sorted_ids[twice[0]])} twice in column "
                f"{column}; give every id once."
            )
        keys.append(sorted_ids)
        slots.append(order)
        offsets.append(offsets[-1] + len(sorted_ids))
    none = torch.empty(0, dtype=torch.int64)
    return Vocabulary(torch.cat([none, *keys]), torch.cat([none, *slots]), torch.tensor(offsets))


def vocabulary_indices(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    """Return the index of every id in its column's vocabulary, ``len(vocabulary)`` if unknown.

    An unknown id never shares the slot of a known one: a table for column t has one row more than
    the vocabulary has ids, and its last row is for unknown ids. The search is binary, so its cost
    grows with the logarithm of the vocabulary's size.

    Args:
        ids: (samples, columns), int64 or int32, any strides.
        sorted_keys, slots, offsets: a ``Vocabulary``, int64, contiguous, on the same device, from
            ``vocabulary(columns)``. Tensors that are no such vocabulary give undefined indices,
            because checking would synchronise. ``offsets`` beyond the keys are an error on the CPU.

    Returns:
        (samples, columns) int64, contiguous.

    Raises:
        DtypeError, ShapeError: they name the tensor and the expectation.
        ArgumentError: ``offsets`` do not rise from 0 to the number of keys (CPU).
    """
    if not torch.compiler.is_compiling() and type(offsets) is Tensor and offsets.is_cpu:
        _check_places(offsets, sorted_keys.shape[0])
    low = offsets[:-1].expand(ids.shape)
    high = ends = offsets[1:].expand(ids.shape)
    if not sorted_keys.shape[0]:
        return torch.zeros(ids.shape, dtype=torch.int64, device=ids.device)
    for _ in range(len(sorted_keys).bit_length()):
        middle = (low + high) // 2
        searching = low < high
        below = sorted_keys[middle.clamp(max=sorted_keys.shape[0] - 1)] < ids
        low, high = (
            torch.where(searching & below, middle + 1, low),
            torch.where(searching & ~below, middle, high),
        )
    place = low.clamp(max=sorted_keys.shape[0] - 1)
    known = (low < ends) & (sorted_keys[place] == ids)
    return torch.where(known, slots[place], offsets[1:] - offsets[:-1]).contiguous()


def _check_places(offsets: Tensor, keys: int) -> None:
    """Raise ArgumentError for bad offsets, as the C++ kernel does. It is not called for traced
    tensors, which have no values yet, nor on a GPU, where reading them would synchronise."""
    begins = offsets.tolist()
    for column, (begin, end) in enumerate(zip(begins, [*begins[1:], keys], strict=True)):
        if not 0 <= begin <= end:
            raise ArgumentError(
                f"vocabulary_indices: 'offsets' has {begin} in place {column} before {end}; "
                f"expected places that rise from 0 to the {keys} keys."
            )
