"""Launches of CUDA C++ kernels that sweep over rows and columns (``runtime/sweep.py``).

``include/cuda_sweep.h`` describes the tiles that are chosen from here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuselab.runtime import gpu_limits
from fuselab.runtime.cuda_source import MAX_GRID, CudaSource
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.parameters import Scalar, Struct, i32, i64
from fuselab.runtime.sweep import COLUMN_LOOPS, ROW_LOOPS, Sweep

CPP_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
THREADS = 256  # of a block of a kernel without reductions
WARP = 32
NARROW_BLOCK = 128  # threads of a block whose rows belong to lanes of a warp
PACK_BYTES = 16
INNER_ROW, INNER_COLUMN = 3, 6  # the innermost loop over rows and over columns, of seven

# (threads, most elements per thread, most bytes of them) of rows that are kept in registers. The
# first line that fits is taken. Blocks of 1024 threads have 64 registers per thread.
_ROWS = (
    *((threads, 8, 512) for threads in (1, 2, 4, 8, 16, 32)),
    (32, 16, 512),
    (32, 32, 512),
    (128, 16, 384),
    (256, 16, 384),
    (512, 16, 256),
    (1024, 16, 192),
)
_COLUMN_WARPS = ((4, 384), (8, 384), (16, 256), (32, 192))  # (warps, most bytes of a thread)
# A ColumnTile's shared memory has warps x width x 32 values for each reduction. If warps x width is
# at most 32, that is 8 KB in float64, and five reductions fit into the 48 KB that a block may have.
_SHARED_ROWS, _SHARED_REDUCTIONS = 32, 5
_BLOCKS_PER_MULTIPROCESSOR = 4  # to which rows are split
_LEAST_PART = 2048  # elements of a part of a row

# What a compile check takes: a tile, how operands are read, their type and that of the arithmetic.
_Example = tuple[str, str, str, str]
_ELEMENT_EXAMPLES: tuple[_Example, ...] = (
    ("ElementTile<int32_t, 0, 4, false>", "Packed", "float", "float"),
    ("ElementTile<int64_t, 3, 8, true>", "Packed", "__nv_bfloat16", "float"),
    ("TransposedTile<int32_t, 1>", "Strided", "double", "double"),
)
_ROW_EXAMPLE = "RowTile<int32_t, 1, 1, 4, false, 32, 4, 2, Share::whole>"
_WIDE_EXAMPLE = "RowTile<int64_t, 3, 3, 1, false, 512, 1, 0, Share::whole>"
_REDUCING_EXAMPLES: tuple[_Example, ...] = (
    (_ROW_EXAMPLE, "Packed", "float", "float"),
    (_WIDE_EXAMPLE, "Strided", "double", "double"),
    ("ColumnTile<int32_t, 2, 1, 2, 32, 8, 4, Share::whole>", "Packed", "__half", "float"),
)
_SCANNING_EXAMPLES: tuple[_Example, ...] = (
    (_ROW_EXAMPLE, "Packed", "float", "float"),
    ("RowTile<int64_t, 3, 3, 1, true, 32, 4, 0, Share::whole>", "Strided", "double", "double"),
)
_SPLIT_EXAMPLES: tuple[_Example, ...] = (
    ("ColumnTile<int32_t, 1, 2, 4, 8, 8, 0, Share::part>", "Packed", "float", "float"),
    ("RowTile<int32_t, 1, 1, 1, false, 32, 4, 0, Share::merge>", "Same", "float", "float"),
)


@dataclass(frozen=True)
class Tile:
    """A tile of ``cuda_sweep.h`` and its launch.

    ``text`` is the tile in C++, ``loop`` the loop along which packs lie, by its place among an
    operand's seven strides, ``width`` the elements of a pack, and ``rows`` the rows of a block. A
    row is reduced in ``parts`` parts.
    """

    text: str
    blocks: int
    threads: int
    loop: int
    width: int
    rows: int = 1
    parts: int = 1


class CudaSweeps(CudaSource):
    """The sweeping kernels of a package's ``cuda_kernels.cu``.

    Args:
        path: the source; ``name`` is the template ``name_kernel`` in it.
        reductions: the number of reductions of each kernel that reduces.
        splitting: those of them that can reduce parts of a row apart.
        scanning: the kernels with running reductions, for which lanes of one warp have a row.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        reductions: Mapping[str, int] | None = None,
        splitting: Sequence[str] = (),
        scanning: Sequence[str] = (),
    ) -> None:
        super().__init__(path)
        self._scanning = frozenset(scanning)
        self._reductions = dict(reductions or {})
        self._splitting = frozenset(splitting)

    def run(
        self, name: str, swept: Sweep, compute: torch.dtype, numbers: Sequence[int] = ()
    ) -> None:
        """Launch the kernel ``name`` over the sweep's loops; launch nothing if there are none.

        Args:
            compute: the dtype of the arithmetic, float32 or float64.
            numbers: sizes that the kernel computes with.
        """
        swept = swept.with_rows_apart()
        self._launch(name, swept, compute, numbers)
        swept.copy_back()

    def run_each(self, name: str, sweeps: Sequence[Sweep], compute: torch.dtype) -> None:
        """Launch a kernel for each of the sweeps."""
        for swept in sweeps:
            self.run(name, swept, compute)

    def _launch(
        self, name: str, swept: Sweep, compute: torch.dtype, numbers: Sequence[int]
    ) -> None:
        reductions = self._reductions.get(name, 0)
        if not swept.rows.numel or not (reductions or swept.columns.numel):
            return
        splits = name in self._splitting
        tensors = [tensor for tensor in swept.tensors if tensor is not None]
        if name in self._scanning:
            tile = _warp_tile(swept)
        else:
            tile = _tile(swept, reductions, splits, tensors[-1].device)
        sizes = swept.numbers()
        loops = Struct(struct.pack(f"{len(sizes)}q", *sizes))
        counts = [i64(number) for number in (*numbers, *swept.steps)]
        if tile.parts == 1:
            partials: list[Tensor | Scalar | None] = [None, i32(1)] if splits else []
            launches = [(tile, partials)]
        else:
            cells = reductions * swept.rows.numel * tile.parts
            workspace = torch.empty(cells, dtype=torch.int64, device=tensors[-1].device)
            partials = [workspace, i32(tile.parts)]
            launches = [(tile, partials), (_merging_tile(swept), partials)]
        for each, partials in launches:
            self.launch(
                _expression(name, each.text, CPP_TYPES[compute], _operands(swept, each)),
                (each.blocks, each.parts, 1),
                (each.threads, 1, 1),
                (*tensors, *partials, *counts, loops),
            )

    def examples(self, kinds: Mapping[str, str]) -> tuple[str, ...]:
        """Return instantiations of every kernel for a compile check, with each kind of tile, in
        float32, in 16 bits and in float64.

        Args:
            kinds: for each kernel the kinds of its tensors' elements: float, bool or int.
        """
        found: list[str] = []
        for name, words in kinds.items():
            tiles = _REDUCING_EXAMPLES if name in self._reductions else _ELEMENT_EXAMPLES
            tiles += _SPLIT_EXAMPLES if name in self._splitting else ()
            tiles = _SCANNING_EXAMPLES if name in self._scanning else tiles
            for tile, access, element, real in tiles:
                types = {"float": element, "bool": "bool", "int": "int64_t"}
                operands = [f"{access}<{types[word]}>" for word in words.split()]
                found.append(_expression(name, tile, real, operands))
        return tuple(found)


