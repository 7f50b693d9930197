"""Embedding look-up over many tables, and the change that its gradient makes to them.

The tables, their row counts and their row strides in elements are tuples, one entry per table.
look_up: a program owns BLOCK samples of one table. key_positions, reduce_runs and join_runs work
as those of cuda_kernels.cu: between the first two, positions (sample * tables + table) are sorted
by row. A program of reduce_runs sums the runs of equal rows within RUN sorted positions and changes
every row whose run lies inside them; join_runs adds the partial sums of longer runs. No row is read
or written by two programs, and the order of additions is fixed.
"""

import triton
import triton.language as tl

from fuselab.ops._shared.triton_modulus import modulus


@triton.jit
def row_of(id, rows, RULE: tl.constexpr):
    """Return the row that an id selects, -1 for none."""
    if RULE == "modulus":
        return modulus(id, rows)
    elif RULE == "clamp":
        return tl.minimum(tl.maximum(id, 0), rows - 1)
    else:
        return tl.where((id >= 0) & (id < rows), id, -1)


# BYTES and ELEMENTS are what all tables' alignments have in common. The other numbers are not
# specialised: every combination of alignments would compile a kernel of its own.
@triton.jit(
    debug=True,
    do_not_specialize=["tables", "pitches", "rows", "batch", "id_sample_stride", "id_table_stride"],
)
def look_up(
    tables,  # of (rows, width)
    pitches,
    rows,
    ids,  # (batch, tables), by its strides
    output,  # (batch, tables, width), contiguous
    batch,
    width,
    id_sample_stride,
    id_table_stride,
    RULE: tl.constexpr,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,  # a power of two that divides all addresses
    ELEMENTS: tl.constexpr,  # and so many elements all pitches
):
    table = tl.program_id(1).to(tl.int64)  # 64-bit, for it is multiplied by strides
    address = tables[0].to(tl.int64)
    pitch = tl.full((), 0, tl.int64) + pitches[0]
    count = tl.full((), 0, tl.int64) + rows[0]
    for i in tl.static_range(1, TABLES):
        address = tl.where(table == i, tables[i].to(tl.int64), address)
        pitch = tl.where(table == i, pitches[i], pitch)
        count = tl.where(table == i, rows[i], count)
    # A chosen address is an integer to the compiler, which must be told what divides it.
    source = tl.multiple_of(address.to(tables[0].dtype), BYTES)
    samples = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = samples < batch
    given = tl.load(
        ids + samples * id_sample_stride + table * id_table_stride, mask=inside, other=0
    ).to(tl.int64)
    row = row_of(given, count, RULE)
    if RULE == "error":
        tl.device_assert((row >= 0) | (inside == 0), "embedding: an id is out of range")
    columns = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    wanted = inside[:, None] & (columns < width)[None, :]
    values = tl.load(
        source + tl.multiple_of(row * pitch, ELEMENTS)[:, None] + columns[None, :],
        mask=wanted & (row >= 0)[:, None],
        other=0,
    )
    target = output + (samples * TABLES + table)[:, None] * width + columns[None, :]
    tl.store(target, values, mask=wanted)


