"""Write the launchers of a package, which allocate what kernels write and launch them."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import sympy
import torch

from fuselab.ejection import emit_cuda, emit_triton
from fuselab.ejection.followed_dtypes import dtype_texts, dtypes_of_calls, dtypes_of_kernels
from fuselab.ejection.graph_nodes import expression_of
from fuselab.ejection.held import Held
from fuselab.ejection.loops import (
    SAME,
    Call,
    Input,
    Node,
    Pieces,
    Pointwise,
    Reduction,
    chosen_in,
    operands_of,
)
from fuselab.ejection.package import Package
from fuselab.ejection.pairs import pairs_of
from fuselab.ejection.plan import KernelPlan, Operand, with_code
from fuselab.ejection.stored import (
    behind_calls,
    constant_of,
    exact_in,
    leaves,
    memory_of,
    stored_as,
)
from fuselab.ejection.taken import tensors_in
from fuselab.ejection.walked_windows import launched_operands, walks_windows
from fuselab.ejection.write_gradient import unpacked_upstream, upstream_type
from fuselab.ejection.write_reference import declared, outputs_type, unpacked

if TYPE_CHECKING:
    from fuselab.ejection.regions import Cut


# The languages of a package's kernels, and the device of each.
DEVICES = {"triton": "cuda", "cuda": "cuda", "cpp": "cpu"}
LANGUAGES = tuple(DEVICES)
ORDERED = "empty_in_order"


def annotated(names: Sequence[str]) -> str:
    """Return parameters of a function, all of them tensors."""
    return ", ".join(f"{name}: Tensor" for name in names)


def launcher_parts(package: Package, languages: Sequence[str]) -> list[str]:
    """Return the texts of the launchers, of what the backward saves, of the gradients' shapes, and
    of ``supports``."""
    has_gradient = package.has_gradient
    parts = [
        _forward(package),
        *dict.fromkeys(_backwards(package, languages).values()),
        _launchers(package, has_gradient, languages),
    ]
    if has_gradient:
        outputs = len(package.output_names)
        is_one = outputs == 1 and not package.kept
        read = ["output" if is_one else f"output[{place}]" for place, _ in package.read_outputs]
        unread = package.unread
        own = [f"without_elements({one})" if one in unread else one for one in package.saved]
        saved = [*own, *read, *([f"*output[{outputs}:]"] if package.kept else [])]
        parts.append(
            f"def save(output: {outputs_type(outputs + len(package.kept))}, "
            f"{annotated(package.parameters)}) -> tuple[Tensor, ...]:\n"
            f"    return ({', '.join(saved)}{',' if len(saved) == 1 else ''})\n"
        )
        parts.append(_fake_gradient(package))
    return [*parts, _supports(package)]


def _forward(package: Package) -> str:
    lines = [*unpacked(package.taken), *package.sizes.statements(package.parameters)]
    lines.append(f"compute = arithmetic_dtype({', '.join(package.read)})")
    if len(package.output_names) > 1 and not package.in_place:
        outputs, called = ", ".join(package.output_names), ", ".join(package.parameters)
        lines.append(f"{outputs} = outputs_like(reference, {called})")
    lines += _launches(package, package.forward, package.parameters)
    returned = "None"
    if not package.in_place:
        results = [package.result_name(node, package.forward) for node in package.program.outputs]
        lines.append(f"return {', '.join([*results, *package.kept])}")
        returned = outputs_type(len(package.output_names) + len(package.kept))
    return (
        f"def _forward(sweeps: Sweeps, {declared(package.taken)}) -> {returned}:\n"
        + textwrap.indent("\n".join(lines), "    ")
        + "\n"
    )


def _backwards(package: Package, languages: Sequence[str]) -> dict[str, str]:
    """Return the text of the function that launches the backward, by language: of their own
    for Triton and C++ if they sum over rows beside other values, or C++ stores values for later
    kernels, and one for both if they launch the same kernels."""
    if not package.has_gradient:
        return {}
    texts = dict.fromkeys(languages, _backward(package, "_backward", package.backward))
    summing: dict[str, Sequence[KernelPlan]] = {}
    if any(plan.sums for plan in package.triton_backward):
        summing["triton"] = package.triton_backward
    if package.cpp_differs:
        summing["cpp"] = package.cpp_backward
    shared = {_backward(package, "_backward_summing", plans) for plans in summing.values()}
    for name, plans in summing.items():
        is_shared = len(shared) == 1 and any(plan.sums for plan in plans)
        label = "_backward_summing" if is_shared else f"_backward_{name}"
        texts[name] = _backward(package, label, plans)
    return texts


def _backward(package: Package, name: str, plans: Sequence[KernelPlan]) -> str:
    lines = package.sizes.statements(package.saved)
    upstream = [one for one in package.upstream_names if one is not None]
    lines += unpacked_upstream(package)
    lines.append(f"compute = arithmetic_dtype({', '.join([*upstream, *package.saved])})")
    lines += _launches(package, plans, [*upstream, *package.given_back])
    results: list[str] = []
    passed, read_again = package.passed_names, package.read_again(plans)
    pairs = zip(package.parameters, package.program.gradients, strict=True)
    for place, (argument, node) in enumerate(pairs):
        result = "None"
        if node is not None:
            result = passed.get(place) or package.result_name(node, plans)
            if isinstance(node, Call) or node in read_again:
                result += f".to({argument}.dtype)"
        results.append(result if result == "None" else f"{result} if needs[{place}] else None")
    lines += ["return (", *(f"    {text}," for text in results), ")"]
    return (
        f"def {name}(sweeps: Sweeps, needs: Sequence[bool], "
        f"grad_output: {upstream_type(package)}, "
        f"{annotated(package.given_back)}) -> tuple[Tensor | None, ...]:\n"
        + textwrap.indent("\n".join(lines), "    ")
        + "\n"
    )


def _launches(package: Package, plans: Sequence[KernelPlan], given: Sequence[str]) -> list[str]:
    """Return the statements that allocate the kernels' results and launch them."""
    lines: list[str] = []
    inputs = [*package.program.inputs, *package.program.upstream]
    inputs += [one.kept for one in package.residuals]
    if plans is not package.forward:
        inputs += [one for _, one in package.read_outputs]
    held = Held(package.sizes, {one: one.name for one in inputs})
    held.expect(package.program.results)
    nodes = [one.node for plan in plans for one in plan.loads if one.node]
    nodes += package.program.results
    held.expect([one for node in nodes for one in behind_calls(node)])
    pairs = zip(package.program.gradients, package.parameters, strict=True)
    gradients = {node: name for node, name in reversed(list(pairs)) if name in given}
    # A gradient that nobody needs is written where the one that it equals is.
    equal = {package.program.gradients[place]: (place, other) for place, other in package.equal}
    calls = _Calls(package, held, plans)
    passed, read_again = package.passed_names, package.read_again(plans)
    names = {one.node: one.kept.name for one in package.residuals}
    # The formulas keep residuals in 64 bits, and PyTorch indexes with these alone.
    wide = {*names, *_given_to_calls(nodes)}
    between = package.held(plans)
    early = [plan for plan in plans if all(one.name in between for one in plan.stored)]
    ends = _ends(package, plans) if early else []
    if package.in_place:  # the new values lie where the old ones do
        held.texts.update(zip(package.program.outputs, package.captured.written, strict=True))
    elif plans is package.forward and len(package.output_names) == 1 and ends:
        (output,) = package.program.outputs
        lines.append(f"{ends[0]} = {_allocation(package, output, None, given, True)}")
        whole = held.allocated(output, ends[0]) if isinstance(output, Pieces) else ()
        lines += whole
        held.texts[output] = ends[0]
    starts = _starts(package, plans)
    each: list[str] = []  # the sweeps of a launch for lists
    for place, plan in enumerate(plans):
        for operand in plan.loads:
            lines += calls.before(operand.node)
            lines += _of_numbers(package, held, plans, operand.node, given)
        read = [f'    ({held.text(one.node)}, "{one.pattern}"),' for one in plan.loads]
        for operand in plan.stored:
            assert operand.node is not None
            node = held.wholes.get(operand.node, operand.node)
            if node in held.texts:
                continue  # another part of it was stored before
            # A backward may compute an output again, as any other value that it needs.
            is_output = plans is package.forward and node in package.program.outputs
            is_whole = node is not operand.node
            name = names.get(node, operand.name)
            if is_whole or is_output:
                name = package.result_name(node, plans)
            if not is_output or len(package.output_names) == 1:  # else they are allocated together
                like = gradients.get(node)
                order = _in_the_order_of(plan, operand, held) if node not in wide else None
                made = _allocation(package, node, like, given, is_output, node not in wide, order)
                if like is not None and node in read_again:
                    # In an argument's dtype, which may be narrower, others would be summed up.
                    made = f"torch.empty_like({like}, dtype={_upstream_dtype(package, like)})"
                if node in equal:
                    place, other = equal[node]
                    first = package.program.gradients[other]
                    if first in held.texts:
                        made += f" if needs[{place}] else {held.texts[first]}"
                lines.append(f"{name} = {made}")
            if is_whole:
                lines += held.allocated(held.wholes[operand.node], name)
            held.texts[node] = name
        written = [f'    ({held.text(one.node)}, "{one.pattern}"),' for one in plan.stored]
        sweep = [
            "Sweep(",
            f"    rows={_axes(package, plan, plan.kernel.row_axes)},",
            f"    columns={_columns(package, plan)},",
            "    read=[",
            *(f"    {text}" for text in read),
            "    ],",
            "    written=[",
            *(f"    {text}" for text in written),
            "    ],",
            *(["    in_order=True,"] if plan.scans else []),
            *(["    apart=True,"] if _is_apart(package, plan) else []),
            *([f"    for_results=[{', '.join(ends)}],"] if plan in early and ends else []),
            ")",
        ]
        if plan.of_lists:
            each += [*(f"    {line}" for line in sweep[:-1]), "    ),"]
            if starts[place + 1]:
                lines += ["each = [", *each, "]"]
                lines.append(f'sweeps.run_each("{plan.launched}", each, compute)')
                each = []
            continue
        numbers = "".join(f"{package.sizes.text(size.size)}, " for size in plan.numbers)
        behind = f", ({numbers.rstrip()})" if numbers else ""
        lines += [f"swept = {sweep[0]}", *sweep[1:]]
        lines.append(f'sweeps.run("{plan.name}", swept, compute{behind})')
    if plans is not package.forward:
        for place, gradient in enumerate(package.program.gradients):
            lines += calls.before(gradient) if place not in passed else ()
    return lines


