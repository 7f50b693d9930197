"""Softmax and log_softmax over one dimension and their gradients, for rows and columns, in Triton.

Tiling. ``*_rows``: a program owns ROWS whole rows, each in one block; every element is read once
and written once, and its exp is computed once. ``*_looped``: a program owns one row of any width
and walks it twice, the second time backwards, so that it finds in L2 what it read last; the running
maximum and sum are kept per lane and combined once, after the loop. ``*_columns``: the dimension is
not the last one; a program owns a tile of neighbouring columns, with coalesced accesses.

The layout of a row: row = outer * inner_count + inner, its first element is at
outer * outer_stride + inner * inner_stride, and elements are dim_stride apart. Strides count
elements and may be 0. ``output`` and ``grad_input`` are contiguous. LOG: it is log_softmax.

In place (``output`` is ``input``): a program reads and writes only its own rows or columns. If they
are resident, its stores depend on all its loads; a second pass loads a block, then stores that
block, and never returns to it.
"""

import triton
import triton.language as tl


@triton.jit
def exponential(difference):
    """Return exp of a difference <= 0 within 2 ulp, by the steps explained in cuda_kernels.cu.

    tl.exp is off by 7e-6 of the result near e^-90; tl.exp2 flushes subnormal results.
    """
    if difference.dtype == tl.float64:
        result = tl.exp(difference)
    else:
        magic = 12582912.0 + 127.0
        shifted = tl.maximum(tl.fma(difference, 1.4426950216293335, magic), magic - 126.0)
        n = shifted - magic
        r = tl.fma(difference, 1.9259629911e-8, tl.fma(difference, 1.4426950216293335, -n))
        power = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
        result = tl.exp2(r) * power
    return result


@triton.jit
def exponential_term(difference, output_dtype: tl.constexpr, LOG: tl.constexpr):
    """Return exp of an element's difference. In softmax it is multiplied by a power of two that
    depends on ``output_dtype`` only; the division by the sum removes it again. It is
    exponential_term of cuda_kernels.cu.
    """
    if difference.dtype == tl.float64 or output_dtype == tl.float32:
        result = exponential(difference)
    elif output_dtype == tl.bfloat16 and not LOG:
        result = tl.exp2(difference * 1.4426950408889634 + 8.0)
    else:
        result = tl.exp2(difference * 1.4426950408889634)
    return result


@triton.jit
def finish(difference, factor, output_dtype: tl.constexpr, LOG: tl.constexpr):
    """Return an element of the output, in a second pass; ``factor`` is 1 / total or log(total)."""
    if LOG:
        result = difference - factor
    else:
        result = exponential_term(difference, output_dtype, LOG) * factor
    return result


@triton.jit
def summand(grad, y, LOG: tl.constexpr):
    """Return the term that the backward sums over a row."""
    return grad if LOG else grad * y


@triton.jit
def gradient(grad, y, total, LOG: tl.constexpr):
    """Return the gradient of one element."""
    return grad - exponential(y) * total if LOG else y * (grad - total)


