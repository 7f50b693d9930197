"""The gallery's wrong operators of the other kinds: in place, of sequences, of integers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp
from gallery import in_place, lookup, remainder, wrong
from gallery.wrong import Exhibit, as_if_contiguous

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


# In place


@caught_by("version counters")
def version_set_back(device: str) -> FusedOp:
    """Hides from autograd that a tensor which it may have saved is another one now."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> None:
        in_place.forward(input, bias, scale)
        torch._C._autograd._unsafe_set_version_counter((input,), (input._version - 1,))

    return in_place.make_op("version_set_back", device, forward)


@caught_by("inputs unchanged")
def another_argument_written(device: str) -> FusedOp:
    """Scales the bias once, for good: the first call is right."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> None:
        in_place.forward(input, bias, scale)
        bias.mul_(0.5)

    return in_place.make_op("another_argument_written", device, forward)


@caught_by("inputs unchanged")
def written_past_the_tensor(device: str) -> FusedOp:
    """Writes a whole block at the end, beyond the last element."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> None:
        in_place.forward(input, bias, scale)
        elements = input.untyped_storage().nbytes() // input.element_size()
        if elements > input.numel():
            input.as_strided((1,), (1,), elements - 1).zero_()

    return in_place.make_op("written_past_the_tensor", device, forward)


@caught_by("cases", passes_its_cases=False)
def a_copy_returned(device: str) -> FusedOp:
    """Right, and somewhere else."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return in_place.reference(input, bias, scale)

    return in_place.make_op("a_copy_returned", device, forward)


@caught_by("layouts")
def a_copy_written(device: str) -> FusedOp:
    """Makes the tensor contiguous first, and then writes over that."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> None:
        in_place.forward(input.contiguous(), bias, scale)

    return in_place.make_op("a_copy_written", device, forward)


@caught_by("shapes")
def first_of_a_sequence_written(device: str) -> FusedOp:
    def forward(tables: Sequence[Tensor], scale: float) -> None:
        tables[0].mul_(scale)

    return in_place.make_sequence_op("first_of_a_sequence_written", device, forward)


# Sequences


@caught_by("shapes", passes_its_cases=False)
def first_table_for_all(device: str) -> FusedOp:
    """Every table of the first one's shape is read where the first one lies."""

    def forward(tables: Sequence[Tensor], ids: Tensor) -> Tensor:
        first = tables[0]
        alike = [first if table.shape == first.shape else table for table in tables]
        return lookup.forward(alike, ids)

    return lookup.make_op("first_table_for_all", device, forward)


@caught_by("layouts")
def ids_taken_as_contiguous(device: str) -> FusedOp:
    def forward(tables: Sequence[Tensor], ids: Tensor) -> Tensor:
        return lookup.forward(tables, as_if_contiguous(ids))

    return lookup.make_op("ids_taken_as_contiguous", device, forward)


@caught_by("gradients")
def repeated_ids_overwrite(device: str) -> FusedOp:
    """The gradient of a row that was read twice is that of its last reading."""

    def backward(needs: Any, grad_output: Tensor, tables: Any, ids: Tensor) -> Any:
        grads = list(lookup.backward(needs, grad_output, tables, ids))
        start = 0
        for place, table in enumerate(tables):
            piece = grad_output[:, start : start + table.shape[1]]
            start += table.shape[1]
            if grads[place] is not None:
                grads[place] = torch.zeros_like(table)
                grads[place][ids[:, place]] = piece
        return tuple(grads)

    return lookup.make_op("repeated_ids_overwrite", device, backward=backward)


@caught_by("some gradients")
def gradients_of_all_tables_or_none(device: str) -> FusedOp:
    def backward(needs: Any, grad_output: Tensor, tables: Any, ids: Tensor) -> Any:
        grads = lookup.backward(needs, grad_output, tables, ids)
        if all(needs[: len(tables)]):
            return grads
        return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)

    return lookup.make_op("gradients_of_all_tables_or_none", device, backward=backward)


# Integers


@caught_by("shapes", dtype=torch.int64)
def remainder_of_c(device: str) -> FusedOp:
    """C's % of a negative id is negative."""

    def forward(ids: Tensor, cardinality: int) -> Tensor:
        return torch.fmod(ids, cardinality)

    return remainder.make_op("remainder_of_c", device, forward)


@caught_by("shapes", dtype=torch.int64)
def ids_through_float32(device: str) -> FusedOp:
    """float32 holds integers up to 2^24."""

    def forward(ids: Tensor, cardinality: int) -> Tensor:
        return torch.remainder(ids.float(), cardinality).to(ids.dtype)

    return remainder.make_op("ids_through_float32", device, forward)


@caught_by("fresh values", dtype=torch.int64)
def integers_cached_by_pointer(device: str) -> FusedOp:
    held: dict[Any, Tensor] = {}

    def forward(ids: Tensor, cardinality: int) -> Tensor:
        key = (ids.data_ptr(), ids.shape, ids.stride(), cardinality)
        if key not in held:
            held[key] = remainder.forward(ids, cardinality)
        return held[key].clone()

    return remainder.make_op("integers_cached_by_pointer", device, forward)
