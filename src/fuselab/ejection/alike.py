"""Find kernels that compute the same for other tensors, as those of an optimizer's step for each
parameter: they share the code of the first of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from fuselab.ejection.capture import Captured
from fuselab.ejection.deviations import in_one_sweep
from fuselab.ejection.loops import (
    Apply,
    Constant,
    Load,
    Node,
    Reduced,
    children,
    element_kind,
    walk,
)
from fuselab.ejection.plan import KernelPlan, Operand, Sizes, planned


def sharing_code(
    plans: Sequence[KernelPlan], captured: Captured, sizes: Sizes, names: Mapping[Node, str]
) -> tuple[KernelPlan, ...]:
    """Return the kernels, each with the name of the first one that computes the same as its
    ``code``, if there is one before it. In code that is shared, a tensor of a list among the
    arguments has the name of the list. ``names`` are those of results."""
    first: dict[Hashable, int] = {}
    found = list(plans)
    for place, plan in enumerate(plans):
        key = _computation(plan)
        origin = place if key is None else first.setdefault(key, place)
        if origin != place:
            if found[origin] is plans[origin]:
                found[origin] = _named_after_lists(plans[origin], origin, captured, sizes, names)
            found[place] = replace(plan, code=found[origin].name, of_lists=True)
    return tuple(found)


def _named_after_lists(
    plan: KernelPlan, place: int, captured: Captured, sizes: Sizes, names: Mapping[Node, str]
) -> KernelPlan:
    """Return the kernel with ``params`` for a tensor ``params_3`` of the list ``params``, and
    ``new_params`` for its new value, where that names one tensor alone."""
    lists = {name for name, value in captured.given.items() if isinstance(value, (list, tuple))}
    short: dict[Node, str] = {}
    for one in plan.operands:
        match = re.fullmatch(r"(?:new_)?(\w+)_\d+", one.name)
        if one.node is not None and match is not None and match[1] in lists:
            short[one.node] = one.name.rpartition("_")[0]
    taken = Counter(
        short.get(one.node, one.name) if one.node is not None else one.name for one in plan.operands
    )
    short = {node: name for node, name in short.items() if taken[name] == 1}
    label, result = plan.name, plan.stored[0]
    if place and result.node in short:  # the name ends in that of the first result
        label = label.removesuffix(result.name) + short[result.node]
    stores = list(plan.stores)
    named = planned(label, plan.kernel, stores, sizes, {**names, **short}, plan.sums)
    return replace(named, of_lists=True)


def _computation(plan: KernelPlan) -> Hashable | None:
    """Return what a kernel computes, but for the names and sizes of its tensors; None of kernels
    that are written for one tensor alone."""
    if plan.sums or plan.numbers or plan.steps or plan.scans or in_one_sweep(plan).deviations:
        return None
    roles = [_role(one, plan) for one in plan.operands]
    if None in roles:
        return None
    places = {one.name: place for place, one in enumerate(plan.operands)}
    numbers: dict[object, int] = {}
    values: list[Hashable] = []
    for one in walk(list(plan.stores.values())):
        numbers[one] = len(numbers)
        inner = tuple(numbers[child] for child in children(one))
        if isinstance(one, Load):
            values.append(places[plan.value_names[one]])
        elif isinstance(one, Apply):
            values.append((one.function, one.kind, inner))
        elif isinstance(one, Reduced) and one.kind == "float":
            values.append((one.function, "reduced", inner))
        elif isinstance(one, Constant):
            values.append((repr(one.value), element_kind(one)))
        elif plan.value_names.get(one) == "columns":
            values.append("columns")
        else:
            return None
    operands = tuple(
        (one.node.kind, role, one.is_stored)
        for one, role in zip(plan.operands, roles, strict=True)
        if one.node is not None
    )
    stored = tuple(numbers[value] for value in plan.stores.values())
    return (bool(plan.kernel.row_axes), operands, tuple(values), stored)


def _role(operand: Operand, plan: KernelPlan) -> str | None:
    """Return of which loops a tensor has elements, if it has one for each of them in their order:
    ``rows``, ``columns``, ``both`` or none."""
    if operand.node is None:
        return None
    rows, columns = (
        " ".join(plan.axis_names[axis] for axis in axes)
        for axes in (plan.kernel.row_axes, plan.kernel.column_axes)
    )
    found = {"": "", rows: "rows", columns: "columns", f"{rows} {columns}".strip(): "both"}
    pattern = " ".join(one for one in operand.pattern.split() if one != "1")
    return found.get(pattern)
