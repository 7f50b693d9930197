"""act(input Wᵀ + b) in Triton: a tiled product with the activation in its epilogue.

Sizes are ``rows`` (M), ``columns`` (N) and ``depth`` (K). Operands are read by their strides,
outputs are row-major. Offsets are 64-bit; a tile computes them once per row, not once per element.
Dots accumulate in float32. PRECISION is the arithmetic for float32 operands ("ieee" or "tf32").
"""

import triton
import triton.language as tl

from fuselab.ops._shared.triton_activations import activate, pull_back


@triton.jit
def _tile(pointer, row, column, row_stride, column_stride, rows, columns):
    """Load the elements at rows x columns of a strided matrix, 0 beyond its edges."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(pointer + offset, mask, 0.0)


@triton.jit
def _store(pointer, value, row, column, rows, columns):
    """Store a tile of a row-major matrix."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask)


@triton.jit
def _bias_row(bias, column, bias_stride, columns):
    return tl.load(bias + column.to(tl.int64) * bias_stride, column < columns, 0.0).to(tl.float32)


@triton.jit
def add_product(total, x, w, PRECISION: tl.constexpr):
    """Return total + x w, one step of a product along ``depth``.

    Float32 FMAs are summed step by step, because one long chain of additions errs more: over K =
    4097 products, emulated, an output of about 1 is off by 1.0e-5 in one chain and by 2.1e-6 in
    blocks of 16. Without max_num_imprecise_acc Triton folds the addition into the dot, which makes
    it one chain again.
    """
    if x.dtype == tl.float32 and PRECISION == "ieee":
        return total + tl.dot(x, w, input_precision=PRECISION, max_num_imprecise_acc=x.shape[1])
    else:
        return tl.dot(x, w, total, input_precision=PRECISION)


