"""The outer interaction's linear layer and its gradients in Triton, as matrix products of which one
operand is formed on the way.

Let z be a sample's K numbers. y_n = sum over i <= j of z_i z_j V_n[i, j], with V_n[i, j] =
W_n[i, j] + W_n[j, i] for i < j and W_n[i, i] on the diagonal: about K²/2 products.

Order of the pairs. j is divided into blocks of BLOCK (16), with zeros past K. A block of j contains
all i up to that block's end, and its pairs run over i first, then over the block's j: pair (i, j)
of block b = j / BLOCK is number BLOCK² b (b + 1) / 2 + i BLOCK + j % BLOCK. Any run of BLOCK_I i's
of one block is contiguous in ``folded``, which has V in that order, a piece at a time. For K = 432
a row has 96768 numbers, 3.5 % more than there are pairs: those with i > j are zeros.

transpose         writes z transposed for wgmma_kernels.cu and form_across: samples are contiguous.
fold              a program adds a TILE x TILE tile of one W_n to its mirror image: W is read once.
forward           a program owns BLOCK_ROWS x BLOCK_COLUMNS of the output and a share of the pairs,
                  BLOCK_I x BLOCK of them per step. The products of z stay in registers on their way
                  to the matrix unit, also those with i > j: a mask would take them through shared
                  memory, 366 instructions per step instead of 148. If such a product is infinite,
                  and its zero weight makes it NaN, finish_output computes the sample again.
                  ``folded`` is read once per row of tiles. A later piece adds to ``partial``.
finish_output     adds the shares in a fixed order, then the bias, and applies the activation.
weight_gradient   a program owns BLOCK_COLUMNS rows n of W and BLOCK x BLOCK pairs, sums over all
                  samples, and writes both mirror images, so the gradient is written once.
input_gradient    a program owns BLOCK_ROWS samples and a share of the blocks of pairs. The gradient
                  of BLOCK x BLOCK products is one matrix product. It is multiplied with z_j for z_i
                  and with z_i for z_j, and added to a row of ``partial`` that no other program has.
finish_input      adds the shares in a fixed order.

z, grad, folded and all outputs are contiguous.

Infinite terms. If z_i z_j W[i, j] is inf and z_j z_i W[j, i] is -inf, the sum is NaN; with V it
would be infinite. The finish kernels therefore look for elements that large in every sample.
finish_output computes samples that have any (2^32 or more; in float16, those whose square
overflows) again in float64; finish_input adds the terms of infinite elements one by one. That takes
0.1 s, but a model that learns has no such elements.
"""

import triton
import triton.language as tl

from fuselab.ops._shared.triton_activations import activate
from fuselab.ops.linear_activation.triton_kernels import add_product


