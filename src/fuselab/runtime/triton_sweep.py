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

TILE = 2048  # elements of a tile of a kernel without reductions, or of short rows
ONE_BLOCK = 16384  # the most elements of rows that are kept in registers as a whole
LOOPED_BLOCK = 4096  # elements of a block of longer rows
LINE_BYTES = 128  # of a cache line
LEAST_NESTED = 256  # columns of a loop between whose turns something is loaded
LONG_LOOP = 2048  # columns from which the innermost loop is swept over alone
MOST_PARTIALS = 8192  # partial results that a program adds up: those of its rows
PROGRAMS_PER_MULTIPROCESSOR = 16  # to which rows are shared out
LEAST_PROGRAMS_PER_MULTIPROCESSOR = 4  # with which rows are not shared out to be read again
SUMMING_PROGRAMS_PER_MULTIPROCESSOR = 4  # to which rows are shared out that are also summed
_WARP_ELEMENTS = 1024  # of a block that a warp works on, of one operand

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
    may share a row (not with sums of any integers: partial results are floating, in float64 with
    ``has_integers``). The last ``sums`` of its results are sums over its rows, which the kernel
    ``NAME_sums`` completes."""

    sweeps: int
    reductions: int
    stores_columns: bool = False
    is_shared: bool = True
    has_integers: bool = False
    sums: int = 0


@dataclass(frozen=True)
class Block:
    """The rows and columns that a program works on at a time, and its warps. ``parts`` programs
    share a row; with 0 its columns are one block. Where there are sums over rows, a program works
    on ``turns`` blocks of rows, one after the other."""

    rows: int
    columns: int
    warps: int
    parts: int = 1
    turns: int = 1


class TritonSweeps:
    """The sweeping kernels of a package's ``triton_kernels.py``.

    Args:
        kernels: the module.
        op_name: ``FusedOp.name``, under which tuned blocks are kept.
        reducing: the kernels that reduce, by name.
        backward: whether the kernels are those of the backward.
        held: the names of the results that only later kernels read.
        pairs: the kernels with operands that may lie interleaved, each with the places of two such
            operands among all, the one with the first element before the other.
    """

    def __init__(
        self,
        kernels: ModuleType,
        op_name: str,
        reducing: Mapping[str, Reducing],
        backward: bool = False,
        held: Sequence[str] = (),
        pairs: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self._kernels = kernels
        self._op_name = op_name
        self._implementation = "triton_backward" if backward else "triton"
        self._reducing = dict(reducing)
        self._held = frozenset(f"{name}_pointer" for name in held)
        self._pairs = dict(pairs or {})

    def run(
        self, name: str, swept: Sweep, compute: torch.dtype, numbers: Sequence[int] = ()
    ) -> None:
        """Launch the kernel ``name`` over the sweep's loops; launch nothing if there are none.

        Args:
            compute: the dtype of the arithmetic, float32 or float64.
            numbers: sizes that the kernel computes with.
        """
        reducing = self._reducing.get(name)
        numbers = (*numbers, *swept.steps)
        sums = reducing.sums if reducing else 0
        if not (swept.rows.numel or sums) or not (reducing or swept.columns.numel):
            return
        kernel = getattr(self._kernels, name)
        pairs = self._pairs.get(name, ())
        paired = swept.in_pairs(pairs) if pairs else None
        swept = paired or swept
        tensors = [tensor for tensor in swept.tensors if tensor is not None]
        block = self._tuned(name, swept, reducing, tensors)
        constants = {
            **self._arithmetic(name, swept, compute, sums),
            "num_warps": block.warps,
            "WIDE": swept.is_wide,
            "BLOCK_ROWS": block.rows,
            "BLOCK_COLUMNS": block.columns,
            **({"PAIRED": paired is not None} if pairs else {}),
        }
        if reducing is None:
            across = ceil_div(swept.columns.numel, block.columns)
            programs = ceil_div(swept.rows.numel, block.rows) * across
            launch(kernel, (programs,), *tensors, *numbers, *_loops(swept), **constants)
            return
        nested_rows = _has_nested_rows(swept, block)
        blocks = _blocks_of_rows(swept, block, nested_rows)
        constants["NESTED_ROWS"] = nested_rows
        programs = ceil_div(blocks, block.turns)
        device = tensors[-1].device
        operands, results = tensors[: len(tensors) - sums], tensors[len(tensors) - sums :]
        if sums:
            cells = sums * programs * swept.columns.numel
            operands.append(torch.empty(cells, dtype=compute, device=device))
        loops = _rows_and_columns(swept, sums)
        if sums and not reducing.sweeps:
            grid = (programs, ceil_div(swept.columns.numel, block.columns))
            launch(kernel, grid, *operands, *numbers, *loops, **constants)
            self._add_up(name, swept, results, operands[-1], programs, constants)
            return
        partials = None
        sweeps = [(0, 1)]  # each launch's number, and the programs that share a row in it
        if block.parts > 1:
            cells = reducing.reductions * block.parts * programs * block.turns * block.rows
            kind = torch.float64 if reducing.has_integers else compute
            partials = torch.empty(cells, dtype=kind, device=device)
            last = block.parts if reducing.stores_columns else 1
            sweeps = [(sweep, block.parts) for sweep in range(1, reducing.sweeps + 1)]
            sweeps += [(reducing.sweeps + 1, last)]
        for sweep, parts in sweeps:
            launch(
                kernel,
                (programs, parts),
                *operands,
                partials,
                *numbers,
                *loops,
                **constants,
                NESTED_COLUMNS=_has_nested_columns(swept, block),
                SWEEP=sweep,
                PARTS=block.parts,
            )
        if sums:
            self._add_up(name, swept, results, operands[-1], programs, constants)

    def _add_up(
        self,
        name: str,
        swept: Sweep,
        results: Sequence[Tensor],
        shares: Tensor,
        programs: int,
        constants: Mapping[str, Any],
    ) -> None:
        """Launch the kernel that adds up what the programs of the kernel ``name`` have left."""
        columns = swept.columns.numel
        strides = swept.columns.strides[len(swept.tensors) - len(results) :]
        across = min(32, power_of_two(max(1, columns)))
        launch(
            getattr(self._kernels, f"{name}_sums"),
            (ceil_div(columns, across),),
            shares,
            *results,
            programs,
            swept.columns.sizes,
            *strides,
            COMPUTE=constants["COMPUTE"],
            WIDE=constants["WIDE"],
            BLOCK_SHARES=min(128, power_of_two(max(1, programs))),
            BLOCK_COLUMNS=across,
            num_warps=4,
        )

    def _arithmetic(
        self, name: str, swept: Sweep, compute: torch.dtype, sums: int
    ) -> dict[str, Any]:
        """Return the dtype of the arithmetic, and whether all results of a kernel are rounded to 16
        bits. What only later kernels read does not count; of a kernel that writes nothing else, the
        results count that are computed from it, where they are known."""
        import triton.language as tl

        written = [tensor for tensor in swept.tensors[swept.read :] if tensor is not None]
        end = sum(tensor is not None for tensor in swept.tensors) - sums
        own = len(written) - sums
        names = getattr(self._kernels, name).arg_names[end - own : end]
        if sums:
            names = [*names, *getattr(self._kernels, f"{name}_sums").arg_names[1 : 1 + sums]]
        results = [
            tensor for name, tensor in zip(names, written, strict=True) if name not in self._held
        ] or swept.for_results
        return {
            "COMPUTE": tl.float64 if compute == torch.float64 else tl.float32,
            "ROUNDED": bool(results)
            and all(one.is_floating_point() and one.element_size() == 2 for one in results),
        }

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
        elif reducing.sums and not reducing.sweeps:
            block = _columns(swept, width, doublings, tensors[-1].device)
        else:
            block = _rows(swept, width, doublings, reducing, tensors[-1].device)
        warps = power_of_two(max(1, int(block.warps * 2.0 ** int(config["warp_doublings"]))))
        return replace(block, warps=min(32, warps))


# --- the arguments of kernels ---------------------------------------------------------------------


def _loops(swept: Sweep) -> list[tuple[Any, ...]]:
    """Return the sizes of the loops of a kernel without reductions, then each operand's strides."""
    has_rows = swept.rows.numel > 1
    found = [(*swept.rows.sizes, *swept.columns.sizes) if has_rows else swept.columns.sizes]
    axes = zip(swept.on_rows, swept.on_columns, strict=True)
    for place, has_place in enumerate(map(any, axes)):
        if has_place or place >= swept.read:
            outer = swept.rows.strides[place] if has_rows else ()
            found.append(_known(swept, place, (*outer, *swept.columns.strides[place])))
    return found


