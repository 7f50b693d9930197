"""Kernels in which each element walks over the places of a small window by itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fuselab.ejection.loops import Axis
from fuselab.ejection.picks import pick_of
from fuselab.ejection.plan import KernelPlan, Operand

MOST_IN_WINDOW = 32  # columns that an element walks over by itself


def walks_windows(plan: KernelPlan) -> bool:
    """Return whether a kernel's columns are the places of a small window around each element, of
    which nothing but the position is loaded. Each element then walks over its own: the kernel's
    loops are those of its rows alone (``Sweep.over_elements``), and neighbours in memory are
    neighbouring lanes."""
    kernel = plan.kernel
    if not plan.has_columns or plan.sums or plan.scans or plan.of_lists or not plan.reductions:
        return False
    sizes = [axis.size for axis in kernel.column_axes]
    if not all(size.is_Integer for size in sizes) or math.prod(map(int, sizes)) > MOST_IN_WINDOW:
        return False
    columns = frozenset(kernel.column_axes)
    positions = [one for one in plan.operands if columns & {*itertools.chain(*one.index)}]
    are_alone = all(one.node is None and [*map(len, one.index)] == [1] for one in positions)
    picks = (pick_of(one, kernel.column_axes, plan.axes_of) for one in plan.reductions)
    return are_alone and not any(picks)


def launched_operands(plan: KernelPlan) -> Sequence[Operand]:
    """Return the operands of a kernel as its launch has them: if its elements walk over windows,
    without the positions in a window, for which its loops have no place."""
    if not walks_windows(plan):
        return plan.operands
    columns: frozenset[Axis] = frozenset(plan.kernel.column_axes)
    return [one for one in plan.operands if columns.isdisjoint(itertools.chain(*one.index))]