@triton.jit
def shift_for(maximum):
    """Return the maximum, or 0 in place of -inf, so that no term becomes inf - inf."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def add(total, lost, term):
    """Return (total, lost) of a compensated sum (Kahan) with ``term`` added. A lane of a long row
    adds up to 10^5 similar small terms, and float32 alone rounds each of them in the same direction
    (1.6 % off after 10^6 terms of 0.02)."""
    term += lost
    sum = total + term
    return sum, term - (sum - total)


@triton.jit
def row_start(row, inner_count, outer_stride, inner_stride):
    """Return the offset of a row's first element; ``row`` is int64."""
    return (row // inner_count) * outer_stride + (row % inner_count) * inner_stride


@triton.jit
def forward_rows(
    input,  # rows of `width` elements, strided
    output,  # (rows, width), contiguous
    rows,
    width,  # at most BLOCK
    inner_count,
    outer_stride,
    inner_stride,
    dim_stride,
    LOG: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute output[row, :] = softmax(input[row, :]), or log_softmax."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    start = row_start(row, inner_count, outer_stride, inner_stride)
    # Masked columns are -inf before the maximum is taken: a row around -200 must not get 0 as its
    # maximum.
    value = tl.load(input + start + column * dim_stride, mask=mask, other=float("-inf"))
    value = value.to(output.dtype.element_ty).to(ACCUMULATOR)
    difference = value - tl.max(value, axis=1, keep_dims=True)
    term = exponential_term(difference, output.dtype.element_ty, LOG)
    total = tl.sum(term, axis=1, keep_dims=True)
    result = difference - tl.log(total) if LOG else term * (1.0 / total)
    tl.store(output + row * width + column, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def backward_rows(
    grad_output,  # rows of `width` elements, strided
    output,  # (rows, width), contiguous
    grad_input,  # (rows, width), contiguous
    rows,
    width,  # at most BLOCK
    inner_count,
    outer_stride,
    inner_stride,
    dim_stride,
    LOG: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute grad_input[row, :] = output * (grad_output - sum(grad_output * output)), or for
    log_softmax grad_output - exp(output) * sum(grad_output)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    start = row_start(row, inner_count, outer_stride, inner_stride)
    place = row * width + column
    grad = tl.load(grad_output + start + column * dim_stride, mask=mask, other=0.0)
    y = tl.load(output + place, mask=mask, other=0.0).to(ACCUMULATOR)
    grad = grad.to(ACCUMULATOR)
    total = tl.sum(summand(grad, y, LOG), axis=1, keep_dims=True)
    result = gradient(grad, y, total, LOG)
    tl.store(grad_input + place, result.to(grad_input.dtype.element_ty), mask=mask)


@triton.jit
def forward_looped(
    input,  # rows of `width` elements, strided
    output,  # (rows, width), contiguous
    width,
    inner_count,
    outer_stride,
    inner_stride,
    dim_stride,
    LOG: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INDEX: tl.constexpr,  # the integer type of an index into a row
    BLOCK: tl.constexpr,
):
    """Compute the forward in two passes over a row of any width."""
    row = tl.program_id(0).to(tl.int64)
    input += row_start(row, inner_count, outer_stride, inner_stride)
    output += row * width
    lane = tl.arange(0, BLOCK).to(INDEX)
    blocks = tl.cdiv(width, BLOCK).to(INDEX)
    maximum = tl.full([BLOCK], float("-inf"), ACCUMULATOR)
    total = tl.zeros([BLOCK], ACCUMULATOR)
    lost = tl.zeros([BLOCK], ACCUMULATOR)
    for block in range(blocks):
        column = block * BLOCK + lane
        value = tl.load(
            input + column * dim_stride,
            mask=column < width,
            other=float("-inf"),
            eviction_policy="evict_last",
        )
        value = value.to(output.dtype.element_ty).to(ACCUMULATOR)
        new_maximum = tl.maximum(maximum, value)
        shift = shift_for(new_maximum)
        scale = exponential(maximum - shift)
        term = exponential_term(value - shift, output.dtype.element_ty, LOG)
        total, lost = add(total * scale, lost * scale, term)
        maximum = new_maximum
    shift = shift_for(tl.max(maximum, axis=0))
    total = tl.sum(total * exponential(maximum - shift), axis=0)
    factor = tl.log(total) if LOG else 1.0 / total
    for done in range(blocks):
        column = (blocks - 1 - done) * BLOCK + lane
        mask = column < width
        value = tl.load(
            input + column * dim_stride, mask=mask, other=0.0, eviction_policy="evict_first"
        )
        value = value.to(output.dtype.element_ty).to(ACCUMULATOR)
        result = finish(value - shift, factor, output.dtype.element_ty, LOG)
        tl.store(output + column, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def backward_looped(
    grad_output,  # rows of `width` elements, strided
    output,  # (rows, width), contiguous
    grad_input,  # (rows, width), contiguous
    width,
    inner_count,
    outer_stride,
    inner_stride,
    dim_stride,
    LOG: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient in two passes over a row of any width."""
    row = tl.program_id(0).to(tl.int64)
    grad_output += row_start(row, inner_count, outer_stride, inner_stride)
    output += row * width
    grad_input += row * width
    lane = tl.arange(0, BLOCK).to(INDEX)
    blocks = tl.cdiv(width, BLOCK).to(INDEX)
    total = tl.zeros([BLOCK], ACCUMULATOR)
    lost = tl.zeros([BLOCK], ACCUMULATOR)
    for block in range(blocks):
        column = block * BLOCK + lane
        mask = column < width
        grad = tl.load(
            grad_output + column * dim_stride, mask=mask, other=0.0, eviction_policy="evict_last"
        )
        y = tl.load(output + column, mask=mask, other=0.0, eviction_policy="evict_last")
        term = summand(grad.to(ACCUMULATOR), y.to(ACCUMULATOR), LOG)
        total, lost = add(total, lost, term)
    total = tl.sum(total, axis=0)
    for done in range(blocks):
        column = (blocks - 1 - done) * BLOCK + lane
        mask = column < width
        grad = tl.load(
            grad_output + column * dim_stride, mask=mask, other=0.0, eviction_policy="evict_first"
        )
        y = tl.load(output + column, mask=mask, other=0.0, eviction_policy="evict_first")
        result = gradient(grad.to(ACCUMULATOR), y.to(ACCUMULATOR), total, LOG)
        tl.store(grad_input + column, result.to(grad_input.dtype.element_ty), mask=mask)


@triton.jit
def forward_columns(
    input,  # (outer, width, inner_count), strided
    output,  # (outer, width, inner_count), contiguous
    width,
    inner_count,
    outer_stride,
    inner_stride,
    dim_stride,
    LOG: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INDEX: tl.constexpr,  # the integer type of offsets within one outer slice
    RESIDENT: tl.constexpr,  # width <= BLOCK: one read
    BLOCK: tl.constexpr,  # elements along the dimension
    COLUMNS: tl.constexpr,  # neighbouring columns
):
    """Compute output[outer, :, inner] = softmax(input[outer, :, inner]), or log_softmax."""
    tiles = tl.cdiv(inner_count, COLUMNS)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    inner = (tl.program_id(0) % tiles).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    input += outer * outer_stride
    output += outer * width * inner_count
    lane = tl.arange(0, BLOCK).to(INDEX)[:, None]
    if RESIDENT:
        mask = (lane < width) & (inner < inner_count)
        value = tl.load(
            input + lane * dim_stride + inner * inner_stride, mask=mask, other=float("-inf")
        )
        value = value.to(output.dtype.element_ty).to(ACCUMULATOR)
        difference = value - tl.max(value, axis=0, keep_dims=True)
        term = exponential_term(difference, output.dtype.element_ty, LOG)
        total = tl.sum(term, axis=0, keep_dims=True)
        result = difference - tl.log(total) if LOG else term * (1.0 / total)
        tl.store(output + lane * inner_count + inner, result.to(output.dtype.element_ty), mask=mask)
    else:
        blocks = tl.cdiv(width, BLOCK).to(INDEX)
        maximum = tl.full([BLOCK, COLUMNS], float("-inf"), ACCUMULATOR)
        total = tl.zeros([BLOCK, COLUMNS], ACCUMULATOR)
        lost = tl.zeros([BLOCK, COLUMNS], ACCUMULATOR)
        for block in range(blocks):
            row = block * BLOCK + lane
            mask = (row < width) & (inner < inner_count)
            value = tl.load(
                input + row * dim_stride + inner * inner_stride, mask=mask, other=float("-inf")
            )
            value = value.to(output.dtype.element_ty).to(ACCUMULATOR)
            new_maximum = tl.maximum(maximum, value)
            shift = shift_for(new_maximum)
            scale = exponential(maximum - shift)
            term = exponential_term(value - shift, output.dtype.element_ty, LOG)
            total, lost = add(total * scale, lost * scale, term)
            maximum = new_maximum
        shift = shift_for(tl.max(maximum, axis=0, keep_dims=True))
        total = tl.sum(total * exponential(maximum - shift), axis=0, keep_dims=True)
        factor = tl.log(total) if LOG else 1.0 / total
        for done in range(blocks):
            row = (blocks - 1 - done) * BLOCK + lane
            mask = (row < width) & (inner < inner_count)
            value = tl.load(input + row * dim_stride + inner * inner_stride, mask=mask, other=0.0)
            value = value.to(output.dtype.element_ty).to(ACCUMULATOR)
            result = finish(value - shift, factor, output.dtype.element_ty, LOG)
            tl.store(
                output + row * inner_count + inner, result.to(output.dtype.element_ty), mask=mask
            )


@triton.jit
def backward_columns(
    grad_output,  # (outer, width, inner_count), strided
    output,  # (outer, width, inner_count), contiguous
    grad_input,  # (outer, width, inner_count), contiguous
    width,
    inner_count,
    outer_stride,
    inner_stride,
    dim_stride,
    LOG: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INDEX: tl.constexpr,
    RESIDENT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradient for columns; the parameters are those of forward_columns."""
    tiles = tl.cdiv(inner_count, COLUMNS)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    inner = (tl.program_id(0) % tiles).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    grad_output += outer * outer_stride
    output += outer * width * inner_count
    grad_input += outer * width * inner_count
    lane = tl.arange(0, BLOCK).to(INDEX)[:, None]
    if RESIDENT:
        mask = (lane < width) & (inner < inner_count)
        place = lane * inner_count + inner
        grad = tl.load(grad_output + lane * dim_stride + inner * inner_stride, mask=mask, other=0.0)
        y = tl.load(output + place, mask=mask, other=0.0).to(ACCUMULATOR)
        grad = grad.to(ACCUMULATOR)
        total = tl.sum(summand(grad, y, LOG), axis=0, keep_dims=True)
        result = gradient(grad, y, total, LOG)
        tl.store(grad_input + place, result.to(grad_input.dtype.element_ty), mask=mask)
    else:
        blocks = tl.cdiv(width, BLOCK).to(INDEX)
        total = tl.zeros([BLOCK, COLUMNS], ACCUMULATOR)
        lost = tl.zeros([BLOCK, COLUMNS], ACCUMULATOR)
        for block in range(blocks):
            row = block * BLOCK + lane
            mask = (row < width) & (inner < inner_count)
            grad = tl.load(
                grad_output + row * dim_stride + inner * inner_stride, mask=mask, other=0.0
            )
            y = tl.load(output + row * inner_count + inner, mask=mask, other=0.0)
            term = summand(grad.to(ACCUMULATOR), y.to(ACCUMULATOR), LOG)
            total, lost = add(total, lost, term)
        total = tl.sum(total, axis=0, keep_dims=True)
        for done in range(blocks):
            row = (blocks - 1 - done) * BLOCK + lane
            mask = (row < width) & (inner < inner_count)
            place = row * inner_count + inner
            grad = tl.load(
                grad_output + row * dim_stride + inner * inner_stride, mask=mask, other=0.0
            )
            y = tl.load(output + place, mask=mask, other=0.0)
            result = gradient(grad.to(ACCUMULATOR), y.to(ACCUMULATOR), total, LOG)
            tl.store(grad_input + place, result.to(grad_input.dtype.element_ty), mask=mask)