@triton.jit
def forward(
    input, weight, bias, output,  # (rows, depth), (columns, depth), (columns,) or None, output
    rows, columns, depth,
    input_row, input_column, weight_row, weight_column, bias_stride,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, WHOLE_DEPTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a ROWS x COLUMNS tile of the output per program, in steps of DEPTH along the depth.

    Programs run down GROUP tiles of rows before they move to the next tile of columns, so that
    programs that run at the same time share their operands in L2. An element of input is read
    columns / COLUMNS times, one of weight rows / ROWS times, mostly from L2; the output is written
    once. WHOLE_DEPTH: depth is a multiple of DEPTH, and the loads need no mask along it.
    """
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    in_group = GROUP * across
    first = program // in_group * GROUP
    height = tl.minimum(down - first, GROUP)
    row = (first + program % in_group % height) * ROWS + tl.arange(0, ROWS)
    column = program % in_group // height * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, DEPTH)
    of_input = input + row.to(tl.int64)[:, None] * input_row
    of_input += place.to(tl.int64)[None, :] * input_column
    of_weight = weight + column.to(tl.int64)[None, :] * weight_row
    of_weight += place.to(tl.int64)[:, None] * weight_column
    step = tl.full((), DEPTH, tl.int64)
    has_row, has_column = (row < rows)[:, None], (column < columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        if WHOLE_DEPTH:
            x = tl.load(of_input, has_row, 0.0)
            w = tl.load(of_weight, has_column, 0.0)
        else:
            inside = start + place < depth
            x = tl.load(of_input, has_row & inside[None, :], 0.0)
            w = tl.load(of_weight, has_column & inside[:, None], 0.0)
        total = add_product(total, x, w, PRECISION)
        of_input += step * input_column
        of_weight += step * weight_column
    if bias is not None:
        total += _bias_row(bias, column, bias_stride, columns)[None, :]
    total = activate(total, ACTIVATION, output.dtype.element_ty)
    _store(output, total, row, column, rows, columns)


@triton.jit
def forward_shallow(
    input, weight, bias, output,  # as in forward
    rows, columns, depth, workers,
    input_row, input_column, weight_row, weight_column, bias_stride,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute the output where the whole depth is one dot (depth <= DEPTH). Writing the output is
    the limit here.

    A program owns COLUMNS columns, holds their weights, and writes every ``workers``-th tile of
    ROWS rows. The next tile's input is being loaded while one is computed. An element of input is
    read columns / COLUMNS times, one of weight ``workers`` times; the output is written once.
    """
    across = tl.cdiv(columns, COLUMNS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, DEPTH)
    w = _tile(weight, column, place, weight_row, weight_column, columns, depth)
    if bias is not None:
        bias_row = _bias_row(bias, column, bias_stride, columns)[None, :]
    first = tl.program_id(0) // across
    row = first * ROWS + tl.arange(0, ROWS)
    x = _tile(input, row, place, input_row, input_column, rows, depth)
    for tile in range(first, tl.cdiv(rows, ROWS), workers):
        row = tile * ROWS + tl.arange(0, ROWS)
        following = row.to(tl.int64) + workers * ROWS
        x_following = _tile(input, following, place, input_row, input_column, rows, depth)
        total = tl.dot(x, tl.trans(w), input_precision=PRECISION)
        if bias is not None:
            total += bias_row
        total = activate(total, ACTIVATION, output.dtype.element_ty)
        _store(output, total, row, column, rows, columns)
        x = x_following


@triton.jit
def backward_shallow(
    grad, output, input, weight, bias,  # output None for identity and where FROM_OUTPUT is False
    grad_total,  # row-major (rows, columns): the pre-activation's gradient, or None
    weight_sums, bias_sums,  # (workers, columns, depth) float32, (workers, columns) float64, None
    rows, columns, depth, rows_per_worker,
    grad_row, grad_column, input_row, input_column, weight_row, weight_column, bias_stride,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, RECOMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of weight and bias in one pass over the upstream gradient and the
    output, and the pre-activation's if the input's is needed (by a later product).

    A program owns COLUMNS columns of ``rows_per_worker`` rows and writes its partial sums;
    ``column_sums`` adds those in a fixed order. RECOMPUTE: the pre-activation is computed again
    from input and weight, which costs a dot of DEPTH and no pass over memory.
    """
    across = tl.cdiv(columns, COLUMNS)
    worker = tl.program_id(0) // across
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, DEPTH)
    if RECOMPUTE:
        w = _tile(weight, column, place, weight_row, weight_column, columns, depth)
        if bias is not None:
            bias_row = _bias_row(bias, column, bias_stride, columns)[None, :]
    of_weight = tl.zeros((COLUMNS, DEPTH), tl.float32)
    of_bias = tl.zeros((COLUMNS,), tl.float64)
    start = worker.to(tl.int64) * rows_per_worker
    last = tl.minimum(start + rows_per_worker, rows)
    for first in range(0, rows_per_worker, ROWS):
        row = start + first + tl.arange(0, ROWS)
        gradient = _tile(grad, row, column, grad_row, grad_column, last, columns).to(tl.float32)
        x = _tile(input, row, place, input_row, input_column, last, depth)
        if RECOMPUTE:
            saved = tl.dot(x, tl.trans(w), input_precision=PRECISION)
            if bias is not None:
                saved += bias_row
            gradient = pull_back(gradient, saved, ACTIVATION, grad.dtype.element_ty)
        elif output is not None:
            saved = _tile(output, row, column, columns, 1, last, columns).to(tl.float32)
            gradient = pull_back(gradient, saved, ACTIVATION, grad.dtype.element_ty)
        # Masked by a select: past the edge a bias can turn 0 * pull_back into NaN.
        inside = (row < last)[:, None] & (column < columns)[None, :]
        gradient = tl.where(inside, gradient, 0.0)
        rounded = gradient.to(x.dtype)
        if grad_total is not None:
            _store(grad_total, rounded, row, column, last, columns)
        if weight_sums is not None:
            of_weight = tl.dot(tl.trans(rounded), x, of_weight, input_precision=PRECISION)
        if bias_sums is not None:
            of_bias += tl.sum(gradient.to(tl.float64), axis=0)
    if weight_sums is not None:
        sums = weight_sums + worker.to(tl.int64) * columns * depth
        _store(sums, of_weight, column, place, columns, depth)
    if bias_sums is not None:
        tl.store(bias_sums + worker.to(tl.int64) * columns + column, of_bias, column < columns)
