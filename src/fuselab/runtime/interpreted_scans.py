"""Scans and reductions of Triton's interpreter, by whole slices instead of element by element.

For a function of the kernel's own, as in ``tl.associative_scan``, the interpreter calls that
function for every element of the block, each call taking about 0.5 ms. The backward of an
``embedding_lookup`` of 33 tables, 33 samples and 128 columns took 70 s. The function computes
elementwise, so it is called here with slices of the block: log2(n) times for n elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

Arrays = tuple[Any, ...]  # one per operand, all of one shape


class _DecidesError(Exception):
    """A sign that the function decides by the value of an element, so that it takes no slices."""


def install() -> None:
    """Replace how the interpreter scans and reduces by a function of the kernel's own."""
    from triton.runtime import interpreter

    scan, reduce = interpreter.ScanOps, interpreter.ReduceOps
    scan.generic_scan = _unless_it_decides(_scanned, scan.generic_scan)
    reduce.generic_reduce = _unless_it_decides(_reduced, reduce.generic_reduce)


def _unless_it_decides(
    by_slices: Callable[[Any, Any], Any], by_element: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    def apply(self: Any, input: Any) -> Any:
        try:
            with _no_decisions():
                return by_slices(self, input)
        except _DecidesError:
            return by_element(self, input)

    apply.by_element = by_element  # type: ignore[attr-defined]  # for a comparison
    return apply


@contextlib.contextmanager
def _no_decisions() -> Iterator[None]:
    """Make an ``if`` on a block of several elements raise _DecidesError."""
    import triton.language as tl

    usual: Any = tl.core.tensor.__bool__

    def decided(self: Any) -> bool:
        if self.handle.data.size != 1:
            raise _DecidesError
        return bool(usual(self))

    tl.core.tensor.__bool__ = decided
    try:
        yield
    finally:
        tl.core.tensor.__bool__ = usual


def _combined(operation: Any, input: Any, ones: Arrays, others: Arrays) -> Arrays:
    """Return what the kernel's function makes of two slices of the same shape."""
    shape = ones[0].shape
    operands = (
        operation.to_tensor(numpy.ascontiguousarray(data), like.dtype)
        for datas in (ones, others)
        for data, like in zip(datas, input, strict=True)
    )
    found = operation.combine_fn.fn(*operands)
    found = found if isinstance(found, tuple) else (found,)
    values = (one.handle.data if hasattr(one, "handle") else one for one in found)
    return tuple(
        numpy.broadcast_to(value, shape).astype(data.dtype)
        for value, data in zip(values, ones, strict=True)
    )


def _along(datas: Arrays, axis: int, part: slice) -> Arrays:
    places = (slice(None),) * axis + (part,)
    return tuple(data[places] for data in datas)


def _joined(parts: Sequence[Arrays], axis: int) -> Arrays:
    return tuple(numpy.concatenate(several, axis) for several in zip(*parts, strict=True))


def _scanned(operation: Any, input: Any) -> list[Any]:
    """Scan along the axis: after a step of d, an element covers the 2 d elements up to it.

    Sizes stay powers of two, which Triton wants: the first d elements meet the last ones, and that
    result is dropped.
    """
    axis, step = operation.axis, 1
    datas = tuple(one.handle.data for one in input)
    while step < datas[0].shape[axis]:
        before = tuple(numpy.roll(data, step, axis) for data in datas)
        covered = _along(_combined(operation, input, before, datas), axis, slice(step, None))
        datas = _joined((_along(datas, axis, slice(step)), covered), axis)
        step *= 2
    return [operation.to_tensor(data, one.dtype) for data, one in zip(datas, input, strict=True)]


def _reduced(operation: Any, input: Any) -> list[Any]:
    """Reduce along the axis by combining neighbours until one element is left."""
    rank = input[0].handle.data.ndim
    unravelled, axis = operation.unravel(input, operation.axis)
    datas = tuple(one.handle.data for one in unravelled)
    while datas[0].shape[axis] > 1:
        even, odd = (_along(datas, axis, slice(first, None, 2)) for first in (0, 1))
        datas = _combined(operation, input, even, odd)
    kept = (1,) * rank if operation.axis is None else datas[0].shape
    shape = kept if operation.keep_dims else datas[0].shape[:axis] + datas[0].shape[axis + 1 :]
    return [
        operation.to_tensor(data.reshape(shape) if shape else data.item(), one.dtype)
        for data, one in zip(datas, input, strict=True)
    ]
