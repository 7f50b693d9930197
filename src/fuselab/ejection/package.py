"""Decide all that a package consists of, before its files are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuselab.ejection.capture import COMPOSED, Captured, capture
from fuselab.ejection.kernels import Kernel, schedule
from fuselab.ejection.loops import Input, Node, Pointwise, View
from fuselab.ejection.lower import Program, lower
from fuselab.ejection.plan import KernelPlan, Sizes, planned
from fuselab.ejection.row_sums import SummingKernel, with_row_sums
from fuselab.errors import EjectError


@dataclass(frozen=True)
class Package:
    """The captured function, its kernels and their names.

    ``captured`` is in the simple operators that kernels are made of, ``formulas`` in PyTorch's own,
    normalisations and softmax among them.
    """

    captured: Captured
    formulas: Captured
    program: Program
    sizes: Sizes
    forward: tuple[KernelPlan, ...]
    backward: tuple[KernelPlan, ...]
    cpp_backward: tuple[KernelPlan, ...]  # with sums over rows in the kernels of these rows

    @property
    def name(self) -> str:
        return self.captured.name

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.captured.arguments)

    @property
    def saved(self) -> tuple[str, ...]:
        """The arguments that the backward reads, or whose sizes it needs."""
        read = {
            operand.node.name
            for plan in self.backward
            for operand in plan.loads
            if isinstance(operand.node, Input)
        }
        read |= {argument for argument, _ in self.sizes.places.values()}
        read |= {
            argument.name
            for argument in self.formulas.arguments
            if argument.node in self.formulas.behind_gradients()
        }
        return tuple(name for name in self.parameters if name in read)

    @property
    def multiples(self) -> dict[str, int]:
        """Sizes that have to be multiples of a number, by name."""
        plans = (*self.forward, *self.backward)
        return self.sizes.multiples([axis.size for plan in plans for axis in plan.axis_names])

    def result_name(self, node: Node, plans: Sequence[KernelPlan]) -> str:
        """Return the name of the tensor that holds a result in the launcher of ``plans``."""
        for plan in plans:
            for operand in plan.stored:
                if operand.node is node:
                    return operand.name
        return node.name

    def describe(self) -> dict[str, Any]:
        """Return the facts for JSON: each kernel with its loops, what it reads and writes."""
        kernels = [
            {
                "name": plan.name,
                "rows": [plan.axis_names[axis] for axis in plan.kernel.row_axes],
                "columns": [plan.axis_names[axis] for axis in plan.kernel.column_axes],
                "reads": [operand.name for operand in plan.loads],
                "writes": [operand.name for operand in plan.stored],
            }
            for plan in (*self.forward, *self.backward)
        ]
        return {"operator": f"ejected::{self.name}", "kernels": kernels}


def planned_package(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool = False,
) -> Package:
    """Capture ``function`` with example arguments and decide its kernels. Raises EjectError."""
    captured = capture(function, args, keywords, name, inference, COMPOSED)
    formulas = capture(function, args, keywords, name, inference)
    program = _with_distinct_gradients(lower(captured))
    if len(program.outputs) != 1:
        raise EjectError(
            f"{name} returns {len(program.outputs)} tensors; eject a function that returns one."
        )
    if _is_rearranged(program.outputs[0]):
        raise EjectError(
            f"{name} returns an argument or a view of it; there is nothing to compute."
        )
    sizes = Sizes(captured)
    names: dict[Node, str] = {program.outputs[0]: "output"}
    kernels = _ordered(schedule(program.outputs, captured.hints))
    forward = _plans(name, list(map(SummingKernel, kernels)), program.outputs, sizes, names)
    for argument, gradient in zip(captured.arguments, program.gradients, strict=True):
        if gradient is not None:
            names.setdefault(gradient, f"grad_{argument.name}")
    gradients = [node for node in program.gradients if node is not None]
    kernels = _ordered(schedule(gradients, captured.hints))
    label = f"{name}_backward"
    backward = _plans(label, list(map(SummingKernel, kernels)), gradients, sizes, names)
    cpp_backward = _plans(label, with_row_sums(kernels), gradients, sizes, names)
    return Package(captured, formulas, program, sizes, forward, backward, cpp_backward)


def _with_distinct_gradients(program: Program) -> Program:
    """Return the program with a node of its own for every gradient that is computed. A raw operator
    returns each in memory of its own, and a kernel that stores a value twice is faster than a
    copy."""
    found: list[Node | None] = []
    for node in program.gradients:
        if node in found and node is not None and not isinstance(node, Input):
            node = Pointwise(node.name, node.sizes, node.kind, node.line, False, "same", (node,))
        found.append(node)
    return replace(program, gradients=tuple(found))


def _is_rearranged(node: Node) -> bool:
    return isinstance(node, Input) or (isinstance(node, View) and _is_rearranged(node.source))


def _plans(
    name: str,
    kernels: Sequence[SummingKernel],
    results: Sequence[Node],
    sizes: Sizes,
    names: Mapping[Node, str],
) -> tuple[KernelPlan, ...]:
    """Return the kernels that compute ``results`` with their names."""
    needed = {*results, *(load.tensor for one in kernels for load in one.kernel.loads())}
    plans: list[KernelPlan] = []
    for place, one in enumerate(kernels):
        stores = [member.node for member in one.kernel.members if member.node in needed]
        label = f"{name}_{names.get(stores[0], stores[0].name)}" if place else name
        plans.append(planned(label, one.kernel, stores, sizes, names, one.sums))
    return tuple(plans)


def _ordered(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels such that each comes after those whose results it reads."""
    makers = {member.node: kernel for kernel in kernels for member in kernel.members}
    order: list[Kernel] = []

    def visit(kernel: Kernel) -> None:
        if kernel in order:
            return
        for load in kernel.loads():
            maker = makers.get(load.tensor)
            if maker is not None and maker is not kernel:
                visit(maker)
        order.append(kernel)

    for kernel in kernels:
        visit(kernel)
    return order
