"""Find the sums of exponentials that one sweep computes together with the largest term.

Written down, a softmax takes two sweeps over a row before it stores: one for the largest term, one
for the sum of ``exp(term - largest)``. A Triton kernel keeps both in one sweep, and multiplies the
sum where a larger term appears (Milakov and Gimelshein, Online normalizer calculation for softmax,
2018), so that long rows are read once less.
"""

from __future__ import annotations

from dataclasses import replace

from fuselab.ejection.loops import Apply, Reduced, walk
from fuselab.ejection.plan import KernelPlan, Shifted
from fuselab.ejection.triton_functions import stores_in_a_sweep_of_its_own, sweeps_to_reduce


def with_largest(plan: KernelPlan) -> KernelPlan:
    """Return the plan of a kernel that sums up exponentials where it finds their largest term, if
    the kernel then sweeps over its rows once less."""
    found: dict[Reduced, Shifted] = {}
    for one in plan.reductions:
        shifted = _shifted(one, plan)
        if shifted is not None and all(
            shifted.largest is not each.largest for each in found.values()
        ):
            found[one] = shifted
    if not found or plan.scans or plan.of_lists:
        return plan
    joined = replace(plan, exponentials=found, _depths={})
    return joined if _sweeps(joined) < _sweeps(plan) else plan


def _shifted(one: Reduced, plan: KernelPlan) -> Shifted | None:
    """Return the largest term and the shift of a sum of ``exp(term - shift)`` whose shift is known
    as soon as the largest term is, None for another reduction."""
    if (one.function, one.kind) != ("sum", "float"):
        return None
    exponential = one.operand
    if not isinstance(exponential, Apply) or exponential.function != "exp":
        return None
    difference = exponential.operands[0]
    if not isinstance(difference, Apply) or difference.function != "sub":
        return None
    terms, shift = difference.operands
    reduced = [each for each in walk([shift]) if isinstance(each, Reduced)]
    if len(reduced) != 1 or plan.axes_of(shift) & set(plan.kernel.column_axes):
        return None
    (largest,) = reduced
    is_largest = (largest.function, largest.kind) == ("amax", "float")
    return Shifted(largest, shift) if is_largest and largest.operand is terms else None


def _sweeps(plan: KernelPlan) -> int:
    return sweeps_to_reduce(plan) + stores_in_a_sweep_of_its_own(plan)