def _rows_and_columns(swept: Sweep, sums: int) -> list[tuple[Any, ...]]:
    """Return the sizes of the loops of a kernel with reductions, then the strides of each operand
    but the sums over rows: those in the rows if it has an axis there, or is the result of a single
    row, and those in the columns."""
    found = [swept.rows.sizes, swept.columns.sizes]
    axes = list(zip(swept.on_rows, swept.on_columns, strict=True))
    for place, (on_rows, on_columns) in enumerate(axes[: len(axes) - sums]):
        if on_rows or (place >= swept.read and not on_columns):
            strides = swept.rows.strides[place]
            found.append(_known(swept, place, strides) if on_columns else strides)
        if on_columns:
            found.append(_known(swept, place, swept.columns.strides[place]))
    return found


def _known(swept: Sweep, place: int, strides: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the strides of an operand. A stride 0 of one that is read is a constant, so that it is
    read once along that loop; not where there is nothing to read."""
    import triton.language as tl

    is_read = place < swept.read and swept.tensors[place] is not None and swept.columns.numel > 0
    return tuple(tl.constexpr(0) if is_read and not step else step for step in strides)


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
    rows, columns = power_of_two(swept.rows.numel), max(1, swept.columns.numel)
    whole = power_of_two(columns)
    elements = int(TILE * 2.0**doublings)
    looped = int(LOOPED_BLOCK * 2.0**doublings)
    reads, writes = _full(swept)
    if swept.rows_are_contiguous:
        line = min(rows, LINE_BYTES // max(2, width))
        if line * whole <= ONE_BLOCK // 2:
            down, across = min(rows, max(line, elements // whole)), whole
        elif not reducing.sums and line // 2 * whole <= ONE_BLOCK:  # half cache lines, but once
            down, across = line // 2, whole
        else:
            is_light = reducing.stores_columns and not reducing.sums and reads < 2
            down, across = line, (looped if is_light else looped // 2) // line
    elif _has_steps_between(swept) and whole > looped:
        down, across = 1, _wide(swept.columns.sizes[-1], looped)
    elif whole <= ONE_BLOCK:
        if reads > 1 and reducing.stores_columns and not reducing.sums:
            elements //= 2
        down, across = min(rows, max(1, elements // whole)), whole
    else:
        down, across = 1, looped
    of_a_warp = _of_a_warp(swept, down, across, reducing, (reads, writes))
    block = Block(down, across, _warps(down * across, of_a_warp))
    parts = _parts(swept, block, device, reducing) if reducing.is_shared else 1
    if reducing.sums:
        blocks = ceil_div(swept.rows.numel, block.rows)
        block = replace(block, turns=_turns(blocks, 1, block.rows, across < columns, device))
        parts = _parts(swept, block, device, reducing) if parts > 1 else parts
    if parts > 1 and across >= columns:  # fewer columns at a time, for several programs
        block = replace(block, columns=max(16, across // parts))
    if parts == 1 and block.columns >= columns:
        parts = 0
    return replace(block, parts=parts)


def _of_a_warp(
    swept: Sweep, rows: int, columns: int, reducing: Reducing, full: tuple[int, int]
) -> int:
    """Return how many elements of a block with reductions a warp works on, as measured on an H200;
    ``full`` is what ``_full`` returns.

    More warps hide more of the memory's latency; fewer need fewer steps across warps to reduce a
    row, of which a block of neighbouring rows in memory has most.
    """
    reads, writes = full
    is_whole = columns >= swept.columns.numel
    if reducing.sums:
        return _WARP_ELEMENTS // 2
    if swept.rows_are_contiguous:
        return 2 * _WARP_ELEMENTS if is_whole else _WARP_ELEMENTS
    if is_whole:  # a row is kept in registers, that of each operand
        # Long rows of which results are kept too, and short ones of which none are.
        is_long = columns > 2 * TILE
        several = rows == 1 and reads > 1 and bool(writes) == is_long
        return _WARP_ELEMENTS // 2 if several else _WARP_ELEMENTS
    return _WARP_ELEMENTS if writes else _WARP_ELEMENTS // 2


def _full(swept: Sweep) -> tuple[int, int]:
    """Return how many operands that are read, and that are written, have an element for each row
    and column."""
    sizes = (*swept.rows.sizes, *swept.columns.sizes)
    strides = zip(swept.rows.strides, swept.columns.strides, strict=True)
    full = [
        all(step for size, step in zip(sizes, (*rows, *columns), strict=True) if size > 1)
        for rows, columns in strides
    ]
    return sum(full[: swept.read]), sum(full[swept.read :])


def _columns(swept: Sweep, width: int, doublings: int, device: torch.device) -> Block:
    """Return the block of a kernel that has sums over its rows and no other reductions."""
    tile = _tile(swept, width, doublings)
    blocks = ceil_div(swept.rows.numel, tile.rows)
    across = ceil_div(swept.columns.numel, tile.columns)
    return replace(tile, turns=_turns(blocks, across, tile.rows, False, device))


def _turns(blocks: int, across: int, rows: int, is_looped: bool, device: torch.device) -> int:
    """Return how many of the ``blocks`` of ``rows`` rows a program works on that sums over rows.

    Each program leaves a sum for every column, so that few rows for each would make what they leave
    as large as what they read; ``across`` programs share the columns. With ``is_looped`` the sums
    are in memory all the time.
    """
    processors = gpu_limits.multiprocessors(device)
    fitting = ceil_div(blocks * across, SUMMING_PROGRAMS_PER_MULTIPROCESSOR * processors)
    least = ceil_div(8 if is_looped else 4, rows)
    if not is_looped:
        least = min(least, ceil_div(blocks * across, processors))
    return max(1, min(blocks, max(fitting, least)))


def _blocks_of_rows(swept: Sweep, block: Block, nested: bool) -> int:
    """Return how many blocks the rows are."""
    if not nested:
        return ceil_div(swept.rows.numel, block.rows)
    inner = swept.rows.sizes[-1]
    return swept.rows.numel // inner * ceil_div(inner, block.rows)


def _parts(swept: Sweep, block: Block, device: torch.device, reducing: Reducing) -> int:
    """Return how many programs share a row, a power of two."""
    programs = ceil_div(ceil_div(swept.rows.numel, block.rows), block.turns)
    processors = gpu_limits.multiprocessors(device)
    wanted = PROGRAMS_PER_MULTIPROCESSOR * processors
    # Rows that are swept over twice come from the cache the second time, if one program does it.
    enough = LEAST_PROGRAMS_PER_MULTIPROCESSOR * processors if reducing.stores_columns else wanted
    if programs == 0 or 2 * programs > wanted or programs >= enough:
        return 1
    # A share of less than two blocks is not worth another launch.
    most = swept.columns.numel * block.rows // (2 * LOOPED_BLOCK)
    parts = min(wanted // programs, most, MOST_PARTIALS // block.rows)
    return max(1, power_of_two(parts + 1) // 2)


def _has_nested_columns(swept: Sweep, block: Block) -> bool:
    """Return whether the innermost loop of the columns is swept over alone, which saves divisions:
    one for each pack of elements, but one for each element if packs straddle its end. It also saves
    a load for each element where there are steps between turns of the loop."""
    inner = swept.columns.sizes[-1]
    is_long = inner >= (64 if inner % 16 else LONG_LOOP) or _has_steps_between(swept)
    return block.parts > 0 and len(swept.columns.sizes) > 1 and is_long


def _has_steps_between(swept: Sweep) -> bool:
    """Return whether the innermost loop of the columns is long, and an operand changes between its
    turns and not in it: as the weight of a channel does."""
    steps = swept.columns.strides
    return (
        len(swept.columns.sizes) > 1
        and swept.columns.sizes[-1] >= LEAST_NESTED
        and any(not step[-1] and any(step[:-1]) for step in steps[: swept.read])
    )


def _wide(size: int, most: int) -> int:
    """Return the largest power of two up to ``most`` whose multiples exceed ``size`` by no more
    than a third; a block with some columns too many is better than more blocks."""
    most = min(most, power_of_two(size))
    while most > LEAST_NESTED and 3 * (ceil_div(size, most) * most - size) > size:
        most //= 2
    return most


def _has_nested_rows(swept: Sweep, block: Block) -> bool:
    """Return whether a block has rows of one turn of their innermost loop only, so that what does
    not change in that loop is loaded once for the block."""
    inner = swept.rows.sizes[-1]
    wasted = ceil_div(inner, block.rows) * block.rows - inner
    return block.rows > 1 and len(swept.rows.sizes) > 1 and 8 * wasted <= inner


def _fitting(size: int, most: int) -> int:
    """Return the largest power of two up to ``most`` whose multiples exceed ``size`` by no more
    than an eighth; if there is none, that which exceeds it least."""
    most = min(max(1, most), power_of_two(max(1, size)))
    candidates = [most >> shift for shift in range(most.bit_length()) if most >> shift >= 16]
    excess = {one: ceil_div(size, one) * one - size for one in candidates or [most]}
    fitting = [one for one in excess if 8 * excess[one] <= size]
    return fitting[0] if fitting else min(excess, key=lambda one: (excess[one], -one))


def _warps(elements: int, of_a_warp: int) -> int:
    """Return the warps of a block, each with about ``of_a_warp`` elements."""
    return max(2, min(16, power_of_two(ceil_div(elements, of_a_warp))))