def _is_apart(package: Package, plan: KernelPlan) -> bool:
    """Return whether a kernel writes over a tensor of rows that it reads."""
    if not (package.in_place and plan.has_columns):
        return False
    over = dict(zip(package.program.outputs, package.captured.written, strict=True))
    read = {one.node.name for one in plan.loads if isinstance(one.node, Input)}
    columns = frozenset(plan.kernel.column_axes)
    of_rows = {
        over.get(one.node)
        for one in plan.stored
        if one.node is not None and columns.isdisjoint(axis for part in one.index for axis in part)
    }
    return not read.isdisjoint(of_rows)


def _starts(package: Package, plans: Sequence[KernelPlan]) -> list[bool]:
    """Return of each kernel, and of the end, whether a launch of its own begins there: not one for
    a further tensor of lists, unless one writes what the other reads."""
    over: dict[Node, object] = {}
    if package.in_place:
        over.update(zip(package.program.outputs, package.captured.written, strict=True))
        over.update({one: one.name for one in package.program.inputs})
    found, before = [], ""
    read: set[object] = set()
    written: set[object] = set()
    for plan in plans:
        loads = {
            over.get(node, node)
            for one in plan.loads
            if one.node
            for node in behind_calls(one.node)
        }
        stores = {over.get(one.node, one.node) for one in plan.stored if one.node is not None}
        joins = plan.of_lists and plan.launched == before
        joins = joins and read.isdisjoint(stores) and written.isdisjoint(loads)
        found.append(not joins)
        read = read | loads if joins else loads
        written = written | stores if joins else stores
        before = plan.launched
    return [*found, True]


