"""The cases and draws of ``linear_binary_cross_entropy``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.cases import BOUNDARY, Random, made
from fuselab.ops.linear_sigmoid import layout
from fuselab.ops.linear_sigmoid.cases import (
    CPU_SHAPES,
    CPU_SHAPES_IN_EVERY_DTYPE,
    case_tags,
    draw_linear,
    linear_arguments,
)


@made
def _case(random: Random, /, shape: Sequence[int], reduction: str, **options: Any) -> Inputs:
    """Build a case whose targets are clicks: 0 or 1, 1 for a quarter of the rows."""
    operands = linear_arguments(random, shape, **options)
    clicks = random.uniform(*operands[0].shape[:-1], 1) < 0.25
    return Inputs((*operands, random.moved(clicks), reduction))


def _cases() -> Iterator[Case]:
    for name, shape, options, tags in case_tags():
        if shape[0] > 0:  # the mean of no rows is NaN, which cannot be judged
            yield Case(name, _case(shape, "mean", **options), tags)
    for reduction in ("sum", "none"):
        make = _case((37, 65), reduction)
        yield Case(f"{reduction}_37x65", make, BOUNDARY)
        yield Case(f"{reduction}_0x5", _case((0, 5), reduction), BOUNDARY)


def _cpu_cases() -> Iterator[Case]:
    for rows, depth in CPU_SHAPES:
        yield Case(f"{rows}x{depth}", _case((rows, depth), "mean"), cpu_sizes.ROW)
    for rows, depth in CPU_SHAPES_IN_EVERY_DTYPE:
        for reduction in layout.KINDS:
            make = _case((rows, depth), reduction)
            yield Case(f"{rows}x{depth} {reduction}", make, cpu_sizes.DTYPES)


def draw(source: Draw) -> Inputs:
    """Draw any shape and layout, a bias or none, any reduction; targets may be no probabilities."""
    operands = draw_linear(source)
    target = source.tensor(*operands[0].shape[:-1], 1)
    return Inputs((*operands, target, source.choice(("none", "mean", "sum"))))


CASES = tuple(_cases())
CPU_CASES = tuple(_cpu_cases())