@triton.jit
def triangle_place(number):
    """Return (upper, lower), where number = upper (upper + 1) / 2 + lower counts the places on and
    below a diagonal row by row."""
    upper = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root is off by 1 at most for all numbers that float32 can count (2^24).
    upper = tl.where(upper * (upper + 1) // 2 > number, upper - 1, upper)
    upper = tl.where((upper + 1) * (upper + 2) // 2 <= number, upper + 1, upper)
    return upper, number - upper * (upper + 1) // 2


@triton.jit
def load_elements(z, row, column, rows, width):
    """Load z[row, column], zeros outside, as one [ROWS, COLUMNS] tile."""
    return tl.load(
        z + row[:, None] * width + column[None, :],
        mask=(row[:, None] < rows) & (column[None, :] < width),
        other=0.0,
    )


@triton.jit
def as_operand(value, PRECISION: tl.constexpr):
    """Return ``value`` as a matrix product should take it: rounded to the nearest TF32 number if
    PRECISION is "tf32", as in cuBLAS. The matrix unit would only cut 13 bits off, which doubles the
    error and makes it one-sided."""
    if PRECISION == "tf32":
        bits = value.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        value = tl.where(value == value, nearest, value)  # a NaN's bits may carry into its sign
    return value


@triton.jit
def transpose(
    z,  # (rows, width)
    transposed,  # (width, rows), rows `pitch` apart
    rows,
    width,
    pitch,
    TILE: tl.constexpr,
):
    """Compute transposed = zᵀ, zeros past the last sample, for one TILE x TILE tile."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    i = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(
        transposed + i[:, None] * pitch + row[None, :],
        tl.trans(load_elements(z, row, i, rows, width)),
        mask=(i[:, None] < width) & (row[None, :] < pitch),
    )


@triton.jit
def fold(
    weight,  # (columns, width²), rows `weight_stride` apart
    folded,  # (columns, pairs)
    columns,
    width,
    weight_stride,
    pairs,
    first_tile,
    first_pair,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,  # a multiple of BLOCK
):
    """Write folded[n] = W_n + W_nᵀ on and above the diagonal, in the order of the pairs. The piece
    begins with pair ``first_pair``, in tile ``first_tile``."""
    program = tl.program_id(0)
    n = (program % columns).to(tl.int64)
    upper, lower = triangle_place(first_tile + program // columns)
    i = lower * TILE + tl.arange(0, TILE)
    j = upper * TILE + tl.arange(0, TILE)
    weight += n * weight_stride
    folded += n * pairs
    own = tl.load(
        weight + i[:, None].to(tl.int64) * width + j[None, :],
        mask=(i[:, None] < width) & (j[None, :] < width),
        other=0.0,
        eviction_policy="evict_first",
    )
    mirrored = tl.load(
        weight + j[:, None].to(tl.int64) * width + i[None, :],
        mask=(j[:, None] < width) & (i[None, :] < width),
        other=0.0,
        eviction_policy="evict_first",
    )
    total = own.to(tl.float32) + tl.trans(mirrored).to(tl.float32)
    i, j = i[:, None], j[None, :]
    value = tl.where(i < j, total, tl.where(i == j, own.to(tl.float32), 0.0))
    value = as_operand(value, PRECISION)
    block = j // BLOCK
    place = (block.to(tl.int64) * (block + 1) // 2 * BLOCK + i) * BLOCK + j % BLOCK - first_pair
    mask = (i < (block + 1) * BLOCK) & (j < tl.cdiv(width, BLOCK) * BLOCK)
    tl.store(folded + place, value.to(folded.dtype.element_ty), mask=mask)


@triton.jit
def forward(
    z,  # (rows, width)
    folded,  # (columns, pairs)
    partial,  # (splits, rows, columns), float32
    rows,
    width,
    columns,
    pairs,
    first_step,  # of this piece of the pairs
    steps,  # in it, of BLOCK_I x BLOCK pairs
    split_steps,  # of one program
    ADDS: tl.constexpr,  # to the shares of the pieces before
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_I: tl.constexpr,  # divides BLOCK
    BLOCK: tl.constexpr,
):
    """Compute a share of the sum over pairs, for one tile, into partial[split]."""
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    tile, split = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Neighbouring programs share their columns of `folded`, so that it is read from memory once.
    row = (tile % row_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tile // row_tiles).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    first = tl.program_id(1) * split_steps
    last = tl.minimum(first + split_steps, steps)
    per_block: tl.constexpr = BLOCK // BLOCK_I
    block, lower = triangle_place((first_step + first) // per_block)
    start = lower * BLOCK + (first_step + first) % per_block * BLOCK_I
    depth: tl.constexpr = BLOCK_I * BLOCK
    inside = tl.arange(0, depth)
    share = partial + (split * rows + row[:, None]) * columns + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    if ADDS:
        total = tl.load(share, mask=mask, other=0.0)
    else:
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for step in range(first, last):
        i = start + tl.arange(0, BLOCK_I)
        j = block * BLOCK + tl.arange(0, BLOCK)
        left = load_elements(z, row, i, rows, width)
        right = load_elements(z, row, j, rows, width)
        products = as_operand(left[:, :, None] * right[:, None, :], PRECISION)
        weights = tl.load(
            folded + column[None, :] * pairs + (step * depth + inside[:, None]),
            mask=column[None, :] < columns,
            other=0.0,
        )
        products = tl.reshape(products.to(z.dtype.element_ty), [BLOCK_ROWS, depth])
        total = add_product(total, products, weights, PRECISION)
        start += BLOCK_I
        is_done = start == (block + 1) * BLOCK
        block = tl.where(is_done, block + 1, block)
        start = tl.where(is_done, 0, start)
    tl.store(share, total, mask=mask)


@triton.jit
def largest_element(z, row, rows, width, COLUMNS: tl.constexpr):
    """Return the largest |z| of every row: [ROWS], float32."""
    largest = tl.zeros(row.shape, tl.float32)
    for first in range(0, width, COLUMNS):
        value = load_elements(z, row, first + tl.arange(0, COLUMNS), rows, width)
        largest = tl.maximum(largest, tl.max(tl.abs(value.to(tl.float32)), axis=1))
    return largest


@triton.jit
def finish_output(
    partial,  # (splits, rows, columns)
    z,  # (rows, width)
    weight,  # (columns, width²), rows `weight_stride` apart
    bias,  # (columns,), or None
    output,  # (rows, columns)
    rows,
    width,
    columns,
    weight_stride,
    splits,
    split_size,  # rows x columns
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute output = activation(the sum of the shares + bias)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    place = row[:, None] * columns + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for _ in range(splits):
        total += tl.load(partial + place, mask=mask, other=0.0)
        partial += split_size
    largest = largest_element(z, row, rows, width, 128)
    is_huge = (largest * largest).to(z.dtype.element_ty).to(tl.float32) > 2.0**64
    if tl.max(is_huge.to(tl.int32)) > 0:
        exact = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float64)
        weight_row = weight + column * weight_stride
        for i in range(width):
            left = tl.load(z + row * width + i, mask=row < rows, other=0.0).to(tl.float64)
            for j in range(width):
                right = tl.load(z + row * width + j, mask=row < rows, other=0.0).to(tl.float64)
                own = tl.load(weight_row + i * width + j, mask=column < columns, other=0.0)
                exact += (left * right)[:, None] * own.to(tl.float64)[None, :]
        total = tl.where(is_huge[:, None], exact.to(tl.float32), total)
    if bias is not None:
        total += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
    total = activate(total, ACTIVATION, output.dtype.element_ty)
    tl.store(output + place, total.to(output.dtype.element_ty), mask=mask)


@triton.jit
def place_in_square(row, pairs, square, BLOCK: tl.constexpr):
    """Return the offsets of square number ``square`` in rows of ``pairs`` numbers: [ROWS, BLOCK,
    BLOCK]."""
    inside = tl.arange(0, BLOCK)
    square_place = inside[None, :, None] * BLOCK + inside[None, None, :]
    return row[:, None, None] * pairs + (square * (BLOCK * BLOCK) + square_place)


@triton.jit
def form_products(
    z,  # (rows, width)
    products,  # (rows, pairs)
    rows,
    width,
    pairs,
    first,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write products[b] = z_i z_j for every pair of a run of squares, from square ``first`` on."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    upper, lower = triangle_place(first + tl.program_id(1))
    left = load_elements(z, row, lower * BLOCK + tl.arange(0, BLOCK), rows, width)
    right = load_elements(z, row, upper * BLOCK + tl.arange(0, BLOCK), rows, width)
    place = place_in_square(row, pairs, tl.program_id(1), BLOCK)
    value = left[:, :, None] * right[:, None, :]
    tl.store(products + place, value, mask=row[:, None, None] < rows)


@triton.jit
def form_across(
    transposed,  # (width, rows), rows `pitch` apart
    products,  # (pairs, rows), likewise
    width,
    pitch,
    first,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the same products as form_products, transposed: samples are contiguous, and those past
    the last are zeros."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    upper, lower = triangle_place(first + tl.program_id(1))
    inside = tl.arange(0, BLOCK).to(tl.int64)
    left = load_elements(transposed, lower * BLOCK + inside, row, width, pitch)
    right = load_elements(transposed, upper * BLOCK + inside, row, width, pitch)
    pair = inside[:, None, None] * BLOCK + inside[None, :, None]
    place = (tl.program_id(1) * (BLOCK * BLOCK) + pair) * pitch + row[None, None, :]
    value = left[:, None, :] * right[None, :, :]
    tl.store(products + place, value, mask=row[None, None, :] < pitch)


@triton.jit
def store_mirrored(grad_weight, value, column, lower, upper, width, columns, BLOCK: tl.constexpr):
    """Write grad_weight[n, i, j] = grad_weight[n, j, i] = value, [COLUMNS, BLOCK, BLOCK], for the
    pairs of a square."""
    value = value.to(grad_weight.dtype.element_ty)
    start = grad_weight + column[:, None, None] * width * width
    i = (lower * BLOCK + tl.arange(0, BLOCK))[None, :, None]
    j = (upper * BLOCK + tl.arange(0, BLOCK))[None, None, :]
    mask = (column[:, None, None] < columns) & (i < width) & (j < width)
    tl.store(start + (i * width + j), value, mask=mask)
    if upper != lower:
        tl.store(start + (j * width + i), value, mask=mask)


@triton.jit
def weight_gradient(
    z,  # (rows, width)
    grad,  # (rows, columns), of the pre-activation
    grad_weight,  # (columns, width²)
    rows,
    width,
    columns,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS_FIRST: tl.constexpr,  # sums as [pairs, columns]: products enter from registers
):
    """Write grad_weight[n, i, j] = grad_weight[n, j, i] = sum over samples of grad_n z_i z_j."""
    program = tl.program_id(0)
    column_tiles = tl.cdiv(columns, BLOCK_COLUMNS)
    upper, lower = triangle_place(program // column_tiles)
    column = (program % column_tiles).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    i = lower * BLOCK + tl.arange(0, BLOCK)
    j = upper * BLOCK + tl.arange(0, BLOCK)
    depth: tl.constexpr = BLOCK * BLOCK
    if PAIRS_FIRST:
        total = tl.zeros([depth, BLOCK_COLUMNS], tl.float32)
    else:
        total = tl.zeros([BLOCK_COLUMNS, depth], tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        left = load_elements(z, row, i, rows, width)
        right = load_elements(z, row, j, rows, width)
        upstream = as_operand(load_elements(grad, row, column, rows, columns), PRECISION)
        if PAIRS_FIRST:
            products = tl.trans(left)[:, None, :] * tl.trans(right)[None, :, :]
            products = as_operand(products, PRECISION)
            products = tl.reshape(products.to(z.dtype.element_ty), [depth, BLOCK_ROWS])
            total = add_product(total, products, upstream, PRECISION)
        else:
            products = as_operand(left[:, :, None] * right[:, None, :], PRECISION)
            products = tl.reshape(products.to(z.dtype.element_ty), [BLOCK_ROWS, depth])
            total = add_product(total, tl.trans(upstream), products, PRECISION)
    if PAIRS_FIRST:
        total = tl.trans(total)
    value = tl.reshape(total, [BLOCK_COLUMNS, BLOCK, BLOCK])
    store_mirrored(grad_weight, value, column, lower, upper, width, columns, BLOCK)


@triton.jit
def unfold(
    grad_folded,  # (columns, pairs)
    grad_weight,  # (columns, width²)
    width,
    columns,
    pairs,
    first,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write grad_weight[n, i, j] = grad_weight[n, j, i] = grad_folded[n] of the pair."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    upper, lower = triangle_place(first + tl.program_id(1))
    place = place_in_square(column, pairs, tl.program_id(1), BLOCK)
    value = tl.load(grad_folded + place, mask=column[:, None, None] < columns, other=0.0)
    store_mirrored(grad_weight, value, column, lower, upper, width, columns, BLOCK)


@triton.jit
def add_to(pointer, value, mask):
    """Add value to memory that no other program writes. Another thread of this program may have
    written what this one reads, so a barrier precedes the load."""
    tl.debug_barrier()
    tl.store(pointer, tl.load(pointer, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def pull_square(square, z, partial, row, lower, upper, rows, width, BLOCK: tl.constexpr):
    """Add the gradients of z_i and z_j, from that of a square of products, ``square`` [ROWS, BLOCK,
    BLOCK], to ``partial``, which points at the samples' rows."""
    i = lower * BLOCK + tl.arange(0, BLOCK)
    j = upper * BLOCK + tl.arange(0, BLOCK)
    left = load_elements(z, row, i, rows, width).to(tl.float32)
    right = load_elements(z, row, j, rows, width).to(tl.float32)
    kept = ((i[:, None] <= j[None, :]) & (j[None, :] < width))[None, :, :]
    of_left = tl.sum(tl.where(kept, square * right[:, None, :], 0.0), axis=2)
    of_right = tl.sum(tl.where(kept, square * left[:, :, None], 0.0), axis=1)
    is_row = row[:, None] < rows
    add_to(partial + i[None, :], of_left, is_row & (i[None, :] < width))
    add_to(partial + j[None, :], of_right, is_row & (j[None, :] < width))


@triton.jit
def input_gradient(
    z,  # (rows, width)
    grad,  # (rows, columns), of the pre-activation
    folded,  # (columns, pairs)
    partial,  # (splits, rows, width), float32
    rows,
    width,
    columns,
    pairs,
    first_step,  # of this piece of the pairs
    steps,  # in it, of BLOCK x BLOCK pairs
    split_steps,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a share of the gradient of z, for BLOCK_ROWS samples, to partial[split]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(1) * split_steps
    last = tl.minimum(first + split_steps, steps)
    upper, lower = triangle_place(first_step + first)
    partial += tl.program_id(1).to(tl.int64) * rows * width + row[:, None] * width
    inside = tl.arange(0, BLOCK * BLOCK)
    for step in range(first, last):
        total = tl.zeros([BLOCK_ROWS, BLOCK * BLOCK], tl.float32)
        for start in range(0, columns, BLOCK_COLUMNS):
            column = start + tl.arange(0, BLOCK_COLUMNS).to(tl.int64)
            upstream = as_operand(load_elements(grad, row, column, rows, columns), PRECISION)
            weights = tl.load(
                folded + column[:, None] * pairs + (step * (BLOCK * BLOCK) + inside[None, :]),
                mask=column[:, None] < columns,
                other=0.0,
            )
            total = add_product(total, upstream, weights, PRECISION)
        square = tl.reshape(total, [BLOCK_ROWS, BLOCK, BLOCK])
        pull_square(square, z, partial, row, lower, upper, rows, width, BLOCK)
        is_done = lower == upper
        upper = tl.where(is_done, upper + 1, upper)
        lower = tl.where(is_done, 0, lower + 1)


@triton.jit
def pull_products(
    z,  # (rows, width)
    grad_products,  # (rows, pairs)
    partial,  # (splits, rows, width)
    rows,
    width,
    pairs,
    first,
    squares,  # from number `first` on
    split_squares,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a share of the gradient of z, from the gradient of its products and for BLOCK_ROWS
    samples, to partial[split]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    begin = tl.program_id(1) * split_squares
    upper, lower = triangle_place(first + begin)
    partial += tl.program_id(1).to(tl.int64) * rows * width + row[:, None] * width
    for square in range(begin, tl.minimum(begin + split_squares, squares)):
        place = place_in_square(row, pairs, square, BLOCK)
        value = tl.load(grad_products + place, mask=row[:, None, None] < rows, other=0.0)
        pull_square(value, z, partial, row, lower, upper, rows, width, BLOCK)
        is_done = lower == upper
        upper = tl.where(is_done, upper + 1, upper)
        lower = tl.where(is_done, 0, lower + 1)


@triton.jit
def finish_input(
    partial,  # (splits, rows, width)
    z,  # (rows, width)
    grad,  # (rows, columns), of the pre-activation
    weight,  # (columns, width²), rows `weight_stride` apart
    grad_dense,  # (rows, dense_width), or None
    grad_embeddings,  # (rows, width - dense_width), or None
    rows,
    width,
    columns,
    dense_width,
    weight_stride,
    splits,
    split_size,  # rows x width
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Add the shares into the gradients of dense and embeddings."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = (row[:, None] < rows) & (i[None, :] < width)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for _ in range(splits):
        total += tl.load(partial + row[:, None] * width + i[None, :], mask=mask, other=0.0)
        partial += split_size
    infinity = float("inf")
    if tl.max((largest_element(z, row, rows, width, 128) == infinity).to(tl.int32)) > 0:
        for j in range(width):
            other = tl.load(z + row * width + j, mask=row < rows, other=0.0).to(tl.float32)
            is_infinite = tl.abs(other) == infinity
            if tl.max(is_infinite.to(tl.int32)) > 0:
                above = tl.zeros_like(total)
                below = tl.zeros_like(total)
                own = weight
                for n in range(columns):
                    upstream = tl.load(grad + row * columns + n, mask=row < rows, other=0.0)
                    upstream = upstream.to(tl.float32)[:, None]
                    above += upstream * tl.load(own + i * width + j, mask=i < width, other=0.0)
                    below += upstream * tl.load(own + j * width + i, mask=i < width, other=0.0)
                    own += weight_stride
                term = above * other[:, None] + below * other[:, None]
                total += tl.where(is_infinite[:, None], term, 0.0)
    if grad_dense is not None:
        tl.store(
            grad_dense + row[:, None] * dense_width + i[None, :],
            total.to(grad_dense.dtype.element_ty),
            mask=mask & (i[None, :] < dense_width),
        )
    if grad_embeddings is not None:
        tl.store(
            grad_embeddings + row[:, None] * (width - dense_width) + (i - dense_width)[None, :],
            total.to(grad_embeddings.dtype.element_ty),
            mask=mask & (i[None, :] >= dense_width),
        )