def _of_numbers(
    package: Package,
    held: Held,
    plans: Sequence[KernelPlan],
    node: Node | None,
    given: Sequence[str],
) -> list[str]:
    """Return the statements that make what a kernel reads, where it is put together from numbers
    alone, so that no kernel stores a part of it."""
    whole = None if node is None else memory_of(node)
    if not isinstance(whole, Pieces) or whole in held.texts:
        return []
    if any(constant_of(leaf) is None for leaf in leaves(whole)):
        return []
    name = package.result_name(whole, plans)
    made = _allocation(package, whole, None, given, False)
    return [f"{name} = {made}", *held.allocated(whole, name)]


def _ends(package: Package, plans: Sequence[KernelPlan]) -> list[str]:
    """Return the names of tensors that have the dtypes of all floating results of ``plans``."""
    if plans is package.forward:
        names = package.captured.written if package.in_place else package.output_names
        pairs = zip(names, package.program.outputs, strict=True)
        return [name for name, node in pairs if node.kind == "float"]
    arguments = zip(package.parameters, package.program.gradients, strict=True)
    return [name for name, node in arguments if node is not None]


class _Calls:
    """The PyTorch calls of a launcher, each in the line before the first kernel that reads it."""

    def __init__(self, package: Package, held: Held, plans: Sequence[KernelPlan]) -> None:
        self.package = package
        self.held = held
        self.plans = plans

    def before(self, node: Node | None) -> list[str]:
        """Return the statements that compute ``node`` and have not been written yet, if it is
        computed by PyTorch."""
        lines: list[str] = []
        for one in behind_calls(node) if node is not None else ():
            if isinstance(one, Call) and one not in self.held.texts:
                if one.operator == SAME:
                    self.held.texts[one] = self.text(one.operands[0])
                    continue
                name = self.held.texts[one] = self.package.names[one]
                given = [self.text(operand) for operand in one.operands]
                lines.append(f"{name} = {one.operator.format(*given)}")
        return lines

    def text(self, operand: object) -> str:
        if isinstance(operand, Node):
            return self.held.text(operand)
        if isinstance(operand, sympy.Expr):
            return self.package.sizes.text(operand)
        if isinstance(operand, tuple):
            inner = ", ".join(map(self.text, operand))
            return f"({inner}{',' if len(operand) == 1 else ''})"
        if operand in ("float", "int", "bool"):
            return {"float": "compute", "int": "torch.int64", "bool": "torch.bool"}[str(operand)]
        return repr(operand)