@triton.jit(
    debug=True,
    do_not_specialize=[
        *("rows", "first", "positions", "all_rows", "id_sample_stride", "id_table_stride")
    ],
)
def key_positions(
    rows,
    first,  # rows of all tables before
    ids,  # (batch, tables), by its strides
    keys,  # (batch * tables,)
    positions,
    all_rows,
    id_sample_stride,
    id_table_stride,
    RULE: tl.constexpr,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < positions
    table = position % TABLES
    count = tl.full((BLOCK,), 0, tl.int64) + rows[0]
    before = tl.full((BLOCK,), 0, tl.int64) + first[0]
    for i in tl.static_range(1, TABLES):
        count = tl.where(table == i, rows[i], count)
        before = tl.where(table == i, first[i], before)
    source = ids + position // TABLES * id_sample_stride + table * id_table_stride
    given = tl.load(source, mask=inside, other=0).to(tl.int64)
    row = row_of(given, count, RULE)
    if RULE == "error":
        tl.device_assert((row >= 0) | (inside == 0), "embedding: an id is out of range")
    tl.store(keys + position, tl.where(row < 0, all_rows, before + row), mask=inside)


@triton.jit
def change_rows(
    sums,  # [N, WIDTH]
    key,  # [N]
    table,  # [N]
    wanted,  # [N]
    tables,
    pitches,
    first,
    states,
    learning_rate,
    eps,
    width,
    UPDATE: tl.constexpr,
    TABLES: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Change each wanted row by its summed gradient."""
    address = key * 0 + tables[0].to(tl.int64)
    pitch = key * 0 + pitches[0]
    before = key * 0 + first[0]
    for i in tl.static_range(1, TABLES):
        address = tl.where(table == i, tables[i].to(tl.int64), address)
        pitch = tl.where(table == i, pitches[i], pitch)
        before = tl.where(table == i, first[i], before)
    columns = tl.arange(0, WIDTH)
    weights = tl.multiple_of(address.to(tables[0].dtype), BYTES)[:, None]
    weights += tl.multiple_of((key - before) * pitch, ELEMENTS)[:, None] + columns[None, :]
    inside = wanted[:, None] & (columns < width)[None, :]
    if UPDATE == "gradient":
        tl.store(weights, sums, mask=inside)
        return
    factor = tl.zeros(key.shape, sums.dtype) + tl.load(learning_rate)
    if UPDATE == "rowwise_adagrad":
        place = key * 0 + states[0].to(tl.int64)
        for i in tl.static_range(1, TABLES):
            place = tl.where(table == i, states[i].to(tl.int64), place)
        state = place.to(states[0].dtype) + (key - before)
        # The explicit fma keeps the products from being fused into the first exchange of the
        # reduction, which would give every lane a different sum.
        squares = tl.sum(tl.fma(sums, sums, 0.0), 1)
        total = tl.load(state, mask=wanted, other=1) + squares / width
        tl.debug_barrier()  # every warp has read the states before one of them writes
        tl.store(state, total, mask=wanted)
        factor = factor / (tl.sqrt(total) + tl.load(eps))
    value = tl.load(weights, mask=inside, other=0).to(sums.dtype)
    tl.store(weights, value - factor[:, None] * sums, mask=inside)


@triton.jit
def add_within_runs(begins, value, other_begins, other_value):
    """Combine two elements of a segmented scan, which restarts wherever a run begins."""
    return begins | other_begins, tl.where(other_begins != 0, other_value, value + other_value)


@triton.jit(
    do_not_specialize=[
        *("tables", "pitches", "first", "states", "learning_rate", "eps", "positions", "all_rows")
    ]
)
def reduce_runs(
    tables,
    pitches,
    first,
    states,
    keys,  # (positions,), sorted
    order,  # (positions,) the position that each key had
    grad_output,  # (batch, tables, width), by its strides
    heads,  # (pieces, width): the sum of a run that began before the piece
    tails,  # (pieces, width): the sum of a run that begins in the piece and goes on
    learning_rate,
    eps,
    positions,
    width,
    all_rows,
    grad_sample_stride,
    grad_table_stride,
    UPDATE: tl.constexpr,
    TABLES: tl.constexpr,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    piece = tl.program_id(0).to(tl.int64)
    place = piece * RUN + tl.arange(0, RUN)
    columns = tl.arange(0, WIDTH)
    inside = place < positions
    key = tl.load(keys + place, mask=inside, other=-1).to(tl.int64)
    left = tl.load(keys + place - 1, mask=inside & (place > 0), other=-1).to(tl.int64)
    right = tl.load(keys + place + 1, mask=place + 1 < positions, other=-1).to(tl.int64)
    position = tl.load(order + place, mask=inside, other=0)
    table = position % TABLES
    source = grad_output + position // TABLES * grad_sample_stride + table * grad_table_stride
    in_row = (columns < width)[None, :]
    value = tl.load(source[:, None] + columns[None, :], mask=inside[:, None] & in_row, other=0)
    value = value.to(heads.dtype.element_ty)
    begins = ((key != left)[:, None] & (columns[None, :] >= 0)).to(tl.int32)
    _, sums = tl.associative_scan((begins, value), 0, add_within_runs)

    before = tl.load(keys + piece * RUN - 1, mask=piece > 0, other=-1).to(tl.int64)
    began_before = key == before
    ends = key != right
    at_end = place == piece * RUN + RUN - 1
    counts = inside & (key != all_rows)
    border = piece * width + columns[None, :]
    to_head = counts & began_before & (ends | at_end)
    tl.store(heads + border + place[:, None] * 0, sums, mask=to_head[:, None] & in_row)
    to_tail = counts & (began_before == 0) & at_end & (ends == 0)
    tl.store(tails + border + place[:, None] * 0, sums, mask=to_tail[:, None] & in_row)
    change_rows(
        sums,
        key,
        table,
        counts & ends & (began_before == 0),
        tables,
        pitches,
        first,
        states,
        learning_rate,
        eps,
        width,
        UPDATE,
        TABLES,
        WIDTH,
        BYTES,
        ELEMENTS,
    )


@triton.jit(
    do_not_specialize=[
        *("tables", "pitches", "first", "states", "learning_rate", "eps", "positions", "all_rows")
    ]
)
def join_runs(
    tables,
    pitches,
    first,
    states,
    keys,  # (positions,), sorted
    order,  # (positions,)
    heads,  # (pieces, width)
    tails,  # (pieces, width)
    learning_rate,
    eps,
    positions,
    width,
    all_rows,
    UPDATE: tl.constexpr,
    TABLES: tl.constexpr,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    PIECES: tl.constexpr,  # partial sums added at a time
):
    piece = tl.program_id(0).to(tl.int64)
    end = (piece + 1) * RUN
    goes_on = end < positions
    key = tl.load(keys + end - 1, mask=goes_on, other=-1).to(tl.int64)
    right = tl.load(keys + end, mask=goes_on, other=-2).to(tl.int64)
    left = tl.load(keys + piece * RUN - 1, mask=goes_on & (piece > 0), other=-1).to(tl.int64)
    if goes_on & (key == right) & (key != left) & (key != all_rows):
        columns = tl.arange(0, WIDTH)
        in_row = columns < width
        total = tl.load(tails + piece * width + columns, mask=in_row, other=0)
        next_piece = piece + 1
        searching = True
        while searching:
            pieces = next_piece + tl.arange(0, PIECES)
            reached = pieces * RUN < positions
            reached &= tl.load(keys + pieces * RUN, mask=reached, other=-1) == key
            source = heads + pieces[:, None] * width + columns[None, :]
            part = tl.load(source, mask=reached[:, None] & in_row[None, :], other=0)
            total += tl.sum(part, 0)
            next_piece += PIECES
            searching = tl.min(reached.to(tl.int32), 0) == 1
        one = tl.zeros((1,), tl.int64)
        table = tl.load(order + end - 1) % TABLES
        change_rows(
            total[None, :],
            one + key,
            one + table,
            one == 0,
            tables,
            pitches,
            first,
            states,
            learning_rate,
            eps,
            width,
            UPDATE,
            TABLES,
            WIDTH,
            BYTES,
            ELEMENTS,
        )
