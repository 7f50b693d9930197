"""The expressions for look-ups in many tables that ``fuselab.fuse`` replaces by one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.errors import ArgumentError, ShapeError
from fuselab.op import Inputs, Rewrite

LookUp = Callable[[Tensor, Tensor], Tensor]
Vectors = Callable[..., list[Tensor]]


def rewrites() -> Iterator[Rewrite]:
    """Yield the patterns: one look-up per table, by an embedding or by a bag of one id, and the
    vectors joined."""
    for names, ids_of, call in (
        (("tables", "ids"), _columns, _call_columns),
        (("tables", "ids"), _rows, _call_rows),
        (("tables", "each"), _each, _call_each),
        (("tables", "ids", "sizes"), _hashed, _call_hashed),
        (("tables", "ids", "sizes", "shift"), _shifted, _call_shifted),
    ):
        for look_up in (F.embedding, _bag):
            yield from _joined(names, _vectors(ids_of, look_up), call)
    yield from _joined(("tables", "ids"), _bags_of_columns, _call_columns)


def _vectors(ids_of: Callable[..., Sequence[Tensor]], look_up: LookUp) -> Vectors:
    def vectors(tables: Sequence[Tensor], *given: Any) -> list[Tensor]:
        return [
            look_up(ids, table)
            for ids, table in zip(ids_of(len(tables), *given), tables, strict=True)
        ]

    return vectors


def _bag(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding_bag(ids.unsqueeze(1), table)


def _bags_of_columns(tables: Sequence[Tensor], ids: Tensor) -> list[Tensor]:
    return [F.embedding_bag(ids[:, place : place + 1], table) for place, table in enumerate(tables)]


def _columns(count: int, ids: Tensor) -> list[Tensor]:
    return [ids[:, place] for place in range(count)]


def _rows(count: int, ids: Tensor) -> list[Tensor]:
    return [ids[place] for place in range(count)]


def _each(count: int, each: Sequence[Tensor]) -> Sequence[Tensor]:
    return each


def _hashed(count: int, ids: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [ids[:, place] % size for place, size in enumerate(sizes)]


def _shifted(count: int, ids: Tensor, sizes: Sequence[int], shift: int) -> list[Tensor]:
    return [(ids[:, place] + shift) % size for place, size in enumerate(sizes)]


# The functions below return the operator's arguments. ``dense`` is only put before its output.


def _call_columns(tables: Sequence[Tensor], ids: Tensor, dense: Tensor | None = None) -> Inputs:
    """Return the arguments; a model may have more columns of ids than tables."""
    if ids.dim() > 1 and ids.shape[1] > len(tables):
        ids = ids[:, : len(tables)]
    return Inputs((tables, ids))


def _call_rows(tables: Sequence[Tensor], ids: Tensor, dense: Tensor | None = None) -> Inputs:
    if ids.dim() != 2:
        raise ShapeError(f"embedding_lookup: ids of shape {tuple(ids.shape)}; expected (T, B).")
    return Inputs((tables, ids[: len(tables)].transpose(0, 1)))


def _call_each(
    tables: Sequence[Tensor], each: Sequence[Tensor], dense: Tensor | None = None
) -> Inputs:
    if each[0].dim() != 1:
        raise ShapeError(f"embedding_lookup: ids of shape {tuple(each[0].shape)}; expected (B,).")
    return Inputs((tables, torch.stack(list(each), dim=1)))


def _call_hashed(
    tables: Sequence[Tensor], ids: Tensor, sizes: Sequence[int], dense: Tensor | None = None
) -> Inputs:
    return _call_shifted(tables, ids, sizes, 0, dense)


def _call_shifted(
    tables: Sequence[Tensor],
    ids: Tensor,
    sizes: Sequence[int],
    shift: int,
    dense: Tensor | None = None,
) -> Inputs:
    """Return a call with the hash inside the kernel if the sizes are the tables' own lengths, else
    a call with ids that were hashed before."""
    if not all(isinstance(number, int) for number in (*sizes, shift)):
        raise ArgumentError("embedding_lookup: sizes and shift of a hash must be whole numbers.")
    if any(table.shape[0] != size for table, size in zip(tables, sizes, strict=True)):
        return _call_each(tables, _shifted(len(tables), ids, sizes, shift))
    _, ids = _call_columns(tables, ids).args
    return Inputs((tables, ids + shift if shift else ids, "error", "modulus"))


def _joined(
    names: Sequence[str], vectors: Vectors, call: Callable[..., Inputs]
) -> Iterator[Rewrite]:
    """Yield patterns in which the vectors are stacked or concatenated, with and without a dense
    vector in front."""

    def rewrite(
        join: Callable[..., Tensor], result: Callable[..., Tensor] | None, dense: bool
    ) -> Rewrite:
        def pattern(*given: Any) -> Tensor:
            front, rest = (given[:1], given[1:]) if dense else ((), given)
            return join([*front, *vectors(*rest)])

        pattern.__signature__ = Signature(  # type: ignore[attr-defined]
            [
                Parameter(name, Parameter.POSITIONAL_OR_KEYWORD)
                for name in (("dense", *names) if dense else names)
            ]
        )
        lists = tuple(name for name in names if name in ("tables", "each", "sizes"))
        return Rewrite(pattern, call, lists, result)

    yield rewrite(lambda joined: torch.stack(joined, dim=1), None, False)
    yield rewrite(
        lambda joined: torch.stack(joined, dim=1),
        lambda output, dense: torch.cat([dense.unsqueeze(1), output], dim=1),
        True,
    )
    for dim in (1, -1):

        def cat(joined: list[Tensor], dim: int = dim) -> Tensor:
            return torch.cat(joined, dim=dim)

        yield rewrite(cat, lambda output: output.flatten(1, 2), False)
        yield rewrite(
            cat, lambda output, dense: torch.cat([dense, output.flatten(1, 2)], dim=1), True
        )
