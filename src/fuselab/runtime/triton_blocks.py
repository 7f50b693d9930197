"""Choose the blocks of Triton kernels that sweep over rows and columns (``triton_sweep.py``).

A block is what a program works on at a time. The sizes are what was fastest on an H200 over the
shapes of ``benchmarks/eject_suite``; tuning multiplies them. ``NEIGHBOURS_PER_MULTIPROCESSOR`` was
timed at one shape, 16384 x 2048 in bfloat16, ``WARPS_PER_MULTIPROCESSOR`` and ``LEAST_SPREAD`` in
float32 at none, ``SUMMING_WARPS_PER_MULTIPROCESSOR`` there at norms of 72 and 744 columns. What
holds for narrow loads, for rows apart and for many operands was timed at one or two functions each,
``MOST_VARIED`` at 3 and not at 4, ``CHOSEN_OF_A_WARP`` at 256 and 1024, the shares of
``SHARING_PROGRAMS_PER_MULTIPROCESSOR`` at 2 and 4 in losses over 36,864 to 819,200 elements;
``FEW_TURNS`` at none. Long rows that are swept over several times were timed at softmax, norms and
their gradients of 12288 to 65536 columns, with two operands at most; windows at pools of 4 to 27
elements, ``MOST_LOADS`` at 9 and 18, ``WINDOW_TILE`` at 256, 512 and 1024. Tiles with values of
rows were timed at the gradient of cross entropy of 10, 100, 1000 and 50257 classes: whole rows at
100, ``TILE`` elements of odd rows at 50257.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fuselab.runtime import gpu_limits
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.sweep import MOST_SHARING, Sweep

TILE = 2048  # elements of a tile that changes the order of its elements, or of short rows
FLAT_TILE = 1024  # elements of any other tile of a kernel without reductions
SCATTERED_TILE = 512  # elements of a tile that loads each of them by itself
ONE_BLOCK = 16384  # the most elements of rows that are kept in registers as a whole
LOOPED_BLOCK = 4096  # elements of a block of longer rows
LONG_BLOCK = 8192  # elements of a block of rows that are swept over several times
LINE_BYTES = 128  # of a cache line
MOST_PAIRED = 8  # columns that are visited one by one where rows share all that is read
PAIRED_ROWS = 1024  # of a block of such rows
SEVERAL = 4  # operands along the columns that are worth reading for several rows at a time
ROWS_OF_SEVERAL = 16  # that a program has then
SHARING_ROWS = 128  # that a program has where neighbours share elements,
SHARED_COLUMNS = 16  # and columns
MOST_SUMMED = 5  # operands of several rows at a time of a kernel that also sums over rows
MOST_OPERANDS = 8  # with which a thread has a full number of elements in registers
MOST_HELD = 3  # operands and reductions of a block of neighbouring rows, likewise
MOST_VARIED = 4  # operands of such a block with which a thread has a full number of elements
MOST_CHOSEN = 32  # columns of a window that are visited one by one, each in many rows
SHUFFLED_COLUMNS = 128  # of a tile whose columns lie in several loops and apart in memory
MOST_LOADS = 16  # of elements of windows for a row, with which a thread has several rows
WINDOW_ROWS = 256  # of a block of windows whose size the compiler does not know
CHOSEN_OF_A_WARP = 256  # elements of a block of rows, of which a warp computes several places each
LEAST_ACROSS = 32  # columns of a tile of windows in one loop, where there are as many
WINDOW_TILE = 512  # elements of a tile that walk over windows
MOST_BYTES = 16  # that a thread loads at once
SECTOR_BYTES = 32  # the least that is read of it
LEAST_NESTED = 256  # columns of a loop between whose turns something is loaded
LEAST_SPREAD = 256  # elements of a block of rows that is not made smaller to have more programs
FEW_COLUMNS = 16  # that a warp reduces alone
LONG_LOOP = 2048  # columns from which the innermost loop is swept over alone
MOST_PARTIALS = 8192  # partial results that a program adds up: those of its rows
PROGRAMS_PER_MULTIPROCESSOR = 16  # to which rows are shared out
NEIGHBOURS_PER_MULTIPROCESSOR = 2  # to which rows are shared out that are neighbours in memory
WARPS_PER_MULTIPROCESSOR = 12  # below which blocks of shared rows are enlarged
LEAST_PROGRAMS_PER_MULTIPROCESSOR = 4  # with which rows are not shared out to be read again
SHARING_PROGRAMS_PER_MULTIPROCESSOR = 4  # for which shares of rows are made short
SUMMING_PROGRAMS_PER_MULTIPROCESSOR = 4  # to which rows are shared out that are also summed,
FEW_TURNS = 16  # of a program that also sums, with which it gets more warps in float32
SUMMING_WARPS_PER_MULTIPROCESSOR = 16  # or more, if they have few warps
MOST_WARPS = 32  # of a program
_WARP_ELEMENTS = 1024  # of a block that a warp works on, of one operand
_LONG_WARP_ELEMENTS = 256  # likewise, of long rows
_FEW_OF_A_WARP = 128  # elements of each of many operands
LEAST_ROWS = 4  # of a block of short rows with narrow loads
_SHORT = 512  # columns of rows of which a program gets fewer where several operands are read


@dataclass(frozen=True)
class Reducing:
    """A kernel that reduces: how many sweeps over its columns reduce, in how many reductions,
    whether results with an element for each column take another sweep, and whether several programs
    may share a row (not with sums of any integers: partial results are floating, in float64 with
    ``has_integers``). The last ``sums`` of its results are sums over its rows, which the kernel
    ``NAME_sums`` completes. ``idle`` sweeps, of all, load no element of a column."""

    sweeps: int
    reductions: int
    stores_columns: bool = False
    is_shared: bool = True
    has_integers: bool = False
    sums: int = 0
    idle: int = 0


@dataclass(frozen=True)
class Block:
    """The rows and columns that a program works on at a time, and its warps. ``parts`` programs
    share a row; with 0 its columns are one block. Where there are sums over rows, a program works
    on ``turns`` blocks of rows, one after the other. Without reductions, ``column_loops`` loops are
    the columns, the others the rows. The columns of ``is_window`` are visited one by one."""

    rows: int
    columns: int
    warps: int
    parts: int = 1
    turns: int = 1
    column_loops: int = 1
    is_window: bool = False


def counts_of(swept: Sweep, column_loops: int) -> tuple[int, int]:
    """Return the number of rows and of columns, which are the last loops."""
    sizes = swept.sizes
    first = len(sizes) - column_loops
    return math.prod(sizes[:first]), math.prod(sizes[first:])


def tile(swept: Sweep, width: int, doublings: int) -> Block:
    """Return the tile of a kernel without reductions, but for those of small windows; the widest
    element has ``width`` bytes."""
    if swept.window:
        return _tile_of_windows(swept, width, doublings)
    loops = _column_loops(swept, width)
    elements = FLAT_TILE
    if loops > 1 or not _values_of_rows(swept):
        return _tile(swept, width, doublings, elements, loops)
    columns = swept.sizes[-1]
    whole = power_of_two(columns)
    if columns > elements and columns % max(1, 16 // width):
        elements = TILE  # each is a load of its own
    block = _tile(swept, width, doublings, elements, loops)
    if block.columns < whole <= block.rows * block.columns and 4 * columns >= 3 * whole:
        # Values of rows are loaded once for whole rows.
        block = replace(block, rows=block.rows * block.columns // whole, columns=whole)
    return block


def _tile(swept: Sweep, width: int, doublings: int, elements: int, loops: int) -> Block:
    """Return a tile whose columns are the last ``loops`` loops. Where an operand is transposed,
    tiles are square, so that cache lines are used whole. Where elements are loaded one by one, many
    for each thread would be many cache lines for each."""
    rows, columns = counts_of(swept, loops)
    # Fewer columns than fill a sector make no tile that uses sectors whole.
    is_transposed = _lies_apart(swept, width) and columns * width >= SECTOR_BYTES
    of_a_warp = 512
    if is_transposed and loops == 1:
        elements = TILE
        of_a_warp = _WARP_ELEMENTS // max(2, width)
    elif is_transposed or (columns < SCATTERED_TILE and _is_scattered(swept)):
        elements = SCATTERED_TILE
    elements = int(elements * 2.0**doublings)
    reads, _ = _full(swept)
    if swept.read > MOST_OPERANDS:  # a thread has an element of each in its registers
        of_a_warp = min(of_a_warp, _FEW_OF_A_WARP)
    if not (reads or is_transposed or swept.steps):  # it writes alone
        # What lies along long columns is read again for each row.
        of_columns = _of_columns(swept)
        is_long = of_columns and columns >= FLAT_TILE
        elements *= 2 if of_columns >= SEVERAL else 1 if is_long else 4
    if is_transposed:
        across = SHUFFLED_COLUMNS if loops > 1 else max(16, LINE_BYTES // max(2, width))
        across = min(across, power_of_two(columns))
    else:
        across = _fitting(columns, elements)
        if not (reads or swept.steps) and _of_columns(swept) >= SEVERAL:
            across = min(across, elements // 4)
    down = min(max(1, elements // across), power_of_two(rows))
    least = 1 if elements <= SCATTERED_TILE else 2
    return Block(down, across, _warps(down * across, of_a_warp, least), column_loops=loops)


def _tile_of_windows(swept: Sweep, width: int, doublings: int) -> Block:
    """Return the tile of a kernel whose elements walk over windows. A thread has all elements of
    its windows in registers: it gets one pack where neighbours in memory are columns, else few."""
    block = _tile(swept, width, doublings, WINDOW_TILE, _loops_of_windows(swept))
    strides = zip(swept.tensors[: swept.read], swept.columns.strides, strict=False)
    steps = [one[-1] for tensor, one in strides if tensor is not None]
    if any(step == 1 for step in steps):
        of_a_thread = max(1, MOST_BYTES // width)
    else:
        of_a_thread = 4 if swept.window * swept.chosen <= MOST_LOADS else 2
    return replace(block, warps=_warps(block.rows * block.columns, 32 * of_a_thread, 1))


def _loops_of_windows(swept: Sweep) -> int:
    """Return how many loops are the columns of a tile that walks over windows: the innermost, as
    far as tiles of it are wide and filled."""
    loops, columns = 1, swept.sizes[-1]
    while loops < len(swept.sizes):
        across = _fitting(columns, WINDOW_TILE)
        excess = ceil_div(columns, across) * across - columns
        if across >= min(LEAST_ACROSS, power_of_two(columns)) and 7 * excess <= columns:
            break
        loops += 1
        columns *= swept.sizes[-loops]
    return loops


def _is_scattered(swept: Sweep) -> bool:
    """Return whether neighbouring columns of an operand that is read may not be neighbours in
    memory: where the kernel computes the places of its elements, or steps over some."""
    strides = swept.columns.strides[: swept.read]
    return bool(swept.steps) or any(one[-1] not in (0, 1) for one in strides)


def _lies_apart(swept: Sweep, width: int) -> bool:
    """Return whether neighbouring columns of an operand lie in different sectors of memory."""
    return any(one[-1] * width > SECTOR_BYTES for one in swept.columns.strides)


def _column_loops(swept: Sweep, width: int) -> int:
    """Return how many loops of a kernel without reductions are the columns of its tiles: one if
    packs of its elements end where it ends, or if the kernel computes where they lie, which it does
    once for a row then; else as many as make packs end there, or straddle the end rarely, among
    those that the first result walks with one step. Where columns of an operand lie apart, they
    need not be more than fill a cache line."""
    sizes = swept.sizes
    if len(sizes) == 1 or sizes[-1] % 16 == 0 or swept.steps:
        return 1
    # In a tile with rows, a value of a row is loaded once for them. Where packs are not whole,
    # each other element is then a load of its own.
    of_rows = _values_of_rows(swept)
    if of_rows and (sizes[-1] % max(1, 16 // width) == 0 or of_rows > sum(_full(swept))):
        return 1
    loops, columns = 1, sizes[-1]
    enough = LINE_BYTES // max(2, width) if _lies_apart(swept, width) else TILE
    if enough < TILE and columns * width >= SECTOR_BYTES:
        return 1
    while (
        loops < len(sizes)
        and (columns < enough or (columns % 16 and enough == TILE))
        and swept.is_even(swept.read, loops + 1)
    ):
        loops += 1
        columns *= sizes[-loops]
    return loops


def _values_of_rows(swept: Sweep) -> int:
    """Return how many operands that are read have one element for each row, as the kernel's loops
    but the innermost are."""
    return sum(
        tensor is not None and not steps[-1] and any(steps)
        for tensor, steps in zip(
            swept.tensors[: swept.read], map(swept.strides, range(swept.read)), strict=True
        )
    )


def block_of_rows(
    swept: Sweep, width: int, doublings: int, reducing: Reducing, device: torch.device
) -> Block:
    """Return the block of a kernel with reductions. Where rows are neighbours in memory, a block
    has so many that it reads whole cache lines."""
    rows, columns = power_of_two(swept.rows.numel), max(1, swept.columns.numel)
    whole = power_of_two(columns)
    elements = int(TILE * 2.0**doublings)
    looped = int(LOOPED_BLOCK * 2.0**doublings)
    reads, writes = _full(swept)
    is_light = reducing.stores_columns and not reducing.sums and reads < 2
    reduces_only = not reducing.stores_columns and not reducing.sums
    is_single = bool(writes) and reduces_only and reducing.sweeps - reducing.idle == 1
    is_long = False
    if columns <= MOST_CHOSEN and not reducing.sums and _are_chosen(swept):
        down = min(rows, int(WINDOW_ROWS * 2.0**doublings))
        # So many elements of operands with windows are loaded for each row, all of them at once.
        loads = columns * swept.chosen
        return Block(down, 1, _warps(down, 128 if loads <= MOST_LOADS else 64), is_window=True)
    if columns <= MOST_PAIRED and not reads and reduces_only:
        down = min(rows, int(PAIRED_ROWS * 2.0**doublings))
        return Block(down, 1, _warps(down, 256))
    if swept.rows_are_contiguous:
        # Of rows that share elements, some more are a cache line.
        line = min(rows, (1 + (swept.sharing_rows > 1)) * LINE_BYTES // max(2, width))
        if line * whole <= ONE_BLOCK // 2:
            down = min(rows, max(line, elements // whole))
            down, across = _spread(swept, down, whole, line, device), whole
        elif not reducing.sums and line // 2 * whole <= ONE_BLOCK:  # half cache lines, but once
            # Positions are in registers beside values.
            is_of_positions = reducing.has_integers and reduces_only
            down, across = max(1, line // (4 if is_of_positions else 2)), whole
        elif is_light and line // 4 * whole <= 2 * ONE_BLOCK:  # sectors, for rows of one operand
            down, across = max(1, line // 4), whole
        elif is_light:  # half cache lines, for twice as many programs
            down = max(1, line // 2)
            across = 2 * looped // down
        elif _has_rows_apart(swept):  # whole cache lines of both kinds of operands
            down, across = line, line
        else:
            down, across = line, looped // 2 // line
    elif reduces_only and _of_columns(swept) >= SEVERAL:
        # What lies along the columns is read again for each block of rows.
        down, across = min(rows, ROWS_OF_SEVERAL), min(whole, looped // ROWS_OF_SEVERAL)
    elif _is_transposed(swept, width) and (whole > ONE_BLOCK or not reducing.stores_columns):
        down = min(rows, LINE_BYTES // max(2, width))
        across = min(whole, looped // 2 // down)
    elif _has_steps_between(swept) and whole > looped:
        down, across = 1, _wide(swept.columns.sizes[-1], looped)
    elif reduces_only and 1 < swept.sharing_rows <= MOST_SHARING and whole > SHARED_COLUMNS:
        down, across = min(rows, SHARING_ROWS), SHARED_COLUMNS
    elif is_single and whole > FEW_COLUMNS:  # nothing of a row has to stay in registers
        across = _fitting(columns, FLAT_TILE)
        down = min(rows, FLAT_TILE // across)
    elif whole <= _one_block(width, reads):
        if reducing.sums:
            elements //= 2 if reads <= MOST_SUMMED else 8
        elif reads > 1:  # each thread has several operands in registers
            elements = 2 * elements // max(2, width)
            if reducing.stores_columns:
                elements //= 2 if whole > _SHORT else 4
        elif reducing.has_integers:
            elements //= 2
        elif reducing.stores_columns and width > 2:
            # A thread has as many loads under way where they are narrow.
            narrow = max(LEAST_ROWS * whole, elements * _of_a_load(swept, width) // MOST_BYTES)
            elements = min(elements, narrow)
        down = min(rows, max(1, elements // whole))
        down, across = _spread(swept, down, whole, 1, device), whole
    else:
        down, across = 1, looped // (2 if reads > 1 or _reduces_alone(reducing, writes) else 1)
        is_long = not reducing.sums
    is_looped = down == 1 and across < columns
    of_a_warp = _of_a_warp(swept, width, (down, across), reducing, (reads, writes))
    if is_looped and reducing.stores_columns and reducing.reductions > 2 and not reducing.sums:
        # Several sums are in registers, as those of terms and of their squared deviations.
        across = max(min(across, looped // 2), across // 2)
        of_a_warp = _WARP_ELEMENTS // 4
    if is_single and down * across == FLAT_TILE:
        of_a_warp = _WARP_ELEMENTS // 4
    is_part = swept.rows_are_contiguous and across < columns
    is_narrow = reads > 1 or (width > 2 and _of_a_load(swept, width) < MOST_BYTES)
    is_small = is_narrow and reducing.stores_columns and down * across <= _SHORT
    least = 1 if is_part or is_small or (reducing.sums and reads > MOST_SUMMED) else 2
    block = Block(down, across, _warps(down * across, of_a_warp, least))
    if whole <= FEW_COLUMNS and reads < 2 and reduces_only and len(swept.columns.sizes) > 1:
        down = min(rows, TILE // 2 // whole)  # parts of several lines each
        block = Block(down, whole, _warps(down * whole, _WARP_ELEMENTS // 4))
    elif whole <= FEW_COLUMNS and reads < 2 and reduces_only:
        # Each warp has all columns of its rows: the warps of a tile need not tell each other sums.
        # With several operands a warp's threads would have too much in registers, as with as many
        # loads as there are elements.
        is_packed = columns % 4 == 0 or swept.rows_are_contiguous
        of_a_warp = TILE if is_packed else _WARP_ELEMENTS // 2
        block = replace(block, warps=max(1, down * across // of_a_warp))
    # Each program of neighbouring rows reads the partial results of all, so that many small shares
    # cost more than they bring.
    shared_by = PROGRAMS_PER_MULTIPROCESSOR
    if swept.rows_are_contiguous and is_light:
        shared_by = NEIGHBOURS_PER_MULTIPROCESSOR
    parts = _parts(swept, block, device, reducing, shared_by) if reducing.is_shared else 1
    if is_long and parts == 1 and reducing.sweeps + reducing.stores_columns - reducing.idle > 1:
        across = int(_of_long_rows(columns, width, reads, reducing) * 2.0**doublings)
        block = Block(1, across, min(MOST_WARPS, across // _LONG_WARP_ELEMENTS))
    elif parts > 1 and down == 1 and reads < 2 and not reducing.sums:  # for more loads under way
        block = replace(block, warps=max(block.warps, min(16, across // (_WARP_ELEMENTS // 2))))
    if is_part and parts == 1:
        block = replace(block, warps=max(2, block.warps))
    if swept.rows_are_contiguous and parts > 1 and not reducing.sums:
        block = _enlarged(swept, block, parts, device)
    if reducing.sums:
        blocks = ceil_div(swept.rows.numel, block.rows)
        warps = SUMMING_WARPS_PER_MULTIPROCESSOR * (
            2 if reads < 2 else 1
        )  # one operand has fewer loads
        programs = warps // block.warps * gpu_limits.multiprocessors(device)
        if width > 2 and across >= columns and blocks < FEW_TURNS * programs:
            block = replace(
                block, warps=2 * block.warps
            )  # what half as many programs leave is less
        block = replace(block, turns=_turns(blocks, 1, block, warps, across < columns, device))
        parts = _parts(swept, block, device, reducing) if parts > 1 else parts
    if parts > 1 and across >= columns:  # fewer columns at a time, for several programs
        across = max(16, min(across // parts, looped // 2))
        of_a_warp = _of_a_warp(swept, width, (down, across), reducing, (reads, writes))
        block = replace(block, columns=across, warps=_warps(down * across, of_a_warp))
    if parts == 1 and block.columns >= columns:
        parts = 0
    programs = max(1, parts) * ceil_div(swept.rows.numel, block.rows)
    if 2 * programs <= gpu_limits.multiprocessors(device):  # each has one for itself
        block = replace(block, warps=min(16, 2 * block.warps))
    return replace(block, parts=parts)


def _one_block(width: int, reads: int) -> int:
    """Return the most elements of rows of ``reads`` operands that are kept in registers as a whole.
    More than half of the registers of a multiprocessor would leave nothing to load into while a
    program computes; elements of 16 bits are kept as such."""
    return ONE_BLOCK if width <= 2 else ONE_BLOCK * 4 // (width * max(1, reads))


def _of_long_rows(columns: int, width: int, reads: int, reducing: Reducing) -> int:
    """Return how many columns of long rows with ``reads`` operands a program sweeps over at a time
    that does so several times, as measured on an H200. The rows that all programs work on have to
    stay in the cache between two sweeps, so that a multiprocessor gets one program or two, of as
    many warps as a program can have; or in registers."""
    whole = power_of_two(columns)
    of_wide = LONG_BLOCK * (2 if width > 2 else 1)
    if reads < 2:
        return whole if whole <= 2 * ONE_BLOCK * 4 // max(4, width) else of_wide
    if not reducing.stores_columns:  # a thread has the sums of each operand in registers, too
        return LONG_BLOCK // 2
    is_filled = 8 * (whole - columns) <= whole
    if reads == 2 and is_filled and whole * width <= 4 * ONE_BLOCK:
        return whole
    return min(whole // 2, of_wide if reads == 2 else LONG_BLOCK)


def is_read_once(
    swept: Sweep, width: int, block: Block, reducing: Reducing, sweep: int, device: torch.device
) -> bool:
    """Return whether the cache lines that a launch reads shall be the first to leave the cache.
    ``sweep`` is its number, 0 if it makes all sweeps; the widest element has ``width`` bytes.

    They leave in the cache what earlier kernels wrote there, which need not go to memory while this
    one reads. A kernel that writes as much as it reads gains nothing.
    """
    reads, writes = _full(swept)
    is_last = sweep in (0, reducing.sweeps + 1)
    if writes and (is_last or not reducing.stores_columns):
        return False
    if reducing.sweeps + reducing.stores_columns == 1 or block.parts == 0:
        return True
    # The next launch may find them in the cache.
    read_bytes = reads * width * swept.rows.numel * swept.columns.numel
    return block.parts > 1 and 2 * read_bytes > gpu_limits.cache_bytes(device)


def _of_columns(swept: Sweep) -> int:
    """Return how many operands that are read have elements for the columns that several rows
    share."""
    if swept.rows.numel < 2:
        return 0
    steps = zip(swept.rows.strides[: swept.read], swept.columns.strides, strict=False)
    return sum(any(columns) and not any(rows) for rows, columns in steps)


def _are_chosen(swept: Sweep) -> bool:
    """Return whether no operand has an element for each column, so that kernels compute where the
    elements lie: those of a small window lie nearer to the same ones of the window beside it than
    to each other."""
    return bool(swept.steps) and not any(
        any(steps)
        for tensor, steps in zip(swept.tensors, swept.columns.strides, strict=True)
        if tensor is not None
    )


def _spread(swept: Sweep, down: int, across: int, least: int, device: torch.device) -> int:
    """Return how many of the ``down`` rows a program gets, not fewer than ``least``, where so many
    would leave multiprocessors without work and each thread with many elements."""
    processors = gpu_limits.multiprocessors(device)
    while (
        down > least
        and down * across > LEAST_SPREAD
        and 2 * ceil_div(swept.rows.numel, down) <= processors
    ):
        down //= 2
    return down


def _is_transposed(swept: Sweep, width: int) -> bool:
    """Return whether neighbouring rows of an operand are neighbours in memory, and its columns lie
    apart."""
    return swept.rows.numel > 1 and any(
        rows[-1] == 1 and columns[-1] * width > SECTOR_BYTES
        for rows, columns in zip(swept.rows.strides, swept.columns.strides, strict=True)
    )


def _of_a_warp(
    swept: Sweep, width: int, sizes: tuple[int, int], reducing: Reducing, full: tuple[int, int]
) -> int:
    """Return how many elements of a block with reductions a warp works on, as measured on an H200;
    ``sizes`` are the block's rows and columns, ``full`` is what ``_full`` returns.

    More warps hide more of the memory's latency; fewer need fewer steps across warps to reduce a
    row, of which a block of neighbouring rows in memory has most.
    """
    (rows, columns), (reads, writes) = sizes, full
    is_whole = columns >= swept.columns.numel
    if reducing.sums:
        return _WARP_ELEMENTS // 2
    if swept.chosen > 1:  # what it computes of their places is in registers, too
        return CHOSEN_OF_A_WARP
    operands = sum(tensor is not None for tensor in swept.tensors)
    if operands > MOST_OPERANDS and not reducing.stores_columns:
        return _WARP_ELEMENTS // 2
    if swept.rows_are_contiguous:
        if _are_narrow_loads(swept) or _has_rows_apart(swept):
            return _WARP_ELEMENTS // 2
        is_light = reducing.stores_columns and reads < 2
        # Its operands and its sums are in a thread's registers.
        if _varied(swept) > MOST_VARIED:
            return _WARP_ELEMENTS // 2
        is_heavy = reads + reducing.reductions > MOST_HELD
        is_half = is_heavy or (is_light and not is_whole)
        return _WARP_ELEMENTS if is_half else 2 * _WARP_ELEMENTS
    if is_whole and columns <= SHARED_COLUMNS and swept.columns.sizes[-1] % 4:
        return _WARP_ELEMENTS // 4  # each element is a load of its own
    if is_whole:  # a row is kept in registers, that of each operand
        # Long rows of which results are kept too, and short ones of which none are.
        is_long = columns > (2 * TILE if width <= 2 else TILE // 2)
        several = rows == 1 and reads > 1 and bool(writes) == is_long
        several = several or (rows == 1 and width > 2 and reads > 1 and reducing.sweeps > 2)
        return _WARP_ELEMENTS // 2 if several else _WARP_ELEMENTS
    if writes:
        return _WARP_ELEMENTS // (2 if reads > 1 else 1)
    return _WARP_ELEMENTS // (4 if reads > 1 or _reduces_alone(reducing, writes) else 2)


def _of_a_load(swept: Sweep, width: int) -> int:
    """Return how many bytes of a row a load can have: rows begin at multiples of so many."""
    return math.gcd(swept.columns.sizes[-1] * width, MOST_BYTES)


def _varied(swept: Sweep) -> int:
    """Return how many operands that are read have elements for the columns and for the rows: also
    one of which a part is read, at places that the kernel computes."""
    steps = zip(swept.rows.strides[: swept.read], swept.columns.strides, strict=False)
    return sum(any(rows) and any(columns) for rows, columns in steps)


def _are_narrow_loads(swept: Sweep) -> bool:
    """Return whether neighbouring rows end where no pack of elements does, so that each element is
    a load of its own."""
    return bool(swept.rows.sizes) and swept.rows.sizes[-1] % 8 != 0


def _has_rows_apart(swept: Sweep) -> bool:
    """Return whether an operand that is read has its columns in one line in memory, where those
    that ``rows_are_contiguous`` tells of have their rows so."""
    steps = zip(swept.rows.strides[: swept.read], swept.columns.strides, strict=False)
    return any(columns[-1] == 1 and any(rows) for rows, columns in steps)


def _reduces_alone(reducing: Reducing, writes: int) -> bool:
    """Return whether a kernel has several reductions and no results with an element for each row
    and column."""
    return reducing.reductions > 1 and not writes


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


def block_of_columns(swept: Sweep, width: int, doublings: int, device: torch.device) -> Block:
    """Return the block of a kernel that has sums over its rows and no other reductions."""
    block = _tile(swept, width, doublings, TILE, len(swept.columns.sizes))
    blocks = ceil_div(swept.rows.numel, block.rows)
    across = ceil_div(swept.columns.numel, block.columns)
    warps = SUMMING_WARPS_PER_MULTIPROCESSOR
    if _lies_apart(swept, width):  # each element is a load of its own
        block, warps = replace(block, warps=min(16, 2 * block.warps)), 2 * warps
    return replace(block, turns=_turns(blocks, across, block, warps, False, device))


def _turns(
    blocks: int, across: int, block: Block, warps: int, is_looped: bool, device: torch.device
) -> int:
    """Return how many of the ``blocks`` of rows a program works on that sums over rows.

    Each program leaves a sum for every column, so that few rows for each would make what they leave
    as large as what they read; ``across`` programs share the columns, and a multiprocessor gets
    ``warps`` warps. With ``is_looped`` the sums are in memory all the time.
    """
    processors = gpu_limits.multiprocessors(device)
    programs = max(SUMMING_PROGRAMS_PER_MULTIPROCESSOR, warps // block.warps)
    fitting = ceil_div(blocks * across, programs * processors)
    least = ceil_div(8 if is_looped else 4, block.rows)
    if not is_looped:
        least = min(least, ceil_div(blocks * across, processors))
    return max(1, min(blocks, max(fitting, least)))


def blocks_of_rows(swept: Sweep, block: Block, nested: bool) -> int:
    """Return how many blocks the rows are."""
    if not nested:
        return ceil_div(swept.rows.numel, block.rows)
    inner = swept.rows.sizes[-1]
    return swept.rows.numel // inner * ceil_div(inner, block.rows)


def _enlarged(swept: Sweep, block: Block, parts: int, device: torch.device) -> Block:
    """Return a block of neighbouring rows with more columns and warps where ``parts`` programs for
    each block of rows would leave multiprocessors without enough loads under way."""
    programs = parts * ceil_div(swept.rows.numel, block.rows)
    wanted = WARPS_PER_MULTIPROCESSOR * gpu_limits.multiprocessors(device)
    most = swept.columns.numel // parts // 2  # with which a block does not exceed a share
    while block.warps < 16 and programs * block.warps < wanted:
        if block.rows * block.columns > _WARP_ELEMENTS // 2 * block.warps:
            block = replace(block, warps=2 * block.warps)
        elif block.columns <= most:
            block = replace(block, columns=2 * block.columns, warps=2 * block.warps)
        else:
            break
    return block


def _parts(
    swept: Sweep,
    block: Block,
    device: torch.device,
    reducing: Reducing,
    shared_by: int = PROGRAMS_PER_MULTIPROCESSOR,
) -> int:
    """Return how many programs share a row, a power of two: so many that each multiprocessor has
    about ``shared_by``."""
    programs = ceil_div(ceil_div(swept.rows.numel, block.rows), block.turns)
    processors = gpu_limits.multiprocessors(device)
    wanted = shared_by * processors
    # Rows that are swept over twice come from the cache the second time, if one program does it.
    enough = LEAST_PROGRAMS_PER_MULTIPROCESSOR * processors if reducing.stores_columns else wanted
    if programs == 0 or 2 * programs > wanted or programs >= enough:
        return 1
    # Shares of less than two blocks are not worth another launch. If there is one, every
    # multiprocessor gets some, down to one turn of the loop each.
    elements = swept.columns.numel * block.rows
    most = elements // (2 * LOOPED_BLOCK)
    if most > 1:
        fewest = SHARING_PROGRAMS_PER_MULTIPROCESSOR * processors // programs
        shortest = max(block.rows * block.columns, LOOPED_BLOCK // 2)
        most = max(most, min(fewest, elements // shortest))
    parts = min(wanted // programs, most, MOST_PARTIALS // block.rows)
    return max(1, power_of_two(parts + 1) // 2)


def has_nested_columns(swept: Sweep, block: Block) -> bool:
    """Return whether the innermost loop of the columns is swept over alone, which saves divisions:
    one for each pack of elements, but one for each element if packs straddle its end. It also saves
    a load for each element where there are steps between turns of the loop. A block that exceeds
    the loop by more than a third would leave too many threads idle."""
    inner = swept.columns.sizes[-1]
    is_filled = 3 * ceil_div(inner, block.columns) * block.columns <= 4 * inner
    is_long = inner >= (64 if inner % 16 else LONG_LOOP) and is_filled
    is_nested = is_long or _has_steps_between(swept)
    return block.parts > 0 and len(swept.columns.sizes) > 1 and is_nested


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


def has_nested_rows(swept: Sweep, block: Block) -> bool:
    """Return whether a block has rows of one turn of their innermost loop only, so that what does
    not change in that loop is loaded once for the block."""
    inner = swept.rows.sizes[-1]
    wasted = ceil_div(inner, block.rows) * block.rows - inner
    return block.rows > 1 and len(swept.rows.sizes) > 1 and 8 * wasted <= inner


def _fitting(size: int, most: int) -> int:
    """Return the largest power of two up to ``most`` whose multiples exceed ``size`` by no more
    than a seventh, as 64 exceeds 56; if there is none, that which exceeds it least."""
    most = min(max(1, most), power_of_two(max(1, size)))
    candidates = [most >> shift for shift in range(most.bit_length()) if most >> shift >= 16]
    excess = {one: ceil_div(size, one) * one - size for one in candidates or [most]}
    fitting = [one for one in excess if 7 * excess[one] <= size]
    return fitting[0] if fitting else min(excess, key=lambda one: (excess[one], -one))


def _warps(elements: int, of_a_warp: int, least: int = 2) -> int:
    """Return the warps of a block, each with about ``of_a_warp`` elements."""
    return max(least, min(16, power_of_two(ceil_div(elements, of_a_warp))))