def _given_to_calls(nodes: Sequence[Node]) -> set[Node]:
    """Return what PyTorch calls read on the way to ``nodes``."""
    calls = {
        one
        for node in nodes
        for one in behind_calls(node)
        if isinstance(one, Call) and one.operator != SAME
    }
    return {stored_as(operand) for call in calls for operand in operands_of(call)}


def _allocation(
    package: Package,
    node: Node,
    like: str | None,
    given: Sequence[str],
    is_output: bool,
    may_be_narrow: bool = False,
    order: str | None = None,
) -> str:
    """Return the text of a new tensor: an output, the gradient of the argument ``like``, or one
    that later kernels read, whose integers are chosen for what they can be if it
    ``may_be_narrow``, and whose dimensions are in the order of those of ``order``."""
    if is_output:
        return f"output_like(reference, {', '.join(package.parameters)})"
    if like is not None:
        return f"torch.empty_like({like})"
    sizes = ", ".join(map(package.sizes.text, node.sizes))
    sizes += "," if len(node.sizes) == 1 else ""
    dtype = {"bool": "torch.bool", "int": "torch.int64"}.get(node.kind, "compute")
    if may_be_narrow and node.kind == "float":
        dtype = _promoted(sorted(exact_in(node) or ())) or dtype
    of = node.operands[0] if isinstance(node, Pointwise) and node.function == "abs" else node
    if may_be_narrow and isinstance(of, Reduction) and of.places is not None:
        dtype = f"torch.int32 if {package.sizes.text(of.places)} < 2**31 else torch.int64"
    if order is not None:
        return f"{ORDERED}({order}, ({sizes}), {dtype})"
    return f"torch.empty(({sizes}), dtype={dtype}, device={given[0]}.device)"


