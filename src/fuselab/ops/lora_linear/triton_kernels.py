"""act(x Wᵀ + bias + scale S Bᵀ), S = x Aᵀ, and its gradients, in Triton.

Four kernels make the operator, split at S as in LoRAFusion (Zhu et al., arXiv:2510.00206).
``project`` computes S. ``combine`` computes the output and, with other operands, the input's
gradient. ``pull_back_and_reduce`` computes the sums over columns (S's gradient) and over rows (the
gradients of A and B) in one read of the upstream gradient. ``sum_parts`` adds its partial sums.

Sizes are ``rows`` (M), ``columns`` (N), ``inner`` (K) and ``rank`` (r). Operands are read by their
strides, outputs are row-major. Offsets are 64-bit; a tile computes them once. Dots accumulate in
float32. PRECISION is the arithmetic for float32 operands ("ieee" or "tf32"). A float argument is
passed by value, or through ``scale_pointer`` under torch.compile.
"""

import triton
import triton.language as tl

from fuselab.ops._shared.triton_activations import activate, pull_back
from fuselab.ops.linear_activation.triton_kernels import add_product


@triton.jit
def _scale_of(scale_pointer, scale):
    if scale_pointer is not None:
        return tl.load(scale_pointer).to(tl.float32)
    else:
        return tl.full((), scale, tl.float32)


@triton.jit
def _offset(row, column, row_stride, column_stride):
    """Return the offsets of rows x columns of a strided matrix."""
    return row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride


@triton.jit
def project(
    input, factor, output,  # (rows, inner), (rank, inner), (rows, rank)
    scale_pointer, scale,
    rows, inner, rank,
    input_row, input_column, factor_row, factor_column,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_INNER: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Compute output = scale * input factorᵀ, which is narrow: reading the input is the limit.

    A program owns BLOCK_ROWS rows and BLOCK_RANK columns and walks all of ``inner``. An element of
    input is read rank / BLOCK_RANK times, one of factor rows / BLOCK_ROWS times, from L2.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    place = tl.arange(0, BLOCK_INNER)
    of_input = input + _offset(row, place, input_row, input_column)
    of_factor = factor + _offset(place, column, factor_column, factor_row)
    has_row, has_column = (row < rows)[:, None], (column < rank)[None, :]
    step = tl.full((), BLOCK_INNER, tl.int64)
    total = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)
    for start in range(0, inner, BLOCK_INNER):
        inside = place < inner - start
        x = tl.load(of_input, has_row & inside[None, :], 0.0)
        f = tl.load(of_factor, has_column & inside[:, None], 0.0)
        total = add_product(total, x, f, PRECISION)
        of_input += step * input_column
        of_factor += step * factor_column
    total *= _scale_of(scale_pointer, scale)
    tl.store(
        output + _offset(row, column, rank, 1),
        total.to(output.dtype.element_ty),
        has_row & has_column,
    )


