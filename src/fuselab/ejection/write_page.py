"""Write ``page.md``: how the graph was cut into kernels."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, fx

from fuselab.ejection.calls import call_name
from fuselab.ejection.capture import with_sources
from fuselab.ejection.groups import ARRANGING
from fuselab.ejection.kernels import ancestors
from fuselab.ejection.loops import Node
from fuselab.ejection.package import Package
from fuselab.ejection.plan import KernelPlan, Operand, with_code
from fuselab.ejection.write_launchers import where_it_runs

# Calls that move no data, also under the names of ATen.
_VIEWS = ARRANGING | {"alias", "slice", "_unsafe_view"}


def page_text(package: Package) -> str:
    """Return the text of ``page.md``."""
    sizes = ", ".join(
        f"{name} = {package.captured.hints[symbol]}" for symbol, name in package.sizes.names.items()
    )
    parts = [f"# {package.name}", "", _summary(package, sizes)]
    if where := where_it_runs(package):
        told = " and ".join(f"`{one}`" for one in where)
        parts += ["", f"The kernels run where {told}. Else the reference computes."]
    parts += ["", "## Forward", "", *_kernels(package, package.forward)]
    if package.has_gradient:
        parts += ["", "## Backward", "", *_kernels(package, package.backward)]
    return "\n".join(parts) + "\n"


def _summary(package: Package, sizes: str) -> str:
    captured = package.formulas
    gradients = captured.behind_gradients()
    outputs = with_sources(captured.outputs)
    before = bytes_of_calls(outputs), bytes_of_calls(gradients - outputs)
    after = sum(map(bytes_moved, package.forward)), sum(map(bytes_moved, package.backward))
    rows = [
        "| | PyTorch calls | bytes | kernels | bytes |",
        "|---|---|---|---|---|",
        f"| forward | {_calls(outputs)} | {before[0]:,} | {len(package.forward)} | {after[0]:,} |",
    ]
    if package.has_gradient:
        rows.append(
            f"| backward | {_calls(gradients - outputs)} | {before[1]:,} | "
            f"{len(package.backward)} | {after[1]:,} |"
        )
    at = f"At the sizes of the example in float32 ({sizes}):" if sizes else "In float32:"
    return "\n".join([at, "", *rows])


def tensor_calls(nodes: Collection[fx.Node]) -> list[fx.Node]:
    return [
        node
        for node in nodes
        if node.op in ("call_function", "call_method")
        and call_name(node).partition(".")[0] not in _VIEWS
        and _tensors(node)
    ]


def _calls(nodes: set[fx.Node]) -> int:
    return len(tensor_calls(nodes))


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val", node.meta.get("example_value"))
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, Tensor)]


def bytes_of_calls(nodes: Collection[fx.Node]) -> int:
    """Return the bytes that PyTorch moves if every call reads its operands and writes its
    results."""
    total = 0
    for node in tensor_calls(nodes):
        operands = [one for source in node.all_input_nodes for one in _tensors(source)]
        for tensor in (*operands, *_tensors(node)):
            elements = 1
            for size in tensor.shape:
                elements *= size if isinstance(size, int) else size.node.hint
            total += elements * tensor.element_size()
    return total


def bytes_moved(plan: KernelPlan) -> int:
    """Return the bytes that a kernel moves if it reads and writes every operand once."""
    return sum(_elements(one) * 4 for one in plan.operands if one.node is not None)


def _elements(operand: Operand) -> int:
    elements = 1
    for axes in operand.index:
        for axis in axes:
            elements *= axis.hint
    return elements


def _kernels(package: Package, plans: Sequence[KernelPlan]) -> list[str]:
    lines: list[str] = []
    for plan in with_code(plans):
        rows = ", ".join(plan.axis_names[axis] for axis in plan.kernel.row_axes) or "one"
        columns = ", ".join(plan.axis_names[axis] for axis in plan.kernel.column_axes)
        loops = f"rows: {rows}" + (f"; columns: {columns}" if columns else "")
        read = ", ".join(f"{one.name} ({one.pattern})" for one in plan.loads)
        written = ", ".join(f"{one.name} ({one.pattern})" for one in plan.stored)
        lines += [f"### {plan.name}", "", f"- {loops}", f"- reads {read or 'nothing'}"]
        lines.append(f"- writes {written}")
        others = [each.stored[0].name for each in plans if each.code == plan.name]
        if others:
            lines.append(f"- is launched {1 + len(others)} times, also for {', '.join(others)}")
        source = _source_lines(plan)
        if source:
            lines += ["- computes these lines:", "", *(f"      {line}" for line in source)]
        lines.append("")
    return lines[:-1]


def _source_lines(plan: KernelPlan) -> list[str]:
    """Return the lines of the user's code that a kernel computes, in order."""
    others: set[Node] = {load.node for load in plan.loads if load.node is not None}
    found: dict[str, None] = {}
    for node in plan.stores:
        for one in ancestors(node):
            if one.line and one not in others:
                found[one.line.partition(": ")[2]] = None
    return list(reversed(found))
