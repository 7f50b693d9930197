"""Launches of Triton kernels that sweep over rows and columns (``runtime/sweep.py``).

``triton_loops.py`` has what the kernels call. Here the tiles are chosen, and how many programs
share a row: where there are too few rows to fill the GPU, each sweep over the columns becomes a
launch of its own, and the programs of a row leave their partial results in a workspace. They are
added in a fixed order, so that results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuselab.runtime import gpu_limits
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.sweep import Sweep
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.tuning import Config, chosen

TILE = 2048  # elements of a tile of a kernel without reductions
ONE_BLOCK = 16384  # the most elements of rows that are kept in registers as a whole
LOOPED_BLOCK = 4096  # elements of a block of longer rows
LINE_BYTES = 128  # of a cache line
LONG_LOOP = 2048  # columns from which the innermost loop is swept over alone
MOST_PARTS = 1024  # programs that share a row
PROGRAMS_PER_MULTIPROCESSOR = 16  # to which rows are shared out
_WARP_ELEMENTS = 1024  # of a block that a warp works on

# What tuning may choose from: how often the elements of a block and its warps are doubled, from the
# choice that is made by size. The first is that choice itself.
CONFIGS = tuple(
    Config(block_doublings=block, warp_doublings=warps)
    for block, warps in (
        *((0, 0), (-1, 0), (1, 0), (2, 0), (0, -1), (0, 1)),
        *((1, 1), (-1, -1), (-1, 1), (1, -1), (2, 1)),
    )
)


def configs(*args: Any) -> Sequence[Config]:
    """Return what tuning may choose from, for any arguments (``FusedOp.configs``)."""
    return CONFIGS


@dataclass(frozen=True)
class Reducing:
    """A kernel that reduces: how many sweeps over its columns reduce, in how many reductions,
    whether results with an element for each column take another sweep, and whether several programs
    may share a row (not with sums of integers: partial results are floating)."""

    sweeps: int
    reductions: int
    stores_columns: bool = False
    is_shared: bool = True


@dataclass(frozen=True)
class Block:
    """The rows and columns that a program works on at a time, and its warps. ``parts`` programs
    share a row; with 0 its columns are one block."""

    rows: int
    columns: int
    warps: int
    parts: int = 1


class TritonSweeps:
    """The sweeping kernels of a package's ``triton_kernels.py``.

    Args:
        kernels: the module.
        op_name: ``FusedOp.name``, under which tuned blocks are kept.
        reducing: the kernels that reduce, by name.
        backward: whether the kernels are those of the backward.
        held: the names of the results that only later kernels read.
    """

    def __init__(
        self,
        kernels: ModuleType,
        op_name: str,
        reducing: Mapping[str, Reducing],
        backward: bool = False,
        held: Sequence[str] = (),
    ) -> None:
        self._kernels = kernels
        self._op_name = op_name
        self._implementation = "triton_backward" if backward else "triton"
        self._reducing = dict(reducing)
        self._held = frozenset(f"{name}_pointer" for name in held)

    def run(
        self, name: str, swept: Sweep, compute: torch.dtype, numbers: Sequence[int] = ()
    ) -> None:
        """Launch the kernel ``name`` over the sweep's loops; launch nothing if there are none.

        Args:
            compute: the dtype of the arithmetic, float32 or float64.
            numbers: sizes that the kernel computes with.
        """
        import triton.language as tl

        reducing = self._reducing.get(name)
        if not swept.rows.numel or not (reducing or swept.columns.numel):
            return
        kernel = getattr(self._kernels, name)
        tensors = [tensor for tensor in swept.tensors if tensor is not None]
        names = kernel.arg_names[len(tensors) - len(swept.tensors) + swept.read : len(tensors)]
        results = zip(names, swept.tensors[swept.read :], strict=True)
        constants = {
            "COMPUTE": tl.float64 if compute == torch.float64 else tl.float32,
            "ROUNDED": all(
                isinstance(tensor, Tensor) and tensor.dtype.itemsize == 2
                for one, tensor in results
                if one not in self._held
            ),
            "WIDE": swept.is_wide,
        }
        block = self._tuned(name, swept, reducing, tensors)
        if reducing is None:
            programs = ceil_div(swept.rows.numel, block.rows) * ceil_div(
                swept.columns.numel, block.columns
            )
            launch(
                kernel,
                (programs,),
                *tensors,
                *numbers,
                *_loops(swept),
                num_warps=block.warps,
                **constants,
                BLOCK_ROWS=block.rows,
                BLOCK_COLUMNS=block.columns,
            )
            return
        programs = ceil_div(swept.rows.numel, block.rows)
        partials = None
        sweeps: list[tuple[int, int]] = [(0, 1)]  # each launch's number, and programs of a row
        if block.parts > 1:
            cells = reducing.reductions * block.parts * swept.rows.numel
            partials = torch.empty(cells, dtype=compute, device=tensors[-1].device)
            last = block.parts if reducing.stores_columns else 1
            sweeps = [(sweep, block.parts) for sweep in range(1, reducing.sweeps + 1)]
            sweeps += [(reducing.sweeps + 1, last)]
        for sweep, parts in sweeps:
            launch(
                kernel,
                (programs, parts),
                *tensors,
                partials,
                *numbers,
                *_rows_and_columns(swept),
                num_warps=block.warps,
                **constants,
                NESTED=_is_nested(swept, block),
                SWEEP=sweep,
                PARTS=block.parts,
                BLOCK_ROWS=block.rows,
                BLOCK_COLUMNS=block.columns,
            )

    def _tuned(
        self, name: str, swept: Sweep, reducing: Reducing | None, tensors: Sequence[Tensor]
    ) -> Block:
        """Return the block of a kernel: by size, changed as tuning has found."""
        width = max(tensors, key=Tensor.numel).dtype.itemsize
        key = (
            name,
            f"{8 * width}-bit",
            power_of_two(swept.rows.numel),
            power_of_two(max(1, swept.columns.numel)),
        )
        config = chosen(self._op_name, self._implementation, key, CONFIGS)
        doublings = int(config["block_doublings"])
        if reducing is None:
            block = _tile(swept, width, doublings)
        else:
            block = _rows(swept, width, doublings, reducing, tensors[-1].device)
        warps = power_of_two(max(1, int(block.warps * 2.0 ** int(config["warp_doublings"]))))
        return replace(block, warps=min(32, warps))


# --- the arguments of kernels ---------------------------------------------------------------------


def _loops(swept: Sweep) -> list[tuple[Any, ...]]:
    """Return the sizes of the loops of a kernel without reductions, then each operand's strides. A
    stride 0 that a tensor has in all columns, or in all rows, is a constant."""
    import triton.language as tl

    zero = tl.constexpr(0)
    has_rows = swept.rows.numel > 1
    found = [(*swept.rows.sizes, *swept.columns.sizes) if has_rows else swept.columns.sizes]
    axes = zip(swept.on_rows, swept.on_columns, strict=True)
    for place, has_place in enumerate(map(any, axes)):
        if not (has_place or place >= swept.read):
            continue
        outer = swept.rows.strides[place] if has_rows else ()
        inner = swept.columns.strides[place]
        if place < swept.read:
            outer = outer if any(outer) else (zero,) * len(outer)
            inner = inner if any(inner) else (zero,)
        found.append((*outer, *inner))
    return found


def _rows_and_columns(swept: Sweep) -> list[tuple[int, ...]]:
    """Return the sizes of the loops of a kernel with reductions, then each operand's strides: those
    in the rows if it has an axis there, or is the result of a single row, and those in the
    columns."""
    found = [swept.rows.sizes, swept.columns.sizes]
    axes = zip(swept.on_rows, swept.on_columns, strict=True)
    for place, (on_rows, on_columns) in enumerate(axes):
        if on_rows or (place >= swept.read and not on_columns):
            found.append(swept.rows.strides[place])
        if on_columns:
            found.append(swept.columns.strides[place])
    return found


# --- blocks ---------------------------------------------------------------------------------------


def _tile(swept: Sweep, width: int, doublings: int) -> Block:
    """Return the tile of a kernel without reductions; the widest element has ``width`` bytes. Where
    an operand is transposed, tiles are square, so that cache lines are used whole."""
    elements = int(TILE * 2.0**doublings)
    columns = swept.columns.numel
    if any(strides[-1] > 1 for strides in swept.columns.strides):
        across = min(max(16, LINE_BYTES // max(2, width)), power_of_two(columns))
    else:
        across = _fitting(columns, elements)
    down = min(max(1, elements // across), power_of_two(swept.rows.numel))
    return Block(down, across, _warps(down * across, 512))


def _rows(
    swept: Sweep, width: int, doublings: int, reducing: Reducing, device: torch.device
) -> Block:
    """Return the block of a kernel with reductions. Where rows are neighbours in memory, a block
    has so many that it reads whole cache lines."""
    rows, columns = swept.rows.numel, max(1, swept.columns.numel)
    whole = power_of_two(columns)
    if swept.rows_are_contiguous:
        line = min(power_of_two(rows), LINE_BYTES // max(2, width))
        fits = line * whole <= ONE_BLOCK // 2
        down = line
        across = whole if fits else max(1, int(LOOPED_BLOCK * 2.0**doublings) // line)
        if fits:
            down = min(power_of_two(rows), max(line, int(2048 * 2.0**doublings) // whole))
    elif whole <= ONE_BLOCK:
        down, across = max(1, int(2048 * 2.0**doublings) // whole), whole
        down = min(down, power_of_two(rows))
    else:
        down, across = 1, int(LOOPED_BLOCK * 2.0**doublings)
    block = Block(down, across, _warps(down * across, _WARP_ELEMENTS))
    parts = _parts(swept, block, reducing, device)
    if parts > 1 and across >= columns:  # fewer columns at a time, for several programs
        block = replace(block, columns=max(16, across // parts))
    if parts == 1 and block.columns >= columns:
        parts = 0
    return replace(block, parts=parts)


def _parts(swept: Sweep, block: Block, reducing: Reducing, device: torch.device) -> int:
    """Return how many programs share a row, a power of two."""
    if not reducing.is_shared:
        return 1
    programs = ceil_div(swept.rows.numel, block.rows)
    wanted = PROGRAMS_PER_MULTIPROCESSOR * gpu_limits.multiprocessors(device)
    if 2 * programs > wanted:
        return 1
    # A share of less than two blocks is not worth another launch.
    most = swept.columns.numel * block.rows // (2 * LOOPED_BLOCK)
    return max(
        1, min(power_of_two(wanted // programs + 1) // 2, power_of_two(most + 1) // 2, MOST_PARTS)
    )


def _is_nested(swept: Sweep, block: Block) -> bool:
    """Return whether the innermost loop of the columns is swept over alone, which saves divisions:
    one for each pack of elements, but one for each element if packs straddle its end."""
    inner = swept.columns.sizes[-1]
    is_long = inner >= (64 if inner % 16 else LONG_LOOP)
    return block.parts > 0 and len(swept.columns.sizes) > 1 and is_long


def _fitting(size: int, most: int) -> int:
    """Return the largest power of two up to ``most`` whose multiples exceed ``size`` by no more
    than an eighth; if there is none, that which exceeds it least."""
    most = min(max(1, most), power_of_two(max(1, size)))
    candidates = [most >> shift for shift in range(most.bit_length()) if most >> shift >= 16]
    excess = {one: ceil_div(size, one) * one - size for one in candidates or [most]}
    fitting = [one for one in excess if 8 * excess[one] <= size]
    return fitting[0] if fitting else min(excess, key=lambda one: (excess[one], -one))


def _warps(elements: int, of_a_warp: int) -> int:
    return max(4, min(16, power_of_two(ceil_div(elements, of_a_warp))))