@triton.jit
def combine(
    input, weight,  # (rows, inner), (columns, inner): pointers or tensor maps
    bias, projection, up,  # (columns,) or None, (rows, rank), (columns, rank)
    output,  # (rows, columns)
    scale_pointer, scale,
    rows, columns, inner, rank,
    input_row, input_column, weight_row, weight_column, bias_stride,
    projection_row, projection_column, up_row, up_column,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, MAPS: tl.constexpr,
    RANK_BLOCKS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Compute output = act(input weightᵀ + scale projection upᵀ + bias), rounded once.

    A program owns a BLOCK_ROWS x BLOCK_COLUMNS tile. The update goes into the accumulator first and
    the product is added to it, so that one accumulator is enough. Programs run down GROUP tiles of
    rows before they move to the next tile of columns, so that programs that run at the same time
    share their operands in L2: an element of input is read columns / BLOCK_COLUMNS times, one of
    weight rows / BLOCK_ROWS times, mostly from L2; the output is written once.

    MAPS: "none"; else input and weight are tensor maps (TMA), that of weight laid out as "rows"
    (columns, inner) or as "columns" (inner, columns).
    """
    down, across = tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(columns, BLOCK_COLUMNS)
    scale = _scale_of(scale_pointer, scale)
    component = tl.arange(0, BLOCK_RANK)
    place = tl.arange(0, BLOCK_INNER)
    step = tl.full((), BLOCK_INNER, tl.int64)
    tile, in_group = tl.program_id(0), GROUP * across
    first = tile // in_group * GROUP
    height = tl.minimum(down - first, GROUP)
    first_row = (first + tile % in_group % height) * BLOCK_ROWS
    first_column = tile % in_group // height * BLOCK_COLUMNS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    column = first_column + tl.arange(0, BLOCK_COLUMNS)
    has_row, has_column = (row < rows)[:, None], (column < columns)[None, :]

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for block in tl.static_range(RANK_BLOCKS):
        at = component + block * BLOCK_RANK
        has_component = at < rank
        s = tl.load(
            projection + _offset(row, at, projection_row, projection_column),
            has_row & has_component[None, :],
            0.0,
        )
        b = tl.load(
            up + _offset(at, column, up_column, up_row),
            has_column & has_component[:, None],
            0.0,
        )
        total = tl.dot(s, b, total, input_precision=PRECISION)
    total *= scale
    if bias is not None:
        of_bias = bias + column.to(tl.int64) * bias_stride
        total += tl.load(of_bias, column < columns, 0.0).to(tl.float32)[None, :]

    if MAPS == "none":
        of_input = input + _offset(row, place, input_row, input_column)
        of_weight = weight + _offset(place, column, weight_column, weight_row)
    for start in range(0, inner, BLOCK_INNER):
        if MAPS == "rows":
            x = input.load([first_row, start])
            w = weight.load([first_column, start]).T
        elif MAPS == "columns":
            x = input.load([first_row, start])
            w = weight.load([start, first_column])
        else:
            inside = place < inner - start
            x = tl.load(of_input, has_row & inside[None, :], 0.0)
            w = tl.load(of_weight, has_column & inside[:, None], 0.0)
            of_input += step * input_column
            of_weight += step * weight_column
        total = add_product(total, x, w, PRECISION)

    total = activate(total, ACTIVATION, output.dtype.element_ty)
    tl.store(
        output + _offset(row, column, columns, 1),
        total.to(output.dtype.element_ty),
        has_row & has_column,
    )


@triton.jit
def pull_back_and_reduce(
    upstream, saved,  # (rows, columns); saved (row-major) or None: the upstream gradient passes
    factor, projection,  # (columns, rank) or None, (rows, rank) or None
    grad,  # (rows, columns): the pre-activation's gradient; None if not needed
    row_parts,  # float32 (column tiles, rows, rank): parts of grad factor; None where factor is
    column_parts,  # float32 (workers, columns, rank): parts of gradᵀ projection; None likewise
    rows, columns, rank, rows_per_worker,
    upstream_row, upstream_column, factor_row, factor_column, projection_row, projection_column,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Pull the upstream gradient back and reduce it against factor and projection, in one read.

    A program owns BLOCK_COLUMNS columns of ``rows_per_worker`` rows and BLOCK_RANK of the rank, and
    walks down BLOCK_ROWS rows at a time. upstream and saved are read once, and grad is written
    once, per block of the rank. The part of gradᵀ projection stays in registers to the end; the
    part of grad factor is stored for every tile of rows.
    """
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    worker, column_tile = tl.program_id(0) // across, tl.program_id(0) % across
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    component = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    has_column, has_component = (column < columns)[None, :], (component < rank)[None, :]
    if factor is not None:
        b = tl.load(
            factor + _offset(column, component, factor_row, factor_column),
            (column < columns)[:, None] & has_component,
            0.0,
        )
        row_parts += column_tile.to(tl.int64) * rows * rank
    if projection is not None:
        total = tl.zeros((BLOCK_COLUMNS, BLOCK_RANK), tl.float32)
    start = worker.to(tl.int64) * rows_per_worker
    last = tl.minimum(start + rows_per_worker, rows)
    for first in range(0, rows_per_worker, BLOCK_ROWS):
        row = start + first + tl.arange(0, BLOCK_ROWS)
        has_row = (row < last)[:, None]
        of_upstream = upstream + _offset(row, column, upstream_row, upstream_column)
        g = tl.load(of_upstream, has_row & has_column, 0.0)
        if saved is not None:
            offset = _offset(row, column, columns, 1)
            y = tl.load(saved + offset, has_row & has_column, 0.0).to(tl.float32)
            # Past the edge both are 0, and pull_back(0, 0) is 0 for every activation.
            g = pull_back(g.to(tl.float32), y, ACTIVATION, upstream.dtype.element_ty).to(
                upstream.dtype.element_ty
            )
            if grad is not None:
                tl.store(grad + offset, g, has_row & has_column)
        if factor is not None:
            part = tl.dot(g, b, input_precision=PRECISION)
            tl.store(row_parts + _offset(row, component, rank, 1), part, has_row & has_component)
        if projection is not None:
            s = tl.load(
                projection + _offset(row, component, projection_row, projection_column),
                has_row & has_component,
                0.0,
            )
            total = tl.dot(tl.trans(g), s, total, input_precision=PRECISION)
    if projection is not None:
        parts = column_parts + worker.to(tl.int64) * columns * rank
        tl.store(
            parts + _offset(column, component, rank, 1),
            total,
            (column < columns)[:, None] & has_component,
        )


@triton.jit
def sum_parts(
    parts, output,  # float32 (count, rows, rank), (rows, rank) of any strides
    scale_pointer, scale,
    count, numel, rank, output_row, output_column,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute output = scale * the sum of the parts, in a fixed order. A program owns BLOCK
    elements and reads PARTS parts at a time."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        offset = part.to(tl.int64)[:, None] * numel + element[None, :]
        total += tl.sum(tl.load(parts + offset, (part < count)[:, None] & mask[None, :], 0.0), 0)
    total *= _scale_of(scale_pointer, scale)
    offset = element // rank * output_row + element % rank * output_column
    tl.store(output + offset, total.to(output.dtype.element_ty), mask)
