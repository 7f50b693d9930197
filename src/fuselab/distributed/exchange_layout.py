"""Rows made of received messages, and messages made of rows, each in one launch.

A message to or from a rank has, for every row of a batch, all its pieces side by side: vectors of
blocks, or ids. Where they lie depends on the number of rows, but their description does not, so it
is made once and stays on the device. ``exchange_layout.h`` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.grid import ceil_div

CUDA = CudaSource(Path(__file__).with_name("exchange_layout.cu"))
CPP = CppSource(Path(__file__).with_name("exchange_layout.cpp"))

_THREADS = 256  # kThreads of exchange_layout.cu
_BYTES = 16  # of one access
_NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "half"}
_IDS = {torch.int32: "int32_t", torch.int64: "int64_t"}
_USED = (torch.float32, torch.bfloat16)  # dtypes of the products

CUDA_EXPRESSIONS = (
    *(
        f"{name}<{_NAMES[one]}, {_NAMES[other]}, {many}>"
        for name, pairs in (
            ("gather", [(wire, used) for wire in _NAMES for used in _USED]),
            ("scatter", [(used, wire) for wire in _NAMES for used in _USED]),
        )
        for one, other in pairs
        for many in (1, 2, 4, 8)
        if many * max(one.itemsize, other.itemsize) <= _BYTES
    ),
    *(f"pack_ids<{name}>" for name in _IDS.values()),
    "unpack_ids",
)


@dataclass(frozen=True)
class Piece:
    """The place of some units of every row in a message.

    ``before`` units of each row lie in front of the message, a row of it has ``stride`` units, and
    the piece begins ``place`` units into the row.
    """

    before: int
    stride: int
    place: int


def pieces_of(messages: Sequence[Sequence[int]]) -> list[list[Piece]]:
    """Return the pieces of messages in a row, given the units of each message's pieces."""
    sizes = [sum(units) for units in messages]
    found = []
    for units, size, before in zip(messages, sizes, accumulate(sizes, initial=0), strict=False):
        places = accumulate(units, initial=0)
        found.append([Piece(before, size, place) for _, place in zip(units, places, strict=False)])
    return found


class VectorLayout:
    """Vectors of ``width`` elements in messages, and their columns in rows of ``row_elements``.

    Args:
        targets: each with its first column and the pieces that are added up there, in this order.
        width: elements of a piece.
        row_elements: of a row; T * D.
        device: of the tensors.
    """

    def __init__(
        self,
        targets: Sequence[tuple[int, Sequence[Piece]]],
        width: int,
        row_elements: int,
        device: torch.device,
    ) -> None:
        self.width, self.row_elements = width, row_elements
        listed = [piece for _, pieces in targets for piece in pieces]
        firsts = accumulate((len(pieces) for _, pieces in targets), initial=0)
        described = [
            (column, first, len(pieces))
            for (column, pieces), first in zip(targets, firsts, strict=False)
        ]
        columns = [column for column, pieces in targets for _ in pieces]
        # in the order of the message, so that it is written from its beginning to its end
        order = sorted(
            range(len(listed)), key=lambda at: (listed[at].before, listed[at].place, columns[at])
        )
        self.targets = _table(described, device)
        self.gathered = _table([_numbers(piece) for piece in listed], device)
        self.scattered = _table([_numbers(listed[at]) for at in order], device)
        self.columns = _table([columns[at] for at in order], device)
        places = [number for piece in listed for number in _numbers(piece)]
        self.common = gcd(width, row_elements, *columns, *places)

    def gather(self, messages: Tensor, rows: Tensor) -> None:
        """Write the targets of ``rows`` [n, T, D] from messages, in the rows' dtype."""
        arguments = (messages, rows, self.targets, self.gathered)
        self._launch("gather", arguments, len(rows), len(self.targets))

    def scatter(self, rows: Tensor, messages: Tensor) -> None:
        """Write messages from ``rows`` [n, T, D], in the messages' dtype."""
        arguments = (rows.contiguous(), messages, self.columns, self.scattered)
        self._launch("scatter", arguments, len(rows), len(self.columns))

    def _launch(
        self, name: str, arguments: tuple[Tensor, Tensor, Tensor, Tensor], rows: int, count: int
    ) -> None:
        if rows * count == 0:
            return
        source, target, *_ = arguments
        many = _elements_at_once(self.common, source, target)
        expression = f"{name}<{_NAMES[source.dtype]}, {_NAMES[target.dtype]}, {many}>"
        chunks = self.width // many
        sizes = (i64(rows), i32(count), i32(chunks), i64(self.row_elements))
        if source.is_cuda:
            _on_gpu(expression, (*arguments, *sizes), rows * count * chunks)
        else:
            CPP.launch(expression, (*arguments, *sizes))