def _in_the_order_of(plan: KernelPlan, stored: Operand, held: Held) -> str | None:
    """Return the text of a tensor that a kernel reads where it writes the elements of another, at
    places that it may compute: those of both should follow one another in the same order."""
    index = stored.index
    if len(index) < 2 or stored.node is None or isinstance(stored.node, Pieces):
        return None
    for one in plan.loads:
        if one.node is None or len(one.index) != len(index):
            continue
        pairs = list(zip(one.index, index, strict=True))
        if any(mine and mine == own for mine, own in pairs) and all(
            mine == own or chosen_in((mine,)) for mine, own in pairs
        ):
            return held.text(one.node)
    return None


def _upstream_dtype(package: Package, name: str) -> str:
    """Return the text of the dtype that holds the gradient of an argument before it is rounded to
    the argument's own: at least those of the upstream gradients."""
    return _promoted([name, *filter(None, package.upstream_names)])


def _promoted(names: Sequence[str]) -> str:
    """Return the text of the dtype that holds the elements of all these tensors."""
    dtypes = [f"{name}.dtype" for name in names]
    return reduce("torch.promote_types({}, {})".format, dtypes) if dtypes else ""


def _columns(package: Package, plan: KernelPlan) -> str:
    """Return the columns; one of its own where a kernel reduces only dimensions of size 1, because
    a sweep without columns takes a loop of the rows for them."""
    if plan.has_columns and not plan.kernel.column_axes:
        return '{"single": 1}'
    return _axes(package, plan, plan.kernel.column_axes)


def _axes(package: Package, plan: KernelPlan, axes: Sequence[Any]) -> str:
    entries = [f'"{plan.axis_names[axis]}": {package.sizes.text(axis.size)}' for axis in axes]
    return "{" + ", ".join(entries) + "}"


def patterns(package: Package | Cut) -> list[tuple[str, list[str]]]:
    """Return each argument with its dimensions: a size's name, a number, or text of a size."""
    return [
        (argument.name, [package.sizes.text(expression_of(size)) for size in argument.tensor.shape])
        for argument in package.captured.arguments
    ]


def _supports(package: Package) -> str:
    apart = [f"    {line}" for line in unpacked(package.taken)]
    body = "\n".join([*apart, "    return mismatch(", *mismatch_lines(package), "    )"])
    return (
        f"def supports({declared(package.taken)}) -> str | None:\n"
        '    """Return None if the kernels take these shapes, else the reason."""\n' + body + "\n"
    )


