"""Sequences of tensors among arguments, laid out flat for autograd and nested again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def with_tuples(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return ``values`` with tuples at ``places``, where the dispatcher passes lists."""
    return [tuple(value) if place in places else value for place, value in enumerate(values)]


def flat_of(
    values: Sequence[Any], places: Sequence[int]
) -> tuple[list[Any], tuple[int | None, ...] | None]:
    """Return ``values`` with the sequences at ``places`` flattened, and the length of each value:
    None for a value that is no sequence. Without any ``places`` the lengths are None."""
    if not places:
        return list(values), None
    lengths = tuple(len(value) if place in places else None for place, value in enumerate(values))
    flat: list[Any] = []
    for value, length in zip(values, lengths, strict=True):
        flat.extend((value,) if length is None else value)
    return flat, lengths


def nested(flat: Sequence[Any], lengths: tuple[int | None, ...] | None) -> list[Any]:
    """Return the arguments that ``flat_of`` flattened, with their sequences as tuples again."""
    if lengths is None:
        return list(flat)
    values: list[Any] = []
    begin = 0
    for length in lengths:
        if length is None:
            values.append(flat[begin])
            begin += 1
        else:
            values.append(tuple(flat[begin : begin + length]))
            begin += length
    return values
