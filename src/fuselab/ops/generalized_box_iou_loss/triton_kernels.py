"""The generalized IoU loss of pairs of boxes and its gradient in Triton.

A program owns BLOCK pairs as one (BLOCK, 4) tile per operand, in which a thread has whole boxes:
one 16-byte load per float32 box if boxes are contiguous (DENSE). Two splits separate the four
coordinates and two joins combine them, without an exchange between threads. Every byte is read once
and written once; the backward computes the areas again. Arithmetic is in COMPUTE: float64 if one of
the boxes is, else float32. Reductions are summed in float64 in a fixed order. PADDED: rows of the
second boxes whose bottom (y2) is not above 0 are padding.

Maxima and minima may drop a NaN, but a NaN in any coordinate makes the union NaN, and so the loss
and all eight derivatives.

Pairs are in a nest of three loops, of which size_1 and size_2 are the inner two; an offset is the
sum of index times stride, and a box's coordinates are ``step`` apart. WIDE makes these offsets
64-bit; dense ones are 32-bit from a 64-bit start. ``eps`` is passed by value, or through
``eps_pointer`` under torch.compile.
"""

import triton
import triton.language as tl


@triton.jit
def _eps_of(eps_pointer, eps, COMPUTE: tl.constexpr):
    if eps_pointer is not None:
        return tl.load(eps_pointer).to(COMPUTE)
    else:
        return tl.full((), eps, COMPUTE)


@triton.jit
def _divide(a, b):
    """Return a / b rounded as IEEE says: Triton's own division in float32 is off by 2 ulp."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def _offset_of(pair, size_1, size_2, stride_0, stride_1, stride_2):
    inner = pair % size_2
    pair = pair // size_2
    return (pair // size_1) * stride_0 + (pair % size_1) * stride_1 + inner * stride_2


@triton.jit
def _apart(tile, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """Return x1, y1, x2, y2 of a (BLOCK, 4) tile."""
    low_and_high = tl.reshape(tile.to(COMPUTE), (BLOCK, 2, 2))
    x, y = tl.split(low_and_high)
    x1, x2 = tl.split(x)
    y1, y2 = tl.split(y)
    return x1, y1, x2, y2


@triton.jit
def _read(
    boxes, start, pair, count, size_1, size_2, stride_0, stride_1, stride_2, step,
    COMPUTE: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the coordinates of BLOCK boxes from pair ``start`` on; those past the end are 0."""
    coordinate = tl.arange(0, 4)[None, :]
    if DENSE:
        lane = tl.arange(0, BLOCK)[:, None]
        # Only the last tile has a mask.
        if start + BLOCK <= count:
            tile = tl.load(boxes + start * 4 + (lane * 4 + coordinate))
        else:
            tile = tl.load(boxes + start * 4 + (lane * 4 + coordinate), lane < count - start, 0.0)
    else:
        offset = _offset_of(pair, size_1, size_2, stride_0, stride_1, stride_2)
        offset = offset[:, None] + coordinate * step
        tile = tl.load(boxes + offset, (pair < count)[:, None], 0.0)
    return _apart(tile, COMPUTE, BLOCK)


@triton.jit
def _write(boxes, start, count, x1, y1, x2, y2, BLOCK: tl.constexpr):
    tile = tl.reshape(tl.join(tl.join(x1, x2), tl.join(y1, y2)), (BLOCK, 4))
    tile = tile.to(boxes.dtype.element_ty)
    lane = tl.arange(0, BLOCK)[:, None]
    offset = lane * 4 + tl.arange(0, 4)[None, :]
    if start + BLOCK <= count:
        tl.store(boxes + start * 4 + offset, tile)
    else:
        tl.store(boxes + start * 4 + offset, tile, lane < count - start)