def _expression(name: str, tile: str, real: str, operands: Sequence[str]) -> str:
    return f"{name}_kernel<{', '.join([tile, real, *operands])}>"


# --- packs ----------------------------------------------------------------------------------------


def _strides(swept: Sweep) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Return each tensor with its strides in the four loops over rows and three over columns."""
    rows, columns = swept.rows.padded(ROW_LOOPS), swept.columns.padded(COLUMN_LOOPS)
    pairs = zip(swept.tensors, rows.strides, columns.strides, strict=True)
    return [(tensor, (*outer, *inner)) for tensor, outer, inner in pairs if tensor is not None]


def _access(tensor: Tensor, strides: tuple[int, ...], loop: int, width: int) -> str:
    """Return how a thread reads or writes a pack of ``width`` elements along a loop."""
    if strides[loop] == 0:
        return "Same"
    others = strides[:loop] + strides[loop + 1 :]
    packed = strides[loop] == 1 and tensor.data_ptr() % PACK_BYTES == 0
    if packed and width > 1 and all(stride % width == 0 for stride in others):
        return "Packed"
    return "Strided"


def _operands(swept: Sweep, tile: Tile) -> list[str]:
    """Return the class of each operand."""
    return [
        f"{_access(tensor, strides, tile.loop, tile.width)}<{CPP_TYPES[tensor.dtype]}>"
        for tensor, strides in _strides(swept)
    ]


def _width(swept: Sweep, loop: int, most: int) -> int:
    """Return the widest packs that every operand with neighbours along the loop is aligned for; at
    most 16 bytes of the narrowest of them (of 2 bytes or more), and at most ``most`` elements."""
    contiguous = [(one, strides) for one, strides in _strides(swept) if strides[loop] == 1]
    if not contiguous:
        return 1
    narrowest = max(2, min(tensor.dtype.itemsize for tensor, _ in contiguous))
    width = min(PACK_BYTES // narrowest, power_of_two(most))
    while width > 1 and not all(
        _access(tensor, strides, loop, width) == "Packed" for tensor, strides in contiguous
    ):
        width //= 2
    return width


# --- tiles ----------------------------------------------------------------------------------------


def _tile(swept: Sweep, reductions: int, splits: bool, device: torch.device) -> Tile:
    """Return the tile of a kernel with that many reductions; ``splits`` says whether parts of a row
    may be reduced apart."""
    if not reductions:
        return _element_tile(swept)
    # What is read once is kept only to have a few loads in flight: a third of the registers.
    bytes_kept = max(4, _element_bytes(swept)) * (3 if splits else 1)
    if swept.rows_are_contiguous:
        tile = _column_tile(swept, reductions, bytes_kept)
    else:
        tile = _row_tile(swept, bytes_kept)
    if not splits:
        return tile
    wanted = _BLOCKS_PER_MULTIPROCESSOR * gpu_limits.multiprocessors(device)
    parts = min(wanted // tile.blocks, swept.columns.numel * tile.rows // _LEAST_PART, MAX_GRID[1])
    if parts < 2:
        return tile
    if tile.loop == INNER_ROW:
        return _column_tile_of(swept, tile.width, min(8, _warps(reductions, tile.width)), 0, parts)
    return _row_tile_of(swept, tile.width, THREADS, 0, parts=parts)


def _index(swept: Sweep) -> str:
    return "int64_t" if swept.is_wide else "int32_t"


def _element_tile(swept: Sweep) -> Tile:
    """Return the tile of a kernel without reductions."""
    rows, columns, loops = swept.rows.numel, swept.columns.numel, len(swept.rows.sizes)
    transposed = any(strides[INNER_COLUMN] > 1 for _, strides in _strides(swept))
    if transposed and min(rows, columns) >= WARP:
        blocks = ceil_div(rows, WARP) * ceil_div(columns, WARP)
        return Tile(f"TransposedTile<{_index(swept)}, {loops}>", blocks, THREADS, INNER_COLUMN, 1)
    width = _width(swept, INNER_COLUMN, columns)
    ragged = str(columns % width != 0).lower()
    text = f"ElementTile<{_index(swept)}, {loops if rows > 1 else 0}, {width}, {ragged}>"
    packs = rows * ceil_div(columns, width)
    return Tile(text, ceil_div(packs, THREADS), THREADS, INNER_COLUMN, width)


def _row_tile(swept: Sweep, bytes_kept: int) -> Tile:
    """Return the tile of rows whose columns are neighbours in memory; an element that is kept takes
    ``bytes_kept`` of registers."""
    columns, inner = swept.columns.numel, swept.columns.sizes[-1]
    width = _width(swept, INNER_COLUMN, inner)
    while len(swept.columns.sizes) > 1 and inner % width:
        width //= 2  # a pack lies within one turn of the innermost loop
    for threads, most, most_bytes in _ROWS:
        kept = ceil_div(columns, threads * width)
        elements = kept * width
        if 0 < elements <= max(width, min(most, most_bytes // bytes_kept)):
            return _row_tile_of(swept, width, threads, kept)
    return _row_tile_of(swept, width, 1024 if columns > 65536 else 512, 0)


def _warp_tile(swept: Sweep) -> Tile:
    """Return the tile of rows that a warp each goes over from the first column to the last."""
    width = _width(swept, INNER_COLUMN, swept.columns.sizes[-1])
    while len(swept.columns.sizes) > 1 and swept.columns.sizes[-1] % width:
        width //= 2  # a pack lies within one turn of the innermost loop
    return _row_tile_of(swept, width, WARP, 0)


def _row_tile_of(
    swept: Sweep, width: int, threads: int, kept: int, share: str = "whole", parts: int = 1
) -> Tile:
    """Return the tile of rows of ``threads`` threads each."""
    share = "part" if parts > 1 else share
    ragged = str(swept.columns.numel % width != 0).lower()
    rows = NARROW_BLOCK // threads if threads <= WARP else 1
    text = (
        f"RowTile<{_index(swept)}, {_loops(swept)}, {width}, {ragged}, {threads}, {rows}, {kept}, "
        f"Share::{share}>"
    )
    blocks = ceil_div(swept.rows.numel, rows)
    return Tile(text, blocks, threads * rows, INNER_COLUMN, width, rows, parts)


def _merging_tile(swept: Sweep) -> Tile:
    """Return the tile that merges the parts of rows: a warp has a row."""
    return _row_tile_of(swept, 1, WARP, 0, share="merge")


def _column_tile(swept: Sweep, reductions: int, bytes_kept: int) -> Tile:
    """Return the tile of rows that are neighbours in memory; an element that is kept takes
    ``bytes_kept`` of registers."""
    rows, columns = swept.rows.numel, swept.columns.numel
    width = min(4, _width(swept, INNER_ROW, max(1, rows // WARP)))
    while swept.rows.sizes[-1] % width:
        width //= 2  # a pack lies within one turn of the innermost loop
    for warps, most_bytes in _COLUMN_WARPS:
        for narrow in (width, width // 2, width // 4):
            if narrow == 0 or warps > _warps(reductions, narrow):
                continue
            kept = ceil_div(columns, warps * WARP // _lanes(swept, narrow))
            if 0 < kept * narrow <= most_bytes // bytes_kept:
                return _column_tile_of(swept, narrow, warps, kept)
    return _column_tile_of(swept, width, min(8, _warps(reductions, width)), 0)


def _column_tile_of(swept: Sweep, width: int, warps: int, kept: int, parts: int = 1) -> Tile:
    """Return the tile of packs of ``width`` rows, whose columns the threads of a block share."""
    lanes, share = _lanes(swept, width), "part" if parts > 1 else "whole"
    text = (
        f"ColumnTile<{_index(swept)}, {_loops(swept)}, {width}, {lanes}, {warps}, {kept}, "
        f"Share::{share}>"
    )
    rows = lanes * width
    blocks = ceil_div(swept.rows.numel, rows)
    return Tile(text, blocks, WARP * warps, INNER_ROW, width, rows, parts)


def _lanes(swept: Sweep, width: int) -> int:
    """Return how many lanes of a warp have rows of their own."""
    return min(WARP, power_of_two(ceil_div(swept.rows.numel, width)))


def _warps(reductions: int, width: int) -> int:
    """Return the most warps whose shared memory fits a block."""
    rows = _SHARED_ROWS if reductions <= _SHARED_REDUCTIONS else _SHARED_ROWS // 4
    return rows // width


def _loops(swept: Sweep) -> str:
    return f"{len(swept.rows.sizes)}, {len(swept.columns.sizes)}"


def _element_bytes(swept: Sweep) -> int:
    """Return the bytes that one element of a row takes in registers: those of all operands with
    an element for each row and column, results too, in the type of the arithmetic."""
    return sum(
        max(4, tensor.dtype.itemsize) if tensor.dtype.is_floating_point else tensor.dtype.itemsize
        for tensor, strides in _strides(swept)
        if any(strides[:ROW_LOOPS]) and any(strides[ROW_LOOPS:])
    )
