"""Find the sums of squared deviations from a mean that one sweep computes together with the mean.

Written down, a variance takes two sweeps over a row: one for the mean, one for the deviations from
it. A Triton kernel takes the mean of the first block for that of the row, adds up both in one
sweep, and corrects the sum of squares (``triton_loops.squares_about_mean``), so that long rows are
read once less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuselab.ejection.kernels import product
from fuselab.ejection.loops import Apply, Expression, Reduced, Size
from fuselab.ejection.plan import KernelPlan


def in_one_sweep(plan: KernelPlan) -> KernelPlan:
    """Return the plan of a kernel that sums up squared deviations where it sums up the terms."""
    found = {}
    for one in plan.reductions:
        total = _total_of(one, plan)
        if total is not None:
            found[one] = total
    return replace(plan, deviations=found, _depths={}) if found else plan


def _total_of(squares: Reduced, plan: KernelPlan) -> Reduced | None:
    """Return the sum of the terms whose squared deviations from their mean ``squares`` sums up."""
    square = _operands(squares.operand, "mul") if squares.function == "sum" else ()
    if len(square) != 2 or square[0] is not square[1]:
        return None
    deviation = _operands(square[0], "sub")
    mean = _operands(deviation[1], "div") if deviation else ()
    if not mean or not isinstance(mean[0], Reduced) or not isinstance(mean[1], Size):
        return None
    is_of_all = mean[1].size == product(plan.kernel.column_axes)
    is_of_these = mean[0].function == "sum" and mean[0].operand is deviation[0]
    return mean[0] if is_of_all and is_of_these and squares.kind == "float" else None


def _operands(one: Expression, function: str) -> Sequence[Expression]:
    return one.operands if isinstance(one, Apply) and one.function == function else ()
