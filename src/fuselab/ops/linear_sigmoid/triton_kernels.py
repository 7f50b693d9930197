"""One logit per row, z = input w + b, and its sigmoid or its binary cross entropy, in Triton.

KIND is the result: "sigmoid" (the probability), "losses" (one per row), "loss" (their sum, divided
by ``divisor``: the number of rows for a mean, else 1), or "gradient" (the loss's derivative by the
logit). Memory is the limit: the input is read once, in tiles of ROWS x DEPTH; the rest is a few
bytes per row. Arithmetic is in float32, sums over rows continue in float64. Offsets are 64-bit; a
tile computes them once per row.
"""

import triton
import triton.language as tl

from fuselab.ops._shared.triton_activations import _exponential, _logistic


@triton.jit
def _log1p(x):
    """Return log(1 + x) for x in [0, 1] to full relative precision: 2 artanh(x / (2 + x)), by its
    series to s^17."""
    s = x / (2.0 + x)
    q = s * s
    p = q * 0.058823529411764705 + 0.066666666666666667
    p = p * q + 0.076923076923076923
    p = p * q + 0.090909090909090909
    p = p * q + 0.111111111111111111
    p = p * q + 0.142857142857142857
    p = p * q + 0.2
    p = p * q + 0.333333333333333333
    return 2.0 * (s + s * (q * p))


@triton.jit
def _loss(z, target):
    """Return -(t log sigmoid(z) + (1 - t) log(1 - sigmoid(z))), with infinities where eager has
    them."""
    # The order matters: z + (-z) is exact, and log1p, small for a large |z|, keeps its digits.
    return ((1.0 - target) * z - tl.where(z > 0, 0.0, z)) + _log1p(_exponential(-tl.abs(z)))


@triton.jit
def _loss_gradient(z, target):
    """Return sigmoid(z) - t. Near 1 it is computed from 1 - sigmoid(z) to keep its digits, for 1 -
    t is exact from 0.5 to 2. It is selected, not multiplied: an infinite target times a gate that
    underflowed would be NaN."""
    gate, complement = _logistic(z, False)
    return tl.where(target > 0.5, (1.0 - target) - complement, gate - target)