def mismatch_lines(package: Package) -> list[str]:
    """Return the arguments of ``mismatch``: the shapes that the kernels were written for."""
    lines = []
    for name, dims in patterns(package):
        known = re.compile(r"\w+|\w+ // \d+")
        words = [dim.replace(" ", "") if known.fullmatch(dim) else "_" for dim in dims]
        lines.append(f'        ({name}, "{" ".join(words)}"),')
    if package.multiples:
        lines.append(f"        multiples={package.multiples!r},".replace("'", '"'))
    if package.least:
        lines.append(f"        least={package.least!r},".replace("'", '"'))
    if package.widest is not None:
        lines.append(f"        widest={package.widest},")
    places = enumerate(package.parameters, 1)
    dtypes = package.program.integers
    integers = ", ".join(f"{place}: {dtypes[name]}" for place, name in places if name in dtypes)
    if integers:
        lines.append(f"        integers={{{integers}}},")
    decided = decided_texts(package)
    if decided:
        lines.append("        decided={")
        for one in decided:
            read = {node.id for node in ast.walk(ast.parse(one)) if isinstance(node, ast.Name)}
            named = ", ".join(sorted(read & {*package.sizes.names.values()}))
            lines += [
                f"            {json.dumps(one)}: (",
                f"                lambda {named}, **_: {one}",
            ]
            lines.append("            ),")
        lines.append("        },")
    numbered = {name: place for place, name in enumerate(package.parameters, 1)}
    alike = ", ".join(
        f"{tuple(map(numbered.__getitem__, names))!r}: {dtypes!r}"
        for names, dtypes in dtypes_of_kernels(package.captured).items()
    )
    if alike:
        lines.append(f"        dtypes={{{alike}}},")
    return lines


def decided_texts(package: Package | Cut) -> list[str]:
    """Return the conditions on sizes by which the user's code took the way that was captured, and
    by which its sizes divide each other."""
    captured = package.captured
    texts = [package.sizes.condition_text(one, captured.name) for one in captured.decisions]
    return [*texts, *package.shares]


def example_sizes(package: Package | Cut) -> list[str]:
    """Return as conditions the dimensions of the call's arguments that cannot have other sizes than
    in the example. A module's own tensors keep theirs."""
    of_calls = tensors_in(package.captured.given)
    return [
        f"{argument.name}.shape[{dim}] == {size}"
        for argument in package.captured.arguments
        if argument.name in of_calls
        for dim, size in enumerate(argument.tensor.shape)
        if not isinstance(size, torch.SymInt) or size.node.expr.is_Integer
    ]


def where_it_runs(package: Package | Cut) -> list[str]:
    """Return the conditions on sizes and dtypes under which the kernels compute what the code does;
    of a composition, under which its steps do: its operators have conditions of their own."""
    is_one = hasattr(package, "program")
    alike = (dtypes_of_kernels if is_one else dtypes_of_calls)(package.captured)
    return [*decided_texts(package), *dtype_texts(alike), *example_sizes(package)]


def _fake_gradient(package: Package) -> str:
    saved = annotated(package.given_back)
    passed = package.passed_names
    results = []
    for place, (node, name) in enumerate(
        zip(package.program.gradients, package.parameters, strict=True)
    ):
        text = "None"
        if node is not None:
            like = name if place not in passed else f"{passed[place]}, dtype={name}.dtype"
            text = f"torch.empty_like({like}) if needs[{place}] else None"
        results.append(f"        {text},")
    apart = [f"    {line}" for line in (unpacked_upstream(package) if passed else ())]
    body = "\n".join([*apart, "    return (", *results, "    )"])
    return (
        "def fake_gradient(needs: Sequence[bool], "
        f"grad_output: {upstream_type(package)}, "
        f"{saved}) -> tuple[Tensor | None, ...]:\n{body}\n"
    )


def _cuda(plans: Sequence[KernelPlan]) -> list[str]:
    """Return the statements that name the CUDA kernels and those that a compile check takes."""
    reductions = {plan.name: len(plan.reductions) for plan in plans if plan.reductions}
    scanning = [plan.name for plan in plans if plan.scans]
    splitting = [plan.name for plan in plans if emit_cuda.can_split(plan)]
    lines = ["_CUDA = CudaSweeps(", '    Path(__file__).with_name("cuda_kernels.cu"),']
    if reductions:
        lines += ["    reductions={"]
        lines += [f'        "{name}": {count},' for name, count in reductions.items()]
        lines += ["    },"]
    if splitting:
        lines += ["    splitting=(", *(f'        "{name}",' for name in splitting), "    ),"]
    if scanning:
        lines += ["    scanning=(", *(f'        "{name}",' for name in scanning), "    ),"]
    lines += [")", "CUDA_EXPRESSIONS = _CUDA.examples(", "    {"]
    kinds = {plan.name: emit_cuda.element_kinds(plan) for plan in with_code(plans)}
    lines += [f'        "{name}": "{words}",' for name, words in kinds.items()]
    return [*lines, "    }", ")"]