class IdLayout:
    """Ids in messages, in one unit of 16 bits for tables of at most 65,536 rows, else in two.

    Args:
        asked: by rank, the columns of the ids that it gets, in the order of its message.
        rank: this one.
        sizes: rows of the table of each column.
        first_rows: of this rank's blocks; they are subtracted from the ids that arrive.
        device: of the tensors.
    """

    def __init__(
        self,
        asked: Sequence[Sequence[int]],
        rank: int,
        sizes: Sequence[int],
        first_rows: Sequence[int],
        device: torch.device,
    ) -> None:
        units = [[1 if sizes[column] <= 1 << 16 else 2 for column in columns] for columns in asked]
        self.units = [sum(each) for each in units]  # of a row, by rank
        self.mine, self.blocks = self.units[rank], len(units[rank])
        columns = [column for each in asked for column in each]
        self.columns = _table(columns, device)
        self.are_long = _table([unit - 1 for each in units for unit in each], device)
        self.pieces = _table(
            [_numbers(piece) for message in pieces_of(units) for piece in message], device
        )
        places = list(accumulate(units[rank], initial=0))[:-1]
        self.places = _table(places, device)
        self.mine_are_long = _table([unit - 1 for unit in units[rank]], device)
        self.first_rows = _table(first_rows, device)

    def pack(self, ids: Tensor) -> Tensor:
        """Return the messages of ids [n, T], int32 or int64, as bytes."""
        rows = len(ids)
        messages = ids.new_empty(2 * rows * sum(self.units), dtype=torch.uint8)
        if rows and len(self.columns):
            ids = ids.contiguous()
            arguments = (ids, messages, self.columns, self.are_long, self.pieces)
            sizes = (i64(rows), i32(len(self.columns)), i64(ids.shape[1]))
            expression = f"pack_ids<{_IDS[ids.dtype]}>"
            if ids.is_cuda:
                _on_gpu(expression, (*arguments, *sizes), rows * len(self.columns))
            else:
                CPP.launch(expression, (*arguments, *sizes))
        return messages

    def unpack(self, messages: Tensor, rows: int) -> Tensor:
        """Return the ids of all ranks' messages to this one, int32 [rows, blocks]."""
        ids = messages.new_empty((rows, self.blocks), dtype=torch.int32)
        if rows and self.blocks:
            arguments = (messages, ids, self.places, self.mine_are_long, self.first_rows)
            sizes = (i64(rows), i32(self.blocks), i64(self.mine))
            if ids.is_cuda:
                _on_gpu("unpack_ids", (*arguments, *sizes), rows * self.blocks)
            else:
                CPP.launch("unpack_ids", (*arguments, *sizes))
        return ids


def _on_gpu(expression: str, arguments: Sequence[Tensor | i32 | i64], threads: int) -> None:
    CUDA.launch(expression, (ceil_div(threads, _THREADS), 1, 1), (_THREADS, 1, 1), arguments)


def _elements_at_once(common: int, source: Tensor, target: Tensor) -> int:
    """Return the most elements that one access can take: a power of 2 that divides ``common``."""
    if not source.is_cuda:
        return 1
    many = _BYTES // max(source.itemsize, target.itemsize)
    places = source.data_ptr() | target.data_ptr()
    while many > 1 and (common % many or places % (many * max(source.itemsize, target.itemsize))):
        many //= 2
    return many


def _numbers(piece: Piece) -> tuple[int, int, int]:
    return piece.before, piece.stride, piece.place


def _table(numbers: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64, device=device)
