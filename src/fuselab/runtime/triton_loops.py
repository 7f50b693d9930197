"""Device functions of Triton kernels that sweep over rows and columns (``runtime/sweep.py``).

A position is a tuple: one index for each loop, outermost first. The sizes of the loops, what
divides by them (``quotient_of``), and the strides of a tensor in them are tuples of the same
length, so that a kernel is compiled for as many loops as the layouts need. For contiguous tensors
that is mostly one.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from fuselab.runtime import triton_math as math


@triton.jit
def numel(sizes):
    """Return the product of the sizes, and of a constant factor behind them, if there is one."""
    product = sizes[0]
    for loop in tl.static_range(1, len(sizes)):
        product = product * sizes[loop]
    return product


@triton.jit
def offset(position, strides):
    """Return how many elements behind the first the element at a position lies. A loop in which the
    stride is the constant 0 is left out, so that the result has one element along it. One stride
    more than there are loops is a constant factor of those that are no constants."""
    elements = 0
    for loop in tl.static_range(len(position) if len(position) < len(strides) else len(strides)):
        # The compiler sees a constant as an int, the interpreter as a tl.constexpr. A name for the
        # stride or for the condition would make it a value that is not known.
        if isinstance(strides[loop], int) or isinstance(strides[loop], tl.constexpr):  # noqa: SIM101
            if strides[loop] != 0:
                elements = elements + position[loop] * strides[loop]
        elif len(strides) > len(position):
            elements = elements + position[loop] * (strides[loop] * strides[len(strides) - 1])
        else:
            elements = elements + position[loop] * strides[loop]
    return elements


@triton.jit
def load(pointer, is_row, is_column, ONCE: tl.constexpr = False):
    """Load the elements of a block. A pointer that has one row, or one column, for all of the
    block's is loaded once for them. The cache lines of elements that are ``ONCE`` are the
    first to leave the cache."""
    if len(pointer.shape) == 0:
        elements = tl.load(pointer)
    elif pointer.shape[0] == is_row.shape[0] and pointer.shape[1] == is_column.shape[1]:
        policy: tl.constexpr = "evict_first" if ONCE else ""
        elements = tl.load(pointer, is_row & is_column, eviction_policy=policy)
    elif pointer.shape[1] == is_column.shape[1] and is_row.shape[0] <= 4:
        # The compiler sees packs of neighbours, which it does not in one dimension.
        elements = tl.load(pointer, is_column)
    elif pointer.shape[1] == is_column.shape[1]:
        # In one dimension, threads hold no copies for the neighbouring rows of their packs.
        columns: tl.constexpr = [pointer.shape[1]]
        line = tl.load(tl.reshape(pointer, columns), tl.reshape(is_column, columns))
        elements = line[None, :]
    elif pointer.shape[0] == is_row.shape[0]:
        rows: tl.constexpr = [pointer.shape[0]]
        line = tl.load(tl.reshape(pointer, rows), tl.reshape(is_row, rows))
        elements = line[:, None]
    else:
        elements = tl.load(pointer)
    return elements


@triton.jit
def load_inside(pointer, is_row, is_column, is_inside, outside: tl.constexpr = None):
    """Load the elements of a block where ``is_inside`` says that there are any; elsewhere the
    values are ``outside``, or undefined."""
    exists = is_inside
    if len(pointer.shape) == 0:
        if len(is_inside.shape) > 0:
            pointer = pointer + tl.zeros(is_inside.shape, tl.int32)
    else:
        if pointer.shape[0] == is_row.shape[0]:
            exists = exists & is_row
        if pointer.shape[1] == is_column.shape[1]:
            exists = exists & is_column
    return tl.load(pointer, exists, outside)


@triton.jit
def is_in(place, count):
    """Return whether ``0 <= place < count``. One comparison is enough: as an unsigned number, a
    negative place is larger than any count."""
    zero = tl.zeros((1, 1), tl.int32)
    place = zero + place
    count = zero + count
    if place.dtype == tl.int32 and count.dtype == tl.int32:
        found = place.to(tl.uint32) < count.to(tl.uint32)
    else:
        found = place.to(tl.uint64) < count.to(tl.uint64)
    return found


@triton.jit
def of_pairs(pointer, PAIRED: tl.constexpr):
    """Return the pointer to elements of 16 or 32 bits as one to pairs of them, if ``PAIRED``."""
    if PAIRED:
        if pointer.dtype.element_ty.primitive_bitwidth == 16:
            pointer = tl.cast(pointer, tl.pointer_type(tl.int32), bitcast=True)
        else:
            pointer = tl.cast(pointer, tl.pointer_type(tl.int64), bitcast=True)
    return pointer


@triton.jit
def load_pairs(first, second, is_row, is_column, PAIRED: tl.constexpr):
    """Load the elements of two blocks. If ``PAIRED``, those of the second are the neighbours of
    those of the first, which is a pointer to pairs: a pair is loaded as one integer."""
    if PAIRED:
        pair = load(first, is_row, is_column)
        element = second.dtype.element_ty
        if element.primitive_bitwidth == 16:
            one, other = pair.to(tl.int16), (pair >> 16).to(tl.int16)
        else:
            one, other = pair.to(tl.int32), (pair >> 32).to(tl.int32)
        one, other = one.to(element, bitcast=True), other.to(element, bitcast=True)
    else:
        one, other = load(first, is_row, is_column), load(second, is_row, is_column)
    return one, other


@triton.jit
def store_pairs(first, second, one, other, exists, PAIRED: tl.constexpr):
    """Store two blocks where ``exists``; see ``load_pairs``."""
    element = second.dtype.element_ty
    one, other = one.to(element), other.to(element)
    if PAIRED:
        if element.primitive_bitwidth == 16:
            low = one.to(tl.uint16, bitcast=True).to(tl.uint32)
            high = other.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            pair = (low | high).to(tl.int32, bitcast=True)
        else:
            low = one.to(tl.uint32, bitcast=True).to(tl.uint64)
            high = other.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
            pair = (low | high).to(tl.int64, bitcast=True)
        tl.store(first, pair, exists)
    else:
        tl.store(first, one, exists)
        tl.store(second, other, exists)


@triton.jit
def of_rows(values):
    """Return a value for each row as the column of a block. That of a single row is made of a
    scalar, which has no layout: else a block computed with it can change its layout in shared
    memory, element by element."""
    if values.shape[0] == 1:
        column = tl.full((1, 1), tl.sum(values), values.dtype)
    else:
        column = values[:, None]
    return column


@triton.jit
def load_rows(pointer, is_row):
    """Load an element for each row, once: see ``load`` and ``of_rows``."""
    if len(pointer.shape) == 2 and pointer.shape[0] == is_row.shape[0]:
        rows: tl.constexpr = [pointer.shape[0]]
        elements = of_rows(tl.load(tl.reshape(pointer, rows), tl.reshape(is_row, rows)))
    else:
        elements = tl.load(pointer, is_row)
    return elements


@triton.jit
def quotient_of(index, divisor):
    """Return the quotient of an index below 2^31 and the size of a loop, by a product in place of a
    division (Warren, Hacker's Delight, chapter 10). ``divisor`` has its factor and its shift; see
    ``triton_sweep.divisor``."""
    factor, shift = (divisor >> 8).to(tl.uint32), (divisor & 255).to(tl.uint32) >> 1
    return (tl.umulhi(tl.cast(index, tl.uint32), factor) >> shift).to(tl.int32)


@triton.jit
def position_of(index, sizes, divisors):
    """Return the position that comes ``index`` steps after the first, the last loop innermost. A
    size more than there are divisors is a factor of the only one.

    A divisor is the constant 0 where the compiler shall see the division: for a size divisible by
    16 it finds out that neighbouring indices stay neighbours.
    """
    inner = ()
    for loop in tl.static_range(len(divisors) - 1):
        size = sizes[len(divisors) - 1 - loop]
        # A constant has to be looked at where it is, as in ``offset``.
        if isinstance(divisors[len(divisors) - 1 - loop], int) or isinstance(  # noqa: SIM101
            divisors[len(divisors) - 1 - loop], tl.constexpr
        ):
            quotient, remainder = index // size, index % size
        else:
            quotient = quotient_of(index, divisors[len(divisors) - 1 - loop])
            remainder = index - quotient * size
        inner = (remainder,) + inner  # noqa: RUF005  (Triton cannot unpack)
        index = quotient
    return (index,) + inner  # noqa: RUF005


@triton.jit
def tile(
    sizes, divisors, counts, COLUMN_LOOPS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the positions of this program's tile of elements, and which of its rows and columns
    exist.

    The columns of a tile lie in the last ``COLUMN_LOOPS`` loops, its rows in the others, and
    ``counts`` are all rows and all columns, perhaps with a factor of these behind. Several loops
    over columns are followed by one more index, which counts their steps: a tensor that has its
    columns one after the other has one stride for them. ``WIDE`` asks for 64-bit indices.
    """
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    rows: tl.constexpr = len(sizes) - COLUMN_LOOPS
    columns = numel(counts[1:])
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    column = program % across * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    position = (column,)
    if COLUMN_LOOPS > 1:
        position = position_of(column, sizes[rows:], divisors[rows:]) + position
    if rows == 0:
        is_row = tl.full((1, 1), True, tl.int1)
    else:
        row = program // across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        is_row = row < counts[0]
        position = position_of(row, sizes[:rows], divisors[:rows]) + position
    return position, is_row, column < columns


@triton.jit
def of_lists(firsts, counts, PACKED: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return which tensor of its lists this program works on, the positions of its elements, and
    which of its single row and its columns exist.

    ``firsts`` has the first program of each tensor, ``counts`` its elements; both as
    ``triton_sweep.number`` writes them. ``PACKED`` says that 16 divides the elements of all, so
    that packs of them are whole. ``WIDE`` asks for 64-bit positions.
    """
    program = tl.program_id(0)
    member = program * 0
    for place in tl.static_range(1, len(firsts)):
        member += (program >= _number(firsts[place])).to(tl.int32)
    first, count = _of_member(firsts, member), _of_member(counts, member)
    block = program - _number(first).to(tl.int32)
    if WIDE:
        block = block.to(tl.int64)
    element = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    count = _number(count)
    if not WIDE:
        count = count.to(tl.int32)
    if PACKED:
        count = tl.multiple_of(count, 16)
    return member, element, tl.full((1, 1), True, tl.int1), element < count


@triton.jit
def rows_of_lists(
    firsts, first_shares, row_counts, column_counts, PACKED: tl.constexpr,
    ONE_ROW: tl.constexpr, SHARED: tl.constexpr, SHARE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return which tensor of its lists this program works on; the positions of its rows, which of
    them exist, where they start, and their number of columns; the first of the blocks of columns
    that it sweeps over and the end of them; and of its rows the first program that leaves
    something, and how many do.

    Of each tensor, ``firsts`` has the first program of this launch, ``first_shares`` that of
    launches whose programs are ``SHARED``, which own ``SHARE`` columns of their rows;
    ``row_counts`` has its rows, ``column_counts`` its columns; all as ``triton_sweep.number``
    writes them. ``PACKED`` says that 16 divides the columns of all, ``ONE_ROW`` that none has more
    rows. ``WIDE`` asks for 64-bit positions.
    """
    program = tl.program_id(0)
    member = program * 0
    for place in tl.static_range(1, len(firsts)):
        member += (program >= _number(firsts[place])).to(tl.int32)
    own = program - _number(_of_member(firsts, member)).to(tl.int32)
    columns = _number(_of_member(column_counts, member))
    if not WIDE:
        columns = columns.to(tl.int32)
    if PACKED:
        columns = tl.multiple_of(columns, 16)
    shares = tl.maximum(tl.cdiv(columns, SHARE), 1).to(tl.int32)
    blocks = tl.cdiv(columns, BLOCK_COLUMNS).to(tl.int32)
    block = own
    first = blocks * 0
    if SHARED:
        block = own // shares
        first = own % shares * (SHARE // BLOCK_COLUMNS)
        blocks = tl.minimum(first + SHARE // BLOCK_COLUMNS, blocks)
    first_share = _number(_of_member(first_shares, member)).to(tl.int32) + block * shares
    within = tl.arange(0, BLOCK_ROWS)[:, None]
    row = within * 0
    is_row = within < 1
    start = 0
    if WIDE:
        block, first, blocks = block.to(tl.int64), first.to(tl.int64), blocks.to(tl.int64)
    if not ONE_ROW:
        row = block * BLOCK_ROWS + within
        is_row = row < _number(_of_member(row_counts, member))
        start = row * columns
    return member, row, is_row, start, columns, first, blocks, first_share, shares


@triton.jit
def store_left(
    partials_pointer, place: tl.constexpr, count: tl.constexpr, value, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """Store what this program leaves of the reduction number ``place`` of ``count`` of its rows."""
    tl.store(partials_pointer + _left(tl.program_id(0), place, count, BLOCK_ROWS), value)


@triton.jit
def load_left(
    partials_pointer, first_share, turn, shares, place: tl.constexpr, count: tl.constexpr,
    neutral: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return what ``BLOCK`` programs, from number ``turn`` of those of the rows on, have left of
    the reduction number ``place`` of ``count``, one in each column; ``first_share`` is the first of
    the ``shares`` programs."""
    number = turn + tl.arange(0, BLOCK)[None, :]
    at = _left(first_share + number, place, count, BLOCK_ROWS)
    return tl.load(partials_pointer + at, number < shares, neutral)


@triton.jit
def _left(program, place: tl.constexpr, count: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return where a program leaves a reduction of its rows."""
    slot = tl.cast(program, tl.int64) * count + place
    return slot * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]


@triton.jit
def of_member(pointers, member, PACKED: tl.constexpr):
    """Return the pointer number ``member`` of a tuple. If they are to tensors of which ``PACKED``
    elements are loaded at once, 16 divides them all."""
    address = pointers[0].to(tl.int64)
    for place in tl.static_range(1, len(pointers)):
        address = tl.where(member == place, pointers[place].to(tl.int64), address)
    # An address that is chosen is an integer to the compiler, which must be told what divides it.
    divisor: tl.constexpr = 16 if PACKED else 1
    return tl.multiple_of(address.to(pointers[0].dtype), divisor)


@triton.jit
def _of_member(numbers, member):
    found = tl.full((), 0, tl.int64) + numbers[0]
    for place in tl.static_range(1, len(numbers)):
        found = tl.where(member == place, numbers[place], found)
    return found


@triton.jit
def _number(written):
    return (written >> 1) - 2305843009213693952


@triton.jit
def block_of_rows(
    sizes, divisors, BLOCK_ROWS: tl.constexpr, NESTED: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Return the positions of this program's rows, and which of them exist."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    within = tl.arange(0, BLOCK_ROWS)[:, None]
    return block_in_loops(program, within, sizes, divisors, BLOCK_ROWS, NESTED)


@triton.jit
def block_in_loops(number, within, sizes, divisors, BLOCK: tl.constexpr, NESTED: tl.constexpr):
    """Return the positions of a block, and which of them exist. A block of ``NESTED`` loops lies in
    one turn of the innermost."""
    if NESTED:
        size = sizes[len(sizes) - 1]
        across = tl.cdiv(size, BLOCK)
        index = number % across * BLOCK + within
        outer = position_of(number // across, sizes[: len(sizes) - 1], divisors[: len(sizes) - 1])
        position = outer + (index,)  # noqa: RUF005
    else:
        size = numel(sizes)
        index = number * BLOCK + within
        position = position_of(index, sizes, divisors)
    return position, index < size


@triton.jit
def share_of_columns(
    sizes, BLOCK_COLUMNS: tl.constexpr, NESTED: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Return the first of the blocks of columns that this program sweeps over, and the end of them.

    Rows are shared by ``PARTS`` programs. With ``PARTS = 0`` a row fits in one block. The number of
    blocks is then a constant, so that the compiler unrolls each sweep and loads every element once.
    """
    if PARTS == 0:
        first, end = 0, 1
    else:
        first, end = 0, blocks_in_loops(sizes, BLOCK_COLUMNS, NESTED)
        if PARTS > 1:
            share = tl.cdiv(end, PARTS)
            first = tl.program_id(1) * share
            end = tl.minimum(first + share, end)
    return first, end


@triton.jit
def block_of_columns(
    block, sizes, divisors, BLOCK_COLUMNS: tl.constexpr, NESTED: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Return the positions of a block of columns, and which of them exist."""
    if WIDE:
        block = tl.cast(block, tl.int64)
    within = tl.arange(0, BLOCK_COLUMNS)[None, :]
    return block_in_loops(block, within, sizes, divisors, BLOCK_COLUMNS, NESTED)


@triton.jit
def store_partial(
    partials_pointer, place: tl.constexpr, value, BLOCK_ROWS: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Store this program's share of the reduction number ``place`` of its rows. What all shares are
    ``JOINED`` to lies behind them."""
    share = PARTS if JOINED else tl.program_id(1)
    tl.store(partials_pointer + _partial(place * (PARTS + 1) + share, BLOCK_ROWS), value)


@triton.jit
def load_partials(
    partials_pointer, place: tl.constexpr, BLOCK_ROWS: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Return all shares of the reduction number ``place`` of this program's rows, one in each
    column; if they are ``JOINED``, the one that stands for all."""
    share = PARTS + tl.arange(0, 1)[None, :] if JOINED else tl.arange(0, PARTS)[None, :]
    at = _partial(place * (PARTS + 1) + share, BLOCK_ROWS)
    return tl.load(partials_pointer + at)


@triton.jit
def _partial(part, BLOCK_ROWS: tl.constexpr):
    """Return where the rows of this program have their share number ``part``."""
    block = tl.cast(part, tl.int64) * tl.num_programs(0) + tl.program_id(0)
    return block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]


@triton.jit
def partials_of_turn(
    partials_pointer, turn, reductions: tl.constexpr, BLOCK_ROWS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Return where the partial results of a block of rows begin, if a program owns several;
    ``turn`` counts this program's from 0."""
    cells = reductions * (PARTS + 1) * BLOCK_ROWS * tl.num_programs(0)
    return partials_pointer + tl.cast(turn, tl.int64) * cells


@triton.jit
def share_of_rows(sizes, BLOCK_ROWS: tl.constexpr, NESTED: tl.constexpr):
    """Return the first of the blocks of rows that this program owns, and the end of them."""
    blocks = blocks_in_loops(sizes, BLOCK_ROWS, NESTED)
    share = tl.cdiv(blocks, tl.num_programs(0))
    first = tl.program_id(0) * share
    return first, tl.minimum(first + share, blocks)


@triton.jit
def turn_of_rows(
    turn, sizes, divisors, BLOCK_ROWS: tl.constexpr, NESTED: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Return the positions of the block of rows number ``turn``, and which of them exist."""
    if WIDE:
        turn = tl.cast(turn, tl.int64)
    within = tl.arange(0, BLOCK_ROWS)[:, None]
    return block_in_loops(turn, within, sizes, divisors, BLOCK_ROWS, NESTED)


@triton.jit
def blocks_in_loops(sizes, BLOCK: tl.constexpr, NESTED: tl.constexpr):
    """Return the number of blocks. A block of ``NESTED`` loops lies in one turn of the
    innermost."""
    if NESTED:
        inner = sizes[len(sizes) - 1]
        blocks = numel(sizes) // inner * tl.cdiv(inner, BLOCK)
    else:
        blocks = tl.cdiv(numel(sizes), BLOCK)
    return blocks


@triton.jit
def add_rows(
    so_far, terms, sums_pointer, place: tl.constexpr, sums: tl.constexpr, column, column_sizes,
    is_column, is_later, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the rows of ``terms`` to the sum number ``place`` of this program's ``sums`` sums over
    rows, and return what it has so far.

    With ``PARTS = 0`` the columns are one block, and the sum stays in registers. Else it is kept in
    the workspace, because a sweep visits every column once for each block of rows; ``is_later``
    says whether this is not the first block of rows.
    """
    if PARTS == 0:
        so_far += terms
    else:
        at = _share(sums_pointer, tl.program_id(0), place, sums, column_sizes)
        at += flat(column, column_sizes)
        # Threads may hold copies of an element that another one has stored before.
        tl.debug_barrier()
        before = tl.load(at, is_column & is_later, 0.0)
        tl.store(at, before + tl.sum(terms, 0, keep_dims=True), is_column)
    return so_far


@triton.jit
def store_share(sums_pointer, place: tl.constexpr, sums: tl.constexpr, rows, column_sizes):
    """Store this program's sum number ``place`` over the ``rows`` that it has added up."""
    index = tl.program_id(1) * rows.shape[1] + tl.arange(0, rows.shape[1])[None, :]
    at = _share(sums_pointer, tl.program_id(0), place, sums, column_sizes) + index
    tl.store(at, tl.sum(rows, 0, keep_dims=True), index < numel(column_sizes))


@triton.jit
def sum_of_shares(
    sums_pointer, place: tl.constexpr, sums: tl.constexpr, shares, column_sizes,
    COMPUTE: tl.constexpr, BLOCK_SHARES: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sum number ``place`` of all programs, for this program's columns."""
    index = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    total = tl.full((BLOCK_SHARES, BLOCK_COLUMNS), 0.0, COMPUTE)
    for first in range(0, shares, BLOCK_SHARES):
        share = first + tl.arange(0, BLOCK_SHARES)[:, None]
        at = _share(sums_pointer, share, place, sums, column_sizes) + index
        total += tl.load(at, (share < shares) & (index < numel(column_sizes)), 0.0)
    return tl.sum(total, 0, keep_dims=True)


@triton.jit
def _share(sums_pointer, program, place: tl.constexpr, sums: tl.constexpr, column_sizes):
    """Return where the sum number ``place`` of a program begins."""
    return sums_pointer + (tl.cast(program, tl.int64) * sums + place) * numel(column_sizes)


@triton.jit
def flat(position, sizes):
    """Return how many steps after the first the position comes."""
    index = position[0]
    for loop in tl.static_range(1, len(position)):
        index = index * sizes[loop] + position[loop]
    return index


@triton.jit
def columns_between(
    first, end, sizes, BLOCK_COLUMNS: tl.constexpr, NESTED: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Return how many columns the blocks from ``first`` to before ``end`` have; see
    ``share_of_columns``."""
    columns = numel(sizes)
    if PARTS != 0:
        first, end = tl.cast(first, tl.int64), tl.cast(end, tl.int64)
        if NESTED:  # the last block of each turn of the innermost loop may not be full
            inner = sizes[len(sizes) - 1]
            across = tl.cdiv(inner, BLOCK_COLUMNS)
            of_end = end // across * inner + tl.minimum(end % across * BLOCK_COLUMNS, inner)
            of_first = first // across * inner + tl.minimum(first % across * BLOCK_COLUMNS, inner)
            columns = of_end - of_first
        else:
            of_end = tl.minimum(end * BLOCK_COLUMNS, columns)
            columns = of_end - tl.minimum(first * BLOCK_COLUMNS, columns)
    return columns


@triton.jit
def mean_of_block(totals, count, PARTS: tl.constexpr):
    """Return each row's mean of the ``count`` terms that ``totals`` has the sums of. With
    ``PARTS = 0`` that is the mean of the row, computed as the kernel computes it: the compiler
    sees that it is the same."""
    if PARTS != 0:
        count = at_least_one(count, totals.dtype)
    return of_rows(tl.sum(totals, 1)) / count


@triton.jit
def at_least_one(count, dtype: tl.constexpr):
    """Return a number of terms to divide by; of none there is nothing to divide."""
    count = tl.cast(count, dtype)
    return tl.where(count > 0.0, count, 1.0)


@triton.jit
def squares_about_mean(squares, totals, about, count, PARTS: tl.constexpr):
    """Return each row's sum of squared deviations from its mean, from the sums of ``count`` terms
    and of the squares of their distances from ``about``. With ``PARTS = 0`` that is the mean.

    With m the mean of all n terms and a that of the first b, the squares exceed the result r by
    n (m - a)^2, and b (m - a)^2 <= r: they are at most 1 + n / b times as large, and so is the
    error of their rounding.
    """
    squares = of_rows(tl.sum(squares, 1))
    if PARTS != 0:
        number = at_least_one(count, squares.dtype)
        further = of_rows(tl.sum(totals, 1)) - number * about
        squares = larger(squares - further * further / number, 0.0)
    return squares


@triton.jit
def joined_squares(squares, totals, counts):
    """Return each row's sum of squared deviations from its mean, from those of shares of its terms
    from their own means, the sums of the terms, and the numbers of these (Chan, Golub and LeVeque,
    The American Statistician 37, 1983)."""
    count = of_rows(tl.sum(counts, 1))
    mean = of_rows(tl.sum(totals, 1)) / at_least_one(count, squares.dtype)
    between = totals / at_least_one(counts, squares.dtype) - mean
    return of_rows(tl.sum(squares + counts * between * between, 1))


@triton.jit
def with_exponentials(largest, total, terms, ROUNDED: tl.constexpr, PARTS: tl.constexpr):
    """Return the larger of each term and of what was the largest before, and with it the sum of
    exp(term - largest) of all so far; an infinite term that is the largest counts 1. With ``PARTS =
    0``, where a row is one block, the sum is left for later."""
    if PARTS != 0:
        distance = math.exp(-tl.abs(terms - largest), ROUNDED)
        distance = tl.where(terms == largest, 1.0, distance)
        total = tl.where(terms > largest, total * distance + 1.0, total + distance)
    return larger(largest, terms), total


@triton.jit
def joined_exponentials(largest, total, ROUNDED: tl.constexpr, PARTS: tl.constexpr):
    """Return the largest of each row and the sum of exp(term - largest) of its terms, from those of
    each column."""
    whole = of_rows(tl.reduce(largest, 1, larger))
    if PARTS != 0:
        share = total * math.exp(largest - whole, ROUNDED)
        total = of_rows(tl.sum(tl.where(largest == whole, total, share), 1))
    return whole, total


@triton.jit
def shifted_exponentials(total, largest, shift, ROUNDED: tl.constexpr):
    """Return a sum of exp(term - largest) as that of exp(term - shift): NaN where both are the same
    infinity."""
    return total * math.exp(largest - shift, ROUNDED)


@triton.jit
def larger(a, b):
    """Return the larger of two values, NaN if one is NaN, as PyTorch does."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """Return the smaller of two values, NaN if one is NaN, as PyTorch does."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product(a, b):
    """Return the product of two values."""
    return a * b
