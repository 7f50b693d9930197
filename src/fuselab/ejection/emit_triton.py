"""Triton source of the kernels of a package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fuselab.ejection.deviations import in_one_sweep
from fuselab.ejection.exponentials import with_largest
from fuselab.ejection.fold import COLUMNS
from fuselab.ejection.loops import (
    Load,
    walk,
)
from fuselab.ejection.pairs import pairs_of
from fuselab.ejection.picks import pick_of
from fuselab.ejection.plan import KERNEL_FUNCTIONS, KernelPlan, with_code
from fuselab.ejection.triton_functions import (
    Function,
    Rows,
    idle_sweeps,
    is_small,
    partial_results,
    stores_in_a_sweep_of_its_own,
    sweeps_to_reduce,
)
from fuselab.ejection.triton_lists import OfLists, RowsOfLists
from fuselab.ejection.triton_pointwise import Pointwise, Windows
from fuselab.ejection.triton_sums import SummingColumns, SummingRows, SumsOfShares
from fuselab.ejection.walked_windows import walks_windows


def source(title: str, plans: Sequence[KernelPlan]) -> str:
    """Return the text of ``triton_kernels.py``."""
    functions = [function for plan in with_code(plans) for function in _functions(plan)]
    whole = "\n\n\n".join(function.text() for function in functions)
    return "\n".join([f'"""{title}"""', "", *imports(whole), "", "", ""]) + whole + "\n"


def imports(body: str, own: Sequence[str] = ()) -> list[str]:
    """Return the lines that import what the text of kernels uses; ``own`` are lines of theirs."""
    lines = ["import triton", "import triton.language as tl"]
    if "libdevice." in body:
        lines.append("from triton.language.extra import libdevice")
    lines.append("")
    if "philox." in body:
        lines.append("from fuselab.runtime import triton_dropout as philox")
    if "math." in body:
        lines.append("from fuselab.runtime import triton_math as math")
    lines += own
    helpers = [name for name in KERNEL_FUNCTIONS if re.search(rf"(?<![.\w]){name}(?=[(,)])", body)]
    line = f"from fuselab.runtime.triton_loops import {', '.join(helpers)}"
    if len(line) > COLUMNS:
        listed = ",\n    ".join(helpers)
        line = f"from fuselab.runtime.triton_loops import (\n    {listed},\n)"
    return [*lines, line]


def as_emitted(plan: KernelPlan) -> KernelPlan:
    """Return a kernel with what Triton computes in fewer sweeps than its reductions ask for."""
    return with_picks(with_largest(in_one_sweep(plan)))


def with_picks(plan: KernelPlan) -> KernelPlan:
    """Return a kernel with those of its sums in which a single column counts, where that column is
    one loop's and the kernel has other reductions, whose sweeps it follows."""
    axes = plan.kernel.column_axes
    if plan.sums or plan.scans or len(axes) != 1:
        return plan
    of_pairs = {operand.name for pair in pairs_of(plan) for operand in pair}
    found = {}
    for one in plan.reductions:
        pick = pick_of(one, axes, plan.axes_of)
        is_paired = of_pairs and any(
            isinstance(part, Load) and plan.value_names[part] in of_pairs
            for part in walk([one.operand])
        )
        if pick is not None and not is_paired:
            found[one] = pick
    if not found or len(found) == len(plan.reductions):
        return plan
    return replace(plan, picks=found, _depths={}, _axes={})


def reducing_text(plan: KernelPlan) -> str:
    """Return the text of a kernel's ``triton_sweep.Reducing``."""
    plan = as_emitted(plan)
    stores = ", stores_columns=True" if stores_in_a_sweep_of_its_own(plan) else ""
    integers = [one for one in plan.reductions if one.kind == "int"]
    whole = ", has_integers=True" if integers else ""
    if plan.scans or not all(is_small(one.operand) for one in integers):
        whole = ", is_shared=False"
    summed = [one for one in plan.stored if one.node in plan.sums]
    sums = f", sums={len(summed)}" if summed else ""
    idle = f", idle={count}" if (count := idle_sweeps(plan)) else ""
    sweeps, reductions = sweeps_to_reduce(plan), partial_results(plan)
    return f"Reducing(sweeps={sweeps}, reductions={reductions}{stores}{whole}{sums}{idle})"


def _functions(plan: KernelPlan) -> list[Function]:
    """Return the functions of a kernel: with sums over its rows there is one that adds up what
    programs leave."""
    if walks_windows(plan):
        return [Windows(plan)]
    plan = as_emitted(plan)
    if plan.sums:
        summing = SummingRows(plan) if plan.reductions else SummingColumns(plan)
        return [summing, SumsOfShares(plan)]
    if plan.of_lists:
        return [RowsOfLists(plan) if plan.has_columns else OfLists(plan)]
    return [Rows(plan) if plan.has_columns else Pointwise(plan)]
