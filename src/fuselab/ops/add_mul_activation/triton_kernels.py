"""act(input + scale * update + bias) in Triton, forward and backward.

``update`` or ``bias`` is None if the operator has none. Arithmetic is in COMPUTE (float32, or
float64 for a float64 output). Every operand is read once and every output written once.

A program of a flat kernel owns one tile of BLOCK consecutive elements. The tile's start is a 64-bit
scalar and the offsets inside it are 32-bit, so that any size is right at no extra cost. A program
of a strided kernel owns BLOCK_ROWS x BLOCK_COLUMNS elements of a nest of up to five loops; WIDE
makes its offsets 64-bit. A float argument is passed by value, or through ``scale_pointer`` under
torch.compile.
"""

import triton
import triton.language as tl

from fuselab.ops._shared.triton_activations import activate, pull_back
from fuselab.ops._shared.triton_nest import offset_of, tile_of_nest, unspecialized


@triton.jit
def _scale_of(scale_pointer, scale, COMPUTE: tl.constexpr):
    if scale_pointer is not None:
        return tl.load(scale_pointer).to(COMPUTE)
    else:
        return tl.full((), scale, COMPUTE)


@triton.jit
def _columns_of(
    tile, columns, VECTOR: tl.constexpr, BLOCK: tl.constexpr, WRAPS_ONCE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Return the column of each element of a tile. VECTOR divides ``columns``: an aligned group of
    VECTOR elements lies in one row, which allows 16-byte loads of the bias and needs one division
    per group. WIDE: there are 2^31 elements or more; a 64-bit division takes about 100
    instructions."""
    if WIDE:
        position = tile.to(tl.int64) * BLOCK % columns + tl.arange(0, BLOCK)
    else:
        position = tile * BLOCK % columns + tl.arange(0, BLOCK)
    if WRAPS_ONCE:
        column = tl.where(position >= columns, position - columns, position)
    else:
        column = position % columns
    return tl.max_contiguous(tl.multiple_of(column, VECTOR), VECTOR)


@triton.jit
def _preactivation(
    input, update, bias, bias_offset, scale, offset, mask, bias_mask, COMPUTE: tl.constexpr
):
    total = tl.load(input + offset, mask).to(COMPUTE)
    if update is not None:
        total += scale * tl.load(update + offset, mask).to(COMPUTE)
    if bias is not None:
        total += tl.load(bias + bias_offset, bias_mask).to(COMPUTE)
    return total


@triton.jit
def _forward_tile(
    input, update, bias, output, scale, offset, bias_offset, mask,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    total = _preactivation(input, update, bias, bias_offset, scale, offset, mask, mask, COMPUTE)
    tl.store(output + offset, activate(total, ACTIVATION, output.dtype.element_ty), mask)


# A stride of the bias only matters for being 1 or not; VECTOR says the rest.
@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["columns", "bias_stride"])
def forward(
    input, update, bias, output,  # dense, in one memory order; bias: (columns,), or one element
    scale_pointer, scale: tl.float64,
    numel, columns, bias_stride,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr, WRAPS_ONCE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    scale = _scale_of(scale_pointer, scale, COMPUTE)
    offset = tl.arange(0, BLOCK)
    bias_offset = offset
    if bias is not None:
        column = _columns_of(tl.program_id(0), columns, VECTOR, BLOCK, WRAPS_ONCE, WIDE)
        bias_offset = column * bias_stride
    input += start
    output += start
    if update is not None:
        update += start
    # Only the last tile has a mask: a mask that may end at any element would make every load of
    # every tile scalar.
    if start + BLOCK <= numel:
        _forward_tile(
            input, update, bias, output, scale, offset, bias_offset, None, ACTIVATION, COMPUTE
        )
    else:
        mask = offset < numel - start
        _forward_tile(
            input, update, bias, output, scale, offset, bias_offset, mask, ACTIVATION, COMPUTE
        )


@triton.jit(**unspecialized("input", "update", "bias"))
def forward_strided(
    input, update, bias, output,  # output: dense, in memory order; the others by their strides
    scale_pointer, scale: tl.float64,
    rows, size_1, size_2, size_3, size_4,
    input_0, input_1, input_2, input_3, input_4,
    update_0, update_1, update_2, update_3, update_4,
    bias_0, bias_1, bias_2, bias_3, bias_4,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr, MATRIX: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, mask = tile_of_nest(size_3, size_4, rows, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
    offset = offset_of(
        row, column, size_1, size_2, size_3, input_0, input_1, input_2, input_3, input_4, MATRIX
    )
    total = tl.load(input + offset, mask).to(COMPUTE)
    if update is not None:
        offset = offset_of(
            row, column, size_1, size_2, size_3,
            update_0, update_1, update_2, update_3, update_4, MATRIX,
        )  # fmt: skip
        scale = _scale_of(scale_pointer, scale, COMPUTE)
        total += scale * tl.load(update + offset, mask).to(COMPUTE)
    if bias is not None:
        offset = offset_of(
            row, column, size_1, size_2, size_3, bias_0, bias_1, bias_2, bias_3, bias_4, MATRIX
        )
        total += tl.load(bias + offset, mask).to(COMPUTE)
    result = activate(total, ACTIVATION, output.dtype.element_ty)
    tl.store(output + row * size_4 + column, result, mask)


@triton.jit
def _store_gradients(grad_input, grad_update, gradient, scale, offset, mask):
    if grad_input is not None:
        tl.store(grad_input + offset, gradient.to(grad_input.dtype.element_ty), mask)
    if grad_update is not None:
        tl.store(grad_update + offset, (gradient * scale).to(grad_update.dtype.element_ty), mask)


@triton.jit
def _backward_tile(
    grad, first, update, bias, grad_input, grad_update, scale, offset, bias_offset, mask,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr, FROM_OUTPUT: tl.constexpr,
):  # fmt: skip
    gradient = tl.load(grad + offset, mask).to(COMPUTE)
    if first is not None:
        if FROM_OUTPUT:
            saved = tl.load(first + offset, mask).to(COMPUTE)
        else:
            saved = _preactivation(
                first, update, bias, bias_offset, scale, offset, mask, mask, COMPUTE
            )
        gradient = pull_back(gradient, saved, ACTIVATION, grad.dtype.element_ty)
    _store_gradients(grad_input, grad_update, gradient, scale, offset, mask)


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["columns", "bias_stride"])
def backward(
    grad, first, update, bias,  # first: output, input, or None for identity
    grad_input, grad_update,  # None where not needed
    scale_pointer, scale: tl.float64,
    numel, columns, bias_stride,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr, FROM_OUTPUT: tl.constexpr,
    VECTOR: tl.constexpr, WRAPS_ONCE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    scale = _scale_of(scale_pointer, scale, COMPUTE)
    offset = tl.arange(0, BLOCK)
    bias_offset = offset
    if bias is not None:
        column = _columns_of(tl.program_id(0), columns, VECTOR, BLOCK, WRAPS_ONCE, WIDE)
        bias_offset = column * bias_stride
    grad += start
    if first is not None:
        first += start
    if update is not None:
        update += start
    if grad_input is not None:
        grad_input += start
    if grad_update is not None:
        grad_update += start
    if start + BLOCK <= numel:
        _backward_tile(
            grad, first, update, bias, grad_input, grad_update, scale, offset, bias_offset, None,
            ACTIVATION, COMPUTE, FROM_OUTPUT,
        )  # fmt: skip
    else:
        mask = offset < numel - start
        _backward_tile(
            grad, first, update, bias, grad_input, grad_update, scale, offset, bias_offset, mask,
            ACTIVATION, COMPUTE, FROM_OUTPUT,
        )  # fmt: skip


@triton.jit(**unspecialized("grad", "first", "update", "bias"))
def backward_strided(
    grad, first, update, bias, grad_input, grad_update,  # the last two: dense, in memory order
    scale_pointer, scale: tl.float64,
    rows, size_1, size_2, size_3, size_4,
    grad_0, grad_1, grad_2, grad_3, grad_4,
    first_0, first_1, first_2, first_3, first_4,
    update_0, update_1, update_2, update_3, update_4,
    bias_0, bias_1, bias_2, bias_3, bias_4,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr, FROM_OUTPUT: tl.constexpr,
    MATRIX: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, mask = tile_of_nest(size_3, size_4, rows, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
    scale = _scale_of(scale_pointer, scale, COMPUTE)
    offset = offset_of(
        row, column, size_1, size_2, size_3, grad_0, grad_1, grad_2, grad_3, grad_4, MATRIX
    )
    gradient = tl.load(grad + offset, mask).to(COMPUTE)
    if first is not None:
        offset = offset_of(
            row, column, size_1, size_2, size_3, first_0, first_1, first_2, first_3, first_4, MATRIX
        )
        saved = tl.load(first + offset, mask).to(COMPUTE)
        if not FROM_OUTPUT:
            if update is not None:
                offset = offset_of(
                    row, column, size_1, size_2, size_3,
                    update_0, update_1, update_2, update_3, update_4, MATRIX,
                )  # fmt: skip
                saved += scale * tl.load(update + offset, mask).to(COMPUTE)
            if bias is not None:
                offset = offset_of(
                    row, column, size_1, size_2, size_3,
                    bias_0, bias_1, bias_2, bias_3, bias_4, MATRIX,
                )  # fmt: skip
                saved += tl.load(bias + offset, mask).to(COMPUTE)
        gradient = pull_back(gradient, saved, ACTIVATION, grad.dtype.element_ty)
    _store_gradients(grad_input, grad_update, gradient, scale, row * size_4 + column, mask)


@triton.jit(
    do_not_specialize=["rows", "span"],
    do_not_specialize_on_alignment=["grad_column", "first_column", "update_column", "bias_column"],
)
def backward_with_bias(
    grad, first, update, bias,  # matrices (rows, columns) by their strides; bias (columns,)
    grad_input, grad_update,  # row-major, or None where not needed
    sums,  # float64 (row blocks, columns), or the gradient of the bias if there is one row block
    scale_pointer, scale: tl.float64,
    rows, columns, span,
    grad_row, grad_column, first_row, first_column, update_row, update_column, bias_column,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr, FROM_OUTPUT: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients and the column sums of a block of ``span`` rows by BLOCK_COLUMNS
    columns. ``column_sums`` adds the blocks' sums in a fixed order. Sums are in float64, so that a
    column of a million equal gradients comes out right; that is one conversion and one addition per
    element, a tenth of what an H200 can do while it waits for memory."""
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    block = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    first_of_block = block * span
    if WIDE:
        first_of_block = block.to(tl.int64) * span
        column = column.to(tl.int64)
    last_of_block = tl.minimum(first_of_block + span, rows)
    scale = _scale_of(scale_pointer, scale, COMPUTE)
    if bias is not None:
        bias_row = tl.load(bias + column * bias_column, column < columns).to(COMPUTE)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float64)
    for start in range(first_of_block, last_of_block, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (row < last_of_block) & (column < columns)
        gradient = tl.load(grad + row * grad_row + column * grad_column, mask, 0).to(COMPUTE)
        if first is not None:
            saved = tl.load(first + row * first_row + column * first_column, mask, 0).to(COMPUTE)
            if not FROM_OUTPUT:
                if update is not None:
                    offset = row * update_row + column * update_column
                    saved += scale * tl.load(update + offset, mask, 0).to(COMPUTE)
                if bias is not None:
                    saved += bias_row
            gradient = pull_back(gradient, saved, ACTIVATION, grad.dtype.element_ty)
        _store_gradients(grad_input, grad_update, gradient, scale, row * columns + column, mask)
        # Masked by a select: past the edge a bias can turn 0 * pull_back into NaN.
        total += tl.where(mask, gradient, 0.0).to(tl.float64)
    sum_of_block = tl.sum(total, axis=0)[None, :]
    offset = block * columns + column
    tl.store(sums + offset, sum_of_block.to(sums.dtype.element_ty), column < columns)


@triton.jit(do_not_specialize=["blocks"])
def column_sums(
    sums, grad_bias,  # (blocks, columns), (columns,)
    blocks, columns,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the blocks' sums of BLOCK_COLUMNS columns per program."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float64)
    for start in range(0, blocks, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (row < blocks) & (column < columns)
        total += tl.load(sums + row.to(tl.int64) * columns + column, mask, 0)
    result = tl.sum(total, axis=0)[None, :].to(grad_bias.dtype.element_ty)
    tl.store(grad_bias + column, result, column < columns)