def _cpp(plans: Sequence[KernelPlan]) -> list[str]:
    """Return the statement that names the C++ kernels."""
    path = 'Path(__file__).with_name("cpu_kernels.cpp")'
    if windows := _windows(plans):
        return ["_CPP = CppSweeps(", f"    {path},", *windows, ")"]
    return [f"_CPP = CppSweeps({path})"]


def _windows(plans: Sequence[KernelPlan]) -> list[str]:
    """Return the lines that say which kernels walk over windows."""
    names = [f'        "{plan.name}",' for plan in with_code(plans) if walks_windows(plan)]
    return ["    windows=(", *names, "    ),"] if names else []


def sweep_names(parts: Sequence[str]) -> list[str]:
    """Return what launchers, of which these are the texts, import from ``sweep``."""
    has_ordered = any(f"{ORDERED}(" in part for part in parts)
    return ["Sweep", "Sweeps", "arithmetic_dtype", *([ORDERED] if has_ordered else [])]


def triton_names(package: Package) -> list[str]:
    """Return what launchers import from ``triton_sweep``."""
    plans = (*package.forward, *package.triton_backward)
    reduces = any(plan.has_columns or plan.sums for plan in plans)
    return [*(["Reducing"] if reduces else []), "TritonSweeps"]


def _triton(package: Package) -> list[str]:
    """Return the statements that name the Triton kernels and how they reduce."""
    lines: list[str] = []
    directions = {"_TRITON": package.forward}
    if package.has_gradient:
        directions["_TRITON_BACKWARD"] = package.triton_backward
    for name, plans in directions.items():
        lines += [
            f"{name} = TritonSweeps(",
            "    triton_kernels,",
            f'    "{package.operator_name}",',
        ]
        reducing = [
            f'        "{plan.name}": {emit_triton.reducing_text(plan)},'
            for plan in plans
            if (plan.has_columns or plan.sums) and not walks_windows(plan)
        ]
        lines += ["    {", *reducing, "    },"] if reducing else ["    {},"]
        if plans is package.triton_backward:
            lines.append("    backward=True,")
        held = [f'"{one}"' for one in package.held(plans)]
        if held:
            lines.append(f"    held=({', '.join(held)},),")
        lines += [*_pairs(plans), *_windows(plans), ")"]
    return lines


def _pairs(plans: Sequence[KernelPlan]) -> list[str]:
    """Return the lines of a ``TritonSweeps`` that say which operands may lie interleaved."""
    lines = []
    for plan in plans:
        places = [tuple(map(launched_operands(plan).index, pair)) for pair in pairs_of(plan)]
        if places:
            lines.append(f'        "{plan.name}": {tuple(places)!r},')
    return ["    pairs={", *lines, "    },"] if lines else []


def _launchers(package: Package, has_gradient: bool, languages: Sequence[str]) -> str:
    lines: list[str] = []
    texts = _backwards(package, languages)
    functions = {name: text[4 : text.index("(")] for name, text in texts.items()}
    for name in languages:
        if name == "triton":
            lines += _triton(package)
            lines.append("forward_triton = partial(_forward, _TRITON)")
            if has_gradient:
                lines.append(f"backward_triton = partial({functions[name]}, _TRITON_BACKWARD)")
            continue
        if name == "cuda":
            lines += _cuda([*package.forward, *package.backward])
        else:
            lines += _cpp([*package.forward, *package.backward])
        lines.append(f"forward_{name} = partial(_forward, _{name.upper()})")
        if has_gradient:
            lines.append(f"backward_{name} = partial({functions[name]}, _{name.upper()})")
    return "\n".join(lines) + "\n"
