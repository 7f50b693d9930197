"""Launches of Triton kernels that sweep over rows and columns (``runtime/sweep.py``).

``triton_loops.py`` has what the kernels call, ``triton_blocks.py`` chooses what a program works on,
and how many programs share a row: where there are too few rows to fill the GPU, each sweep over the
columns becomes a launch of its own, and the programs of a row leave their partial results in a
workspace. They are added in a fixed order, so that results are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuselab.runtime import gpu_limits
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.sweep import Sweep
from fuselab.runtime.triton_blocks import (
    LEAST_PROGRAMS_PER_MULTIPROCESSOR,
    MOST_BYTES,
    MOST_WARPS,
    Block,
    Reducing,
    block_of_columns,
    block_of_rows,
    blocks_of_rows,
    counts_of,
    has_nested_columns,
    has_nested_rows,
    is_read_once,
    tile,
)
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.tuning import Config, chosen

# What tuning may choose from: how often the elements of a block and its warps are doubled, from the
# choice that is made by size. The first is that choice itself.
CONFIGS = tuple(
    Config(block_doublings=block, warp_doublings=warps)
    for block, warps in (
        *((0, 0), (-1, 0), (1, 0), (2, 0), (0, -1), (0, 1)),
        *((1, 1), (-1, -1), (-1, 1), (1, -1), (2, 1)),
    )
)

# Of partial results that the programs of a kernel read in the whole; timed at two shapes,
# batch norms of 64 x 64 x 56 x 56 and 64 x 256 x 28 x 28 in channels-last order.
MOST_READ_BYTES = 1 << 21
MOST_MEMBERS = 128  # tensors of a list in one launch: a program finds its own among all of them
MEMBER_BYTES = 8192  # of the widest operand, that a program of such a launch owns
# Of a kernel with reductions for lists: the columns of a row that one program sweeps over at most,
# if programs can share it, the blocks of them that it has at least, and how often the columns of
# tensors in one launch may be doubled.
SHARED_COLUMNS = 1 << 14
SHARES = 2
LIKE_DOUBLINGS = 3
LEAST_ACROSS = 8  # columns of a program that adds up shares: those of a sector in float32
ADDED = 2048  # shares of columns that such a program reads at least, where there are enough columns


def configs(*args: Any) -> Sequence[Config]:
    """Return what tuning may choose from, for any arguments (``FusedOp.configs``)."""
    return CONFIGS


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
        windows: Sequence[str] = (),
    ) -> None:
        self._kernels = kernels
        self._op_name = op_name
        self._implementation = "triton_backward" if backward else "triton"
        self._reducing = dict(reducing)
        self._held = frozenset(f"{name}_pointer" for name in held)
        self._pairs = dict(pairs or {})
        self._windows = frozenset(windows)

    def run(
        self, name: str, swept: Sweep, compute: torch.dtype, numbers: Sequence[int] = ()
    ) -> None:
        """Launch the kernel ``name`` over the sweep's loops; launch nothing if there are none.

        Args:
            compute: the dtype of the arithmetic, float32 or float64.
            numbers: sizes that the kernel computes with.
        """
        if name in self._windows:
            swept = swept.over_elements()
        swept = swept.with_rows_apart()
        self._launch(name, swept, compute, numbers)
        swept.copy_back()

    def run_each(self, name: str, sweeps: Sequence[Sweep], compute: torch.dtype) -> None:
        """Launch a kernel for the tensors of lists once for up to ``MOST_MEMBERS`` of them that
        have the same dtypes and alignment."""
        if name in self._reducing:
            self._reduce_each(name, sweeps, compute)
            return
        lines = [one.in_one_line() for one in sweeps if one.rows.numel * one.columns.numel]
        alike: dict[tuple[Any, ...], list[Sweep]] = {}
        for one in lines:
            tensors = [tensor for tensor in one.tensors if tensor is not None]
            dtypes = tuple(tensor.dtype for tensor in tensors)
            vectors = [each for place, each in enumerate(tensors) if one.columns.strides[place][-1]]
            is_packed = _has_packs(one.columns.numel, vectors)
            alike.setdefault((dtypes, is_packed, one.is_wide), []).append(one)
        for (dtypes, is_packed, is_wide), members in alike.items():
            widest = max(dtype.itemsize for dtype in dtypes)
            constants = {
                **self._arithmetic(name, members[0], compute, 0),
                "WIDE": is_wide,
                "PACKED": is_packed,
                "BLOCK": MEMBER_BYTES // widest,
                "num_warps": 4,
            }
            for begin in range(0, len(members), MOST_MEMBERS):
                part = members[begin : begin + MOST_MEMBERS]
                counts = [one.rows.numel * one.columns.numel for one in part]
                programs = [ceil_div(count, int(constants["BLOCK"])) for count in counts]
                launch(
                    getattr(self._kernels, name),
                    (sum(programs),),
                    *zip(*(one.tensors for one in part), strict=True),
                    tuple(map(number, [0, *accumulate(programs)][:-1])),
                    tuple(map(number, counts)),
                    **constants,
                )
        for one in lines:
            one.copy_back()

    def _reduce_each(self, name: str, sweeps: Sequence[Sweep], compute: torch.dtype) -> None:
        """Launch a kernel with reductions for the tensors of lists: where no row is long, once for
        up to ``MOST_MEMBERS`` that have the same dtypes and alignment and similar columns."""
        members = [one.in_rows_and_columns() for one in sweeps if one.rows.numel]
        alike: dict[tuple[Any, ...], list[Sweep]] = {}
        for one in members:
            tensors = [tensor for tensor in one.tensors if tensor is not None]
            dtypes = tuple(tensor.dtype for tensor in tensors)
            columns = one.columns.numel
            vectors = [
                tensor
                for tensor, on_columns in zip(one.tensors, one.on_columns, strict=True)
                if tensor is not None and on_columns
            ]
            is_packed = _has_packs(columns, vectors)
            length = power_of_two(max(1, columns)).bit_length() // LIKE_DOUBLINGS
            length = min(length, SHARED_COLUMNS.bit_length() // LIKE_DOUBLINGS)
            key = (dtypes, is_packed, one.is_wide, one.rows.numel == 1, length, one.apart)
            alike.setdefault(key, []).append(one)
        for key, found in alike.items():
            for begin in range(0, len(found), MOST_MEMBERS):
                part = found[begin : begin + MOST_MEMBERS]
                self._reduce_together(name, part, compute, *key[1:4])
        for one in members:
            one.copy_back()

    def _reduce_together(
        self,
        name: str,
        members: Sequence[Sweep],
        compute: torch.dtype,
        is_packed: bool,
        is_wide: bool,
        has_one_row: bool,
    ) -> None:
        """Launch a kernel with reductions for tensors of lists: once, or if some have long rows,
        once for each sweep, with programs that share them."""
        reducing, kernel = self._reducing[name], getattr(self._kernels, name)
        tensors = [tensor for tensor in members[0].tensors if tensor is not None]
        widest = max(tensor.element_size() for tensor in tensors)
        heights = [one.rows.numel for one in members]
        widths = [one.columns.numel for one in members]
        block = MEMBER_BYTES // max(4, widest)
        block_columns = min(block, power_of_two(max(MOST_BYTES, *widths)))
        block_rows = 1 if has_one_row else max(1, block // block_columns)
        blocks = [ceil_div(height, block_rows) for height in heights]
        # Programs cannot share a row whose result lies where they read the old one.
        longest = max(widths)
        share = max(block_columns, power_of_two(longest))
        if not members[0].apart:
            processors = gpu_limits.multiprocessors(tensors[-1].device)
            elements = sum(map(math.prod, zip(heights, widths, strict=True)))
            wanted = LEAST_PROGRAMS_PER_MULTIPROCESSOR * processors
            fair = power_of_two(ceil_div(elements, wanted * block_rows))
            share = min(share, SHARED_COLUMNS, max(SHARES * block_columns, fair))
        is_shared = longest > share
        shares = [max(1, ceil_div(width, share)) for width in widths]
        leaving = [one * own for one, own in zip(blocks, shares, strict=True)]
        partials = None
        launches = [(0, leaving)]  # each sweep's number and the programs of each tensor
        if is_shared:
            cells = reducing.reductions * sum(leaving) * block_rows
            partials = torch.empty(cells, dtype=compute, device=tensors[-1].device)
            last = leaving if reducing.stores_columns else blocks
            sweeps = range(1, reducing.sweeps + 1)
            launches = [*((sweep, leaving) for sweep in sweeps), (reducing.sweeps + 1, last)]
        constants = {
            **self._arithmetic(name, members[0], compute, 0),
            "WIDE": is_wide,
            "PACKED": is_packed,
            "ONE_ROW": has_one_row,
            "SHARE": share,
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
            "num_warps": 4,
        }
        for sweep, programs in launches:
            launch(
                kernel,
                (sum(programs),),
                *zip(*(one.tensors for one in members), strict=True),
                partials,
                *(_numbers([0, *accumulate(one)][:-1]) for one in (programs, leaving)),
                *(_numbers(one) for one in (heights, widths)),
                **constants,
                SWEEP=sweep,
                SHARED=is_shared and programs is leaving,
            )

    def _launch(
        self, name: str, swept: Sweep, compute: torch.dtype, numbers: Sequence[int]
    ) -> None:
        reducing = self._reducing.get(name)
        numbers = (*numbers, *swept.steps)
        sums = reducing.sums if reducing else 0
        if not (swept.rows.numel or sums) or not (reducing or swept.columns.numel):
            return
        kernel = getattr(self._kernels, name)
        if reducing is None:
            swept = swept.by_result()
        pairs = self._pairs.get(name, ())
        paired = swept.in_pairs(pairs) if pairs else None
        swept = paired or swept
        tensors = [tensor for tensor in swept.tensors if tensor is not None]
        width = max(tensors, key=Tensor.numel).dtype.itemsize
        block = self._tuned(name, swept, reducing, tensors, width)
        constants = {
            **self._arithmetic(name, swept, compute, sums),
            "num_warps": block.warps,
            "WIDE": swept.is_wide,
            "BLOCK_ROWS": block.rows,
            "BLOCK_COLUMNS": block.columns,
            **({"PAIRED": paired is not None} if pairs else {}),
        }
        if reducing is None:
            constants["COLUMN_LOOPS"] = block.column_loops
            rows, columns = counts_of(swept, block.column_loops)
            programs = ceil_div(rows, block.rows) * ceil_div(columns, block.columns)
            counts = (rows, *_with_factor(columns))
            loops = _loops(swept, block.column_loops)
            launch(kernel, (programs,), *tensors, *numbers, counts, *loops, **constants)
            return
        nested_rows = has_nested_rows(swept, block)
        blocks = blocks_of_rows(swept, block, nested_rows)
        constants["NESTED_ROWS"] = nested_rows
        programs = ceil_div(blocks, block.turns)
        device = tensors[-1].device
        if "UNROLL" in kernel.arg_names:
            constants["UNROLL"] = swept.columns.numel if block.is_window else 1
        operands, results = tensors[: len(tensors) - sums], tensors[len(tensors) - sums :]
        if sums:
            cells = sums * programs * swept.columns.numel
            operands.append(torch.empty(cells, dtype=compute, device=device))
        loops = _rows_and_columns(swept, sums, block.is_window)
        if sums and not reducing.sweeps:
            grid = (programs, ceil_div(swept.columns.numel, block.columns))
            launch(kernel, grid, *operands, *numbers, *loops, **constants)
            self._add_up(name, swept, results, operands[-1], programs, constants)
            return
        partials = None
        # Each launch's number, the programs that share a row in it, and how many sweeps have been
        # joined before it.
        sweeps = [(0, 1, 0)]
        if block.parts > 1:
            shares = block.parts + 1  # and what they are joined to
            cells = reducing.reductions * shares * programs * block.turns * block.rows
            kind = torch.float64 if reducing.has_integers else compute
            partials = torch.empty(cells, dtype=kind, device=device)
            sweeps = launches_of(reducing, block.parts, cells * partials.element_size())
        for sweep, parts, joined in sweeps:
            launch(
                kernel,
                (programs, parts),
                *operands,
                partials,
                *numbers,
                *loops,
                **constants,
                NESTED_COLUMNS=has_nested_columns(swept, block),
                SWEEP=sweep,
                PARTS=block.parts,
                JOINED=joined,
                ONCE=is_read_once(swept, width, block, reducing, sweep, device),
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
        shared = power_of_two(max(1, programs))
        across = min(max(32, ADDED // shared), power_of_two(max(1, columns)))
        processors = gpu_limits.multiprocessors(shares.device)
        while across > LEAST_ACROSS and len(results) * ceil_div(columns, across) < processors:
            across //= 2
        launch(
            getattr(self._kernels, f"{name}_sums"),
            (ceil_div(columns, across), len(results)),
            shares,
            *results,
            programs,
            swept.columns.sizes,
            divisors(swept, swept.columns.sizes),
            *strides,
            COMPUTE=constants["COMPUTE"],
            WIDE=constants["WIDE"],
            BLOCK_SHARES=min(4096 // across, shared),
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
        self,
        name: str,
        swept: Sweep,
        reducing: Reducing | None,
        tensors: Sequence[Tensor],
        width: int,
    ) -> Block:
        """Return the block of a kernel: by size, changed as tuning has found. The widest element
        has ``width`` bytes."""
        key = (
            name,
            f"{8 * width}-bit",
            power_of_two(swept.rows.numel),
            power_of_two(max(1, swept.columns.numel)),
        )
        config = chosen(self._op_name, self._implementation, key, CONFIGS)
        doublings = int(config["block_doublings"])
        if reducing is None:
            block = tile(swept, width, doublings)
        elif reducing.sums and not reducing.sweeps:
            block = block_of_columns(swept, width, doublings, tensors[-1].device)
        else:
            block = block_of_rows(swept, width, doublings, reducing, tensors[-1].device)
        warps = power_of_two(max(1, int(block.warps * 2.0 ** int(config["warp_doublings"]))))
        return replace(block, warps=min(MOST_WARPS, warps))


def _has_packs(columns: int, tensors: Sequence[Tensor]) -> bool:
    """Return whether a thread can load ``MOST_BYTES`` at once all along rows of so many columns."""
    divides = columns % MOST_BYTES == 0
    return divides and all(tensor.data_ptr() % MOST_BYTES == 0 for tensor in tensors)


def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(number, values))


def number(value: int) -> int:
    """Return a number as kernels for lists take it: odd and above 2^31 whatever it is, so that no
    number needs a kernel of its own."""
    return (value << 1 | 1) + (1 << 62)


def launches_of(reducing: Reducing, parts: int, left_bytes: int) -> list[tuple[int, int, int]]:
    """Return the number of each launch of a kernel whose rows ``parts`` programs share, how many of
    them run in it, and how many sweeps have been joined before it.

    ``left_bytes`` is what the programs leave. Where all of them would read much of it, a launch
    joins it first.
    """
    last = parts if reducing.stores_columns else 1
    readers = (reducing.sweeps - 1) * parts + last
    joins = not reducing.sums and readers > 1 and readers * left_bytes > MOST_READ_BYTES
    found = []
    for sweep in range(1, reducing.sweeps + 1):
        before = sweep - 1 if joins else 0
        found.append((sweep, parts, before))
        if joins:
            found.append((-sweep, 1, before))
    return [*found, (reducing.sweeps + 1, last, reducing.sweeps if joins else 0)]


# --- the arguments of kernels ---------------------------------------------------------------------


def _loops(swept: Sweep, column_loops: int) -> list[tuple[Any, ...]]:
    """Return the sizes of the loops of a kernel without reductions and their divisors, then each
    operand's strides; behind those of several loops over columns, the one between neighbouring
    columns if they are all as far apart."""
    import triton.language as tl

    sizes = swept.sizes
    found = [sizes, divisors(swept, sizes)]
    rows = len(sizes) - column_loops
    for place, has_place in enumerate(map(any, zip(swept.on_rows, swept.on_columns, strict=True))):
        if not has_place and place < swept.read:
            continue
        strides = swept.strides(place)
        if column_loops == 1:
            found.append(_factored(_known(swept, place, strides)))
        elif swept.is_even(place, column_loops):
            outer = _known(swept, place, strides[:rows])
            inner = (tl.constexpr(0),) * column_loops
            found.append((*outer, *inner, *_known(swept, place, strides[-1:])))
        else:
            found.append((*_known(swept, place, strides), tl.constexpr(0)))
    return found


def divisors(swept: Sweep, sizes: Sequence[int], may_have_packs: bool = True) -> tuple[Any, ...]:
    """Return what divides by the sizes of loops, for ``triton_loops.position_of``, where packs of
    neighbours may be loaded at once, or not."""
    import triton.language as tl

    def is_plain(size: int) -> bool:
        return swept.is_wide or size < 2 or (size % 16 == 0 and may_have_packs)

    return tuple(tl.constexpr(0) if is_plain(size) else divisor(size) for size in sizes)


def divisor(size: int) -> int:
    """Return a factor and a shift that divide by a size of at least 2, in one number, for
    ``triton_loops.quotient_of``.

    With 2^s < size <= 2^(s+1) and the factor f = ceil(2^(32+s) / size), the quotient of an index n
    below 2^31 is n * f >> (32 + s): f * size exceeds 2^(32+s) by less than size, which adds to
    n / size less than n / 2^(31+s) / size, too little to reach the next integer. The number is odd
    and above 2^31 for any size, so that no size needs a kernel of its own.
    """
    shift = (size - 1).bit_length() - 1
    factor = -(-(1 << 32 + shift) // size)
    return factor << 8 | shift << 1 | 1


def _rows_and_columns(swept: Sweep, sums: int, has_windows: bool) -> list[tuple[Any, ...]]:
    """Return the sizes of the loops of a kernel with reductions and their divisors, then the
    strides of each operand but the sums over rows: those in the rows if it has an axis there, or is
    the result of a single row, and those in the columns. The sizes of windows are constants."""
    import triton.language as tl

    rows, columns = swept.rows.sizes, swept.columns.sizes
    found: list[tuple[Any, ...]] = [rows, divisors(swept, rows, not has_windows)]
    if has_windows:
        found += [tuple(map(tl.constexpr, columns)), (tl.constexpr(0),) * len(columns)]
    else:
        counts = _with_factor(columns[0]) if len(columns) == 1 else columns
        found += [counts, divisors(swept, columns)]
    axes = list(zip(swept.on_rows, swept.on_columns, strict=True))
    for place, (on_rows, on_columns) in enumerate(axes[: len(axes) - sums]):
        if on_rows or (place >= swept.read and not on_columns):
            strides = swept.rows.strides[place]
            found.append(_factored(_known(swept, place, strides) if on_columns else strides))
        if on_columns:
            found.append(_known(swept, place, swept.columns.strides[place]))
    return found


def _with_factor(count: int) -> tuple[Any, ...]:
    """Return a number of columns; behind it, as a constant, the power of two that divides it, if
    that is less than the 16 that the compiler looks for itself. Packs of so many elements are whole
    then, and loaded at once."""
    import triton.language as tl

    factor = math.gcd(count, MOST_BYTES)
    return (count // factor, tl.constexpr(factor)) if 1 < factor < MOST_BYTES else (count,)


def _factored(strides: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the strides of an operand; behind them, as a constant, a power of two by which those
    that are not 1 are divided, for the reason of ``_with_factor``. A stride of 1 is a constant."""
    import triton.language as tl

    steps = [step for step in strides if isinstance(step, int) and step > 1]
    factor = math.gcd(MOST_BYTES, *steps) if steps else 1
    if factor == MOST_BYTES:
        return strides
    while factor > 1 and factor in steps:  # a quotient of 1 would be taken for a stride of 1
        factor //= 2
    if factor == 1:
        return strides

    def divided(step: Any) -> Any:
        if not isinstance(step, int):
            return step
        return step // factor if step > 1 else tl.constexpr(step)

    return (*map(divided, strides), tl.constexpr(factor))


def _known(swept: Sweep, place: int, strides: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the strides of an operand. A stride 0 of one that is read is a constant, so that it is
    read once along that loop; not where there is nothing to read."""
    import triton.language as tl

    has_elements = swept.tensors[place] is not None or any(strides)
    is_read = place < swept.read and has_elements and swept.columns.numel > 0
    return tuple(tl.constexpr(0) if is_read and not step else step for step in strides)