@triton.jit
def _areas(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    """Return nine values: whether boxes overlap; width and height of the intersection (0 without
    overlap) and of the hull; the areas intersection, hull - union, union + eps and hull + eps."""
    left = tl.maximum(x1, u1)
    top = tl.maximum(y1, v1)
    right = tl.minimum(x2, u2)
    bottom = tl.minimum(y2, v2)
    overlap = (right > left) & (bottom > top)
    width = tl.where(overlap, right - left, 0.0)
    height = tl.where(overlap, bottom - top, 0.0)
    hull_width = tl.maximum(x2, u2) - tl.minimum(x1, u1)
    hull_height = tl.maximum(y2, v2) - tl.minimum(y1, v1)
    intersection = width * height
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - intersection
    hull = hull_width * hull_height
    return (
        overlap, width, height, hull_width, hull_height,
        intersection, hull - union, union + eps, hull + eps,
    )  # fmt: skip


@triton.jit
def _losses(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    _, _, _, _, _, intersection, gap, union, hull = _areas(x1, y1, x2, y2, u1, v1, u2, v2, eps)
    return 1 - (_divide(intersection, union) - _divide(gap, hull))


@triton.jit
def _of_edge(if_larger, if_smaller, mine, other):
    """Return the gradient of the coordinate ``mine``: that of the maximum of two coordinates if it
    is the larger, that of their minimum if it is the smaller, half of both if they tie."""
    alone = tl.where(mine > other, if_larger, if_smaller)
    return tl.where(mine == other, (if_larger + if_smaller) * 0.5, alone)


@triton.jit
def _write_gradient(
    boxes, start, count, valid, of_union, inner_x, inner_y, outer_x, outer_y,
    x1, y1, x2, y2, u1, v1, u2, v2, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the boxes x1 to y2. The intersection's low edge is the larger of two,
    its high edge the smaller."""
    area_x = of_union * (y2 - y1)
    area_y = of_union * (x2 - x1)
    of_x1 = -(area_x + _of_edge(inner_x, outer_x, x1, u1))
    of_y1 = -(area_y + _of_edge(inner_y, outer_y, y1, v1))
    of_x2 = area_x + _of_edge(outer_x, inner_x, x2, u2)
    of_y2 = area_y + _of_edge(outer_y, inner_y, y2, v2)
    if PADDED:
        of_x1 = tl.where(valid, of_x1, 0.0)
        of_y1 = tl.where(valid, of_y1, 0.0)
        of_x2 = tl.where(valid, of_x2, 0.0)
        of_y2 = tl.where(valid, of_y2, 0.0)
    _write(boxes, start, count, of_x1, of_y1, of_x2, of_y2, BLOCK)


@triton.jit
def _pairs_of(tile, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first pair of a tile, in 64 bits, and all its pairs, in the integer type of
    strided offsets."""
    start = tile.to(tl.int64) * BLOCK
    pair = start + tl.arange(0, BLOCK)
    if not WIDE:
        pair = pair.to(tl.int32)
    return start, pair


@triton.jit
def _turns(count, BLOCK: tl.constexpr):
    """Return how many tiles this program has if all programs take them in turn."""
    return tl.cdiv(tl.cdiv(count, BLOCK) - tl.program_id(0), tl.num_programs(0))


@triton.jit
def forward(
    first, second, loss, eps_pointer, eps: tl.float64,
    count, size_1, size_2,
    first_0, first_1, first_2, first_step, second_0, second_1, second_2, second_step,
    COMPUTE: tl.constexpr, DENSE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute 1 - GIoU of each pair."""
    start, pair = _pairs_of(tl.program_id(0), WIDE, BLOCK)
    x1, y1, x2, y2 = _read(
        first, start, pair, count, size_1, size_2, first_0, first_1, first_2, first_step,
        COMPUTE, DENSE, BLOCK,
    )  # fmt: skip
    u1, v1, u2, v2 = _read(
        second, start, pair, count, size_1, size_2, second_0, second_1, second_2, second_step,
        COMPUTE, DENSE, BLOCK,
    )  # fmt: skip
    eps = _eps_of(eps_pointer, eps, COMPUTE)
    lane = tl.arange(0, BLOCK)
    result = _losses(x1, y1, x2, y2, u1, v1, u2, v2, eps)
    tl.store(loss + start + lane, result, lane < count - start)


@triton.jit
def reduce(
    first, second,
    sums,  # float64 (PADDED ? 2 : 1, programs): the losses, then the number of rows that are boxes
    eps_pointer, eps: tl.float64,
    count, size_1, size_2,
    first_0, first_1, first_2, first_step, second_0, second_1, second_2, second_step,
    COMPUTE: tl.constexpr, DENSE: tl.constexpr, WIDE: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the losses of this program's tiles of BLOCK pairs; ``finish`` adds the programs' sums."""
    eps = _eps_of(eps_pointer, eps, COMPUTE)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    boxes = tl.zeros((BLOCK,), tl.float64)
    for turn in range(_turns(count, BLOCK)):
        tile = turn * tl.num_programs(0) + tl.program_id(0)
        start, pair = _pairs_of(tile, WIDE, BLOCK)
        x1, y1, x2, y2 = _read(
            first, start, pair, count, size_1, size_2, first_0, first_1, first_2, first_step,
            COMPUTE, DENSE, BLOCK,
        )  # fmt: skip
        u1, v1, u2, v2 = _read(
            second, start, pair, count, size_1, size_2, second_0, second_1, second_2, second_step,
            COMPUTE, DENSE, BLOCK,
        )  # fmt: skip
        valid = lane < count - start
        if PADDED:
            valid = valid & (v2 > 0)
            boxes += tl.where(valid, 1.0, 0.0).to(tl.float64)
        losses = _losses(x1, y1, x2, y2, u1, v1, u2, v2, eps)
        total += tl.where(valid, losses, 0.0).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))
    if PADDED:
        tl.store(sums + tl.num_programs(0) + tl.program_id(0), tl.sum(boxes, axis=0))


@triton.jit
def finish(
    sums, result, programs, count,
    MEAN: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sums of the ``programs`` programs of ``reduce``, in one program."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    boxes = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, programs, BLOCK):
        mask = start + lane < programs
        total += tl.load(sums + start + lane, mask, 0.0)
        if PADDED:
            boxes += tl.load(sums + programs + start + lane, mask, 0.0)
    value = tl.sum(total, axis=0)
    if MEAN:
        value = value / tl.full((), count, tl.float64)
    if PADDED:
        value = value / tl.maximum(tl.sum(boxes, axis=0), 1.0)
    tl.store(result, value.to(result.dtype.element_ty))


@triton.jit
def count_valid(
    second,
    valid,  # int64, one number, 0 before
    count, size_1, size_2, second_0, second_1, second_2, second_step,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the number of rows that are boxes to ``valid``. They are integers, so any order is
    right."""
    total = tl.zeros((BLOCK,), tl.int64)
    for turn in range(_turns(count, BLOCK)):
        tile = turn * tl.num_programs(0) + tl.program_id(0)
        _, pair = _pairs_of(tile, WIDE, BLOCK)
        offset = _offset_of(pair, size_1, size_2, second_0, second_1, second_2) + 3 * second_step
        bottom = tl.load(second + offset, pair < count, 0.0)
        total += (bottom > 0).to(tl.int64)
    tl.atomic_add(valid, tl.sum(total, axis=0))


@triton.jit
def backward(
    grad, first, second,
    valid_count,  # int64, one number; None unless PADDED
    grad_first, grad_second,  # contiguous; None where not needed
    eps_pointer, eps: tl.float64,
    count, size_1, size_2, grad_0, grad_1, grad_2,
    first_0, first_1, first_2, first_step, second_0, second_1, second_2, second_step,
    COMPUTE: tl.constexpr, DENSE: tl.constexpr, WIDE: tl.constexpr,
    ONE_GRADIENT: tl.constexpr, MEAN: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of both boxes."""
    start, pair = _pairs_of(tl.program_id(0), WIDE, BLOCK)
    x1, y1, x2, y2 = _read(
        first, start, pair, count, size_1, size_2, first_0, first_1, first_2, first_step,
        COMPUTE, DENSE, BLOCK,
    )  # fmt: skip
    u1, v1, u2, v2 = _read(
        second, start, pair, count, size_1, size_2, second_0, second_1, second_2, second_step,
        COMPUTE, DENSE, BLOCK,
    )  # fmt: skip
    if ONE_GRADIENT:
        upstream = tl.load(grad)
        if MEAN:
            upstream = _divide(upstream, tl.full((), count, COMPUTE))
        if PADDED:
            divisor = tl.maximum(tl.load(valid_count), 1).to(COMPUTE)
            upstream = _divide(upstream, divisor)
    else:
        offset = _offset_of(pair, size_1, size_2, grad_0, grad_1, grad_2)
        upstream = tl.load(grad + offset, pair < count, 0.0)
    eps = _eps_of(eps_pointer, eps, COMPUTE)
    overlap, width, height, hull_width, hull_height, intersection, gap, union, hull = _areas(
        x1, y1, x2, y2, u1, v1, u2, v2, eps
    )
    one = tl.full((BLOCK,), 1.0, COMPUTE)
    by_union = _divide(one, union)
    by_hull = _divide(one, hull)
    grad_by_hull = upstream * by_hull
    of_hull = grad_by_hull - upstream * (gap * by_hull * by_hull)
    of_union = upstream * (intersection * by_union * by_union) - grad_by_hull
    of_intersection = -upstream * by_union - of_union
    inner_x = tl.where(overlap, of_intersection * height, 0.0)
    inner_y = tl.where(overlap, of_intersection * width, 0.0)
    outer_x = of_hull * hull_height
    outer_y = of_hull * hull_width
    valid = v2 > 0
    if grad_first is not None:
        _write_gradient(
            grad_first, start, count, valid, of_union, inner_x, inner_y, outer_x, outer_y,
            x1, y1, x2, y2, u1, v1, u2, v2, PADDED, BLOCK,
        )  # fmt: skip
    if grad_second is not None:
        _write_gradient(
            grad_second, start, count, valid, of_union, inner_x, inner_y, outer_x, outer_y,
            u1, v1, u2, v2, x1, y1, x2, y2, PADDED, BLOCK,
        )  # fmt: skip