@triton.jit
def _load_tile(pointer, row, column, row_stride, column_stride, last, depth):
    mask = (row < last)[:, None] & (column < depth)[None, :]
    offset = row[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(pointer + offset, mask, 0.0).to(tl.float32)


@triton.jit
def _load_weight(weight, column, weight_column, depth):
    offset = column.to(tl.int64) * weight_column
    return tl.load(weight + offset, column < depth, 0.0).to(tl.float32)


# The width of no load depends on these numbers. Specialised, their divisibilities made 187 kernels
# instead of 54 for the shapes of one test.
_UNSPECIALIZED = ["rows", "divisor", "rows_per_program", "target_row", "grad_row"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def forward(
    input, weight, bias, target, grad,  # (rows, depth), (depth,), (1,) or None, (rows,), (rows,)
    output,  # (rows,), or float64 (programs,) where KIND is "loss"
    rows, divisor, depth, rows_per_program,
    input_row, input_column, weight_column, target_row, grad_row,
    KIND: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute ``rows_per_program`` rows per program, ROWS at a time. ``grad`` is read if KIND is
    "gradient", ``target`` if it is not "sigmoid"."""
    start = tl.program_id(0).to(tl.int64) * rows_per_program
    last = tl.minimum(start + rows_per_program, rows)
    added = 0.0
    if bias is not None:
        added = tl.load(bias).to(tl.float32)
    total = tl.zeros((ROWS,), tl.float64)
    for first in range(0, rows_per_program, ROWS):
        row = start + first + tl.arange(0, ROWS)
        products = tl.zeros((ROWS, DEPTH), tl.float32)
        for begin in range(0, depth, DEPTH):
            column = begin + tl.arange(0, DEPTH)
            x = _load_tile(input, row, column, input_row, input_column, last, depth)
            products += x * _load_weight(weight, column, weight_column, depth)[None, :]
        z = tl.sum(products, axis=1) + added
        inside = row < last
        if KIND == "sigmoid":
            result, _complement = _logistic(z, False)
        else:
            t = tl.load(target + row * target_row, inside, 0.0).to(tl.float32)
            if KIND == "gradient":
                upstream = tl.load(grad + row * grad_row, inside, 0.0).to(tl.float32)
                upstream /= divisor
                result = upstream * _loss_gradient(z, t)
            else:
                result = _loss(z, t)
        if KIND == "loss":
            total += tl.where(inside, result, 0.0).to(tl.float64)
        else:
            tl.store(output + row, result.to(output.dtype.element_ty), inside)
    if KIND == "loss":
        tl.store(output + tl.program_id(0), tl.sum(total, axis=0) / divisor)


_UNSPECIALIZED_BACKWARD = ["rows", "divisor", "rows_per_worker", "grad_row", "saved_row"]


@triton.jit(do_not_specialize=_UNSPECIALIZED_BACKWARD)
def backward(
    grad,  # (rows,) by grad_row; None where KIND is "given"
    saved,  # "sigmoid": the output; "loss": the target; "given": the logit's gradient, float32
    input, weight, bias,  # the bias where KIND is "loss"
    grad_input,  # (rows, depth) row-major, or None
    weight_sums, bias_sums,  # (workers, depth) float32, (workers,) float64, None where not needed
    rows, divisor, depth, rows_per_worker,
    grad_row, saved_row, input_row, input_column, weight_column,
    KIND: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute all gradients in one pass over the input. A program owns DEPTH columns of
    ``rows_per_worker`` rows, writes their gradient and its partial sums, which ``column_sums`` adds
    in a fixed order. "loss" computes the logit again from its tile, which must therefore have the
    whole depth."""
    across = tl.cdiv(depth, DEPTH)
    worker = tl.program_id(0) // across
    column = tl.program_id(0) % across * DEPTH + tl.arange(0, DEPTH)
    start = worker.to(tl.int64) * rows_per_worker
    last = tl.minimum(start + rows_per_worker, rows)
    w = _load_weight(weight, column, weight_column, depth)[None, :]
    added = 0.0
    if KIND == "loss" and bias is not None:
        added = tl.load(bias).to(tl.float32)
    of_weight = tl.zeros((ROWS, DEPTH), tl.float32)
    of_bias = tl.zeros((ROWS,), tl.float64)
    for first in range(0, rows_per_worker, ROWS):
        row = start + first + tl.arange(0, ROWS)
        inside = row < last
        x = _load_tile(input, row, column, input_row, input_column, last, depth)
        of_logit = tl.load(saved + row * saved_row, inside, 0.0).to(tl.float32)
        if KIND != "given":
            upstream = tl.load(grad + row * grad_row, inside, 0.0).to(tl.float32)
            upstream /= divisor
            if KIND == "sigmoid":
                of_logit = upstream * (of_logit * (1.0 - of_logit))
            else:
                # The explicit fma keeps the product from being fused into the first exchange of
                # the reduction. That would round the sum differently in the two halves of a warp,
                # which both have the row's logit.
                z = tl.sum(tl.fma(x, w, 0.0), axis=1) + added
                of_logit = upstream * _loss_gradient(z, of_logit)
        # Masked by a select: an infinite bias would make a row past the edge NaN.
        of_logit = tl.where(inside, of_logit, 0.0)
        if grad_input is not None:
            result = (of_logit[:, None] * w).to(grad_input.dtype.element_ty)
            mask = inside[:, None] & (column < depth)[None, :]
            tl.store(grad_input + row[:, None] * depth + column[None, :], result, mask)
        of_weight += of_logit[:, None] * x
        of_bias += of_logit.to(tl.float64)
    if weight_sums is not None:
        sums = tl.sum(of_weight, axis=0)
        tl.store(weight_sums + worker.to(tl.int64) * depth + column, sums, column < depth)
    if bias_sums is not None:
        # Every tile of the depth has the same sum, so one of them stores it.
        tl.store(bias_sums + worker, tl.sum(of_bias, axis=0), tl.program_id(0) % across == 0)
