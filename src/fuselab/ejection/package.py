"""Decide all that a package consists of, before its files are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor

from fuselab.ejection.alike import sharing_code
from fuselab.ejection.capture import (
    Captured,
    argument_name,
    capture,
)
from fuselab.ejection.chosen import ADDED, ADDED_AT
from fuselab.ejection.definitions import definitions_in_formulas, definitions_in_kernels
from fuselab.ejection.exact_sizes import exact_size
from fuselab.ejection.hand_over import with_handed_over
from fuselab.ejection.kernels import Kernel, ancestors, in_order, without_floors
from fuselab.ejection.loops import SAME, Call, Choice, Input, Node, Pieces, Pointwise, operands_of
from fuselab.ejection.lower import Program, lower
from fuselab.ejection.plan import KernelPlan, Namer, Sizes, kernel_name, planned
from fuselab.ejection.read_apart import WORTH_ON_A_GPU, with_values_read_apart
from fuselab.ejection.residuals import Residual, with_outputs, with_residuals
from fuselab.ejection.returned import Returned
from fuselab.ejection.roundings import coarsest_rounding
from fuselab.ejection.row_functions import scheduled
from fuselab.ejection.row_sums import SummingKernel, with_row_sums
from fuselab.ejection.stored import behind_calls, leaves
from fuselab.ejection.taken import tensors_in
from fuselab.errors import EjectError
from fuselab.op import dtype_name

# What a contract says of a package with such a call (``FusedOp.nondeterministic``).
UNORDERED = "on a GPU atomic additions reach one position in any order"
_ADDING = (ADDED, ADDED_AT, "scatter_add_")  # what such a call contains


@dataclass(frozen=True)
class Package:
    """The captured function, its kernels and their names.

    ``captured`` is in the simple operators that kernels are made of, ``formulas`` in PyTorch's own,
    normalisations and softmax among them, as far as they have second derivatives.
    """

    captured: Captured
    formulas: Captured
    program: Program
    sizes: Sizes
    forward: tuple[KernelPlan, ...]
    backward: tuple[KernelPlan, ...]
    # with sums over rows in the kernels of these rows; C++ also stores slow values for later
    # kernels, or has the same kernels as `backward`
    cpp_backward: tuple[KernelPlan, ...]
    triton_backward: tuple[KernelPlan, ...]  # also in kernels without reductions
    names: Mapping[Node, str]  # of results, and of what is stored part by part
    output_names: tuple[str, ...]
    frozen: frozenset[str]  # arguments that get no gradient
    residuals: tuple[Residual, ...]  # what the forward keeps for the backward
    # The outputs that the backward reads, with their places among all.
    read_outputs: tuple[tuple[int, Input], ...] = ()
    in_place: bool = False  # whether the kernels write over the arguments themselves

    @property
    def name(self) -> str:
        return self.captured.name

    @property
    def operator_name(self) -> str:
        """The name under which PyTorch knows the operator."""
        return f"ejected::{self.name}{'_' if self.in_place else ''}"

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.captured.parameters

    @property
    def lists(self) -> dict[str, tuple[str, ...]]:
        """The lists among the arguments that the operator takes whole, each with the names of its
        tensors: those of which the kernels write over all tensors, or over none. Others are taken
        apart, of which an operator of PyTorch has room for 64."""
        found = {}
        for name, value in self.captured.given.items():
            if not self.in_place or not isinstance(value, (list, tuple)):
                continue
            members = tuple(tensors_in({name: value}))
            written = {member in self.captured.written for member in members}
            if len(written) == 1 and {*members} <= {*self.parameters}:
                found[name] = members
        return found

    @property
    def taken(self) -> dict[str, tuple[str, ...]]:
        """The parameters of the operator, each with the names of the tensors that it holds."""
        holders = {member: name for name, held in self.lists.items() for member in held}
        found: dict[str, tuple[str, ...]] = {}
        for name in self.parameters:
            holder = holders.get(name, name)
            found[holder] = (*found.get(holder, ()), name)
        return found

    @property
    def returned(self) -> Returned:
        return self.formulas.returned

    @property
    def upstream_names(self) -> tuple[str | None, ...]:
        """The name of each output's upstream gradient; None where it has none."""
        return _upstream_names(self.captured, self.output_names)

    @property
    def is_constant(self) -> bool:
        """Whether no output depends on an argument in a way that has a gradient, as a comparison's
        does not; False of a package without a backward."""
        examples = [
            node.meta["example_value"]
            for node in self.formulas.traced.graph.find_nodes(op="placeholder")
        ]
        wanted = any(isinstance(one, Tensor) and one.requires_grad for one in examples)
        return wanted and not any(self.returned.needs_gradient)

    @property
    def has_gradient(self) -> bool:
        """Whether there is a backward, of kernels or of a call of PyTorch alone."""
        return bool(self.backward) or any(isinstance(one, Call) for one in self.program.gradients)

    @property
    def is_unordered(self) -> bool:
        """Whether a PyTorch call adds up elements in an order that is not fixed."""
        nodes = in_order(self.program.results)
        return any(
            isinstance(one, Call) and any(adding in one.operator for adding in _ADDING)
            for one in nodes
        )

    @property
    def keeps_gradient(self) -> tuple[bool, ...]:
        """Whether each output needs a gradient where the function's does, as all floating outputs
        of an operator do."""
        return tuple(
            needs or not output.meta["val"].is_floating_point() or not self.has_gradient
            for needs, output in zip(
                self.captured.needs_gradient, self.captured.outputs, strict=True
            )
        )

    @cached_property
    def gradients_of(self) -> tuple[tuple[str, ...] | None, ...]:
        """The arguments on which each output depends such that it has a gradient; None where these
        are all on which any output does."""
        needed = self.returned.differentiable_sources
        if not self.has_gradient or needed is None:
            return (None,) * len(self.captured.outputs)
        sources = [tuple(map(argument_name, nodes)) for nodes in needed]
        every = {name for names in sources for name in names}
        found = [None if set(names) == every or not names else names for names in sources]
        return (*found, *(None for _ in self.captured.written))

    @property
    def cpp_differs(self) -> bool:
        """Whether C++ has a backward of its own: one that sums over rows beside other values, or
        stores values for later kernels."""
        return self.cpp_backward is not self.backward

    @property
    def saved(self) -> tuple[str, ...]:
        """The arguments that the backward reads, or whose sizes or dtypes it needs."""
        needed = self._read_by_backward | {argument for argument, _ in self.sizes.places.values()}
        needed |= {
            name
            for name, gradient in zip(self.parameters, self.program.gradients, strict=True)
            if gradient is not None
        }
        return tuple(name for name in self.parameters if name in needed)

    @property
    def unread(self) -> tuple[str, ...]:
        """The saved arguments of which the backward reads no elements."""
        return tuple(name for name in self.saved if name not in self._read_by_backward)

    @cached_property
    def _read_by_backward(self) -> set[str]:
        """The arguments of which a backward, or the formulas of it, read elements."""
        plans = [*self.backward, *self.cpp_backward, *self.triton_backward]
        held = [operand.node for plan in plans for operand in plan.loads if operand.node]
        held += [node for node in self.program.gradients if isinstance(node, Call)]
        read = {one.name for node in held for one in behind_calls(node) if isinstance(one, Input)}
        return read | {
            argument.name
            for argument in self.formulas.arguments
            if argument.node in self.formulas.behind_gradients()
        }

    @property
    def equal(self) -> tuple[tuple[int, int], ...]:
        """The places of arguments whose gradients are computed by the same expression, each with
        that of the first of them, as ``Gradient.equal`` has them."""
        gradients = self.program.gradients
        return tuple(
            (place, gradients.index(node.operands[0]))
            for place, node in enumerate(gradients)
            if isinstance(node, Pointwise) and node.function == "same"
            if node.operands[0] in gradients
        )

    @property
    def passed(self) -> tuple[tuple[int, int], ...]:
        """The places of arguments whose gradient is an upstream one, each with the place of the
        output that it is the gradient of, as ``Gradient.passed`` has them."""
        upstream = [self.upstream_names.index(one.name) for one in self.program.upstream]
        of: dict[object, int] = dict(zip(self.program.upstream, upstream, strict=True))
        return tuple(
            (place, of[node.operands[0]])
            for place, node in enumerate(self.program.gradients)
            if isinstance(node, Call) and node.operator == SAME
        )

    @property
    def passed_names(self) -> dict[int, str]:
        """The place of each such argument, with the name of the upstream gradient."""
        names = ((place, self.upstream_names[of_output]) for place, of_output in self.passed)
        return {place: name for place, name in names if name is not None}

    @property
    def read(self) -> tuple[str, ...]:
        """The arguments of which the forward reads elements, not the sizes alone; all, if none."""
        held = [operand.node for plan in self.forward for operand in plan.loads if operand.node]
        held += self.program.outputs
        found = {one.name for node in held for one in behind_calls(node) if isinstance(one, Input)}
        return tuple(name for name in self.parameters if name in found) or self.parameters

    @cached_property
    def pools_adaptively(self) -> bool:
        """Whether kernels find the largest elements of adaptive windows, or those of windows whose
        lengths differ: their C++ takes several times as long as PyTorch's."""

        def is_slow(name: str, value: Any) -> bool:
            if name.startswith("_adaptive_avg_pool"):
                return any(isinstance(one, Choice) for one in ancestors(value))
            return name.startswith("adaptive_max_pool")

        return any(
            is_slow(str(formula.target).removeprefix("aten."), value)
            for formula, value in self.program.lowered.items()
        )

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of what the forward keeps for the backward."""
        return tuple(one.kept.name for one in self.residuals)

    @property
    def given_back(self) -> tuple[str, ...]:
        """The names of all that the backward gets beside the upstream gradient."""
        return (*self.saved, *(one.name for _, one in self.read_outputs), *self.kept)

    @property
    def non_differentiable(self) -> tuple[str, ...]:
        """The floating arguments on which no output depends such that it has a gradient: as the
        weight of ``weight.detach()``, and those of which the size alone is read."""
        pairs = zip(self.captured.arguments, self.program.gradients, strict=True)
        return tuple(
            argument.name
            for argument, gradient in pairs
            if gradient is None
            and self.has_gradient
            and argument.tensor.is_floating_point()
            and argument.name not in self.frozen
        )

    @property
    def is_plain(self) -> bool:
        """Whether the function returns what the operator does: nothing is written over, and every
        output has its gradient, of the same arguments."""
        has_all = all(self.keeps_gradient) and not any(self.gradients_of)
        return self.returned.is_plain and has_all and not self.captured.written

    def advice(self, name: str) -> str:
        """Return what to do where a gradient of a frozen argument is asked for."""
        if name in self.captured.written:
            return "it is written over; detach it"
        return "eject it with this argument requiring one"

    @property
    def widest(self) -> torch.dtype | None:
        """The most precise dtype of the arguments for which no rounding of the function between
        its steps is lost; None if there is none."""
        rounding = coarsest_rounding(self.formulas.traced)
        return rounding and rounding[0]

    @property
    def multiples(self) -> dict[str, int]:
        """Sizes that have to be multiples of a number, by name."""
        return self.sizes.multiples(self._loops, self.program.divisions)

    @property
    def shares(self) -> list[str]:
        """Conditions on several sizes under which the kernels compute the function: some are
        multiples of others, and slices of joined tensors hold together."""
        together = [one for one in self.program.conditions if _least(one) is None]
        texts = [f"{self.sizes.text(one)} >= 0" for one in together]
        return [*self.sizes.shares(self._loops), *texts]

    @property
    def _loops(self) -> list[sympy.Expr]:
        """The sizes of the kernels' loops."""
        plans = (*self.forward, *self.backward)
        return [axis.size for plan in plans for axis in plan.axis_names]

    def held(self, plans: Sequence[KernelPlan]) -> tuple[str, ...]:
        """Return the names of what the kernels store for later kernels only."""
        results = {leaf for one in self.program.results for leaf in leaves(one)}
        stored = [operand for plan in plans for operand in plan.stored]
        return tuple(operand.name for operand in stored if operand.node not in results)

    @property
    def least(self) -> dict[str, int]:
        """Sizes that must not be below a number, by name."""
        found: dict[str, int] = {}
        for size in self.program.conditions:
            for symbol, count in (_least(size) or {}).items():
                name = self.sizes.names[symbol]
                found[name] = max(found.get(name, 0), count)
        if self.captured.written:  # PyTorch leaves running statistics as they are where x is empty
            for name in self.sizes.names.values():
                found.setdefault(name, 1)
        return found

    def read_again(self, plans: Sequence[KernelPlan]) -> set[Node]:
        """Return the gradients of which a later kernel, or a PyTorch call, computes others."""
        nodes = [one.node for plan in plans for one in plan.loads if one.node is not None]
        nodes += [one for one in self.program.gradients if isinstance(one, Call)]
        read = {behind for node in nodes for behind in behind_calls(node)}
        stored = (one for one in self.program.gradients if not isinstance(one, Call))
        return {one for one in stored if one is not None and one in read}

    def result_name(self, node: Node, plans: Sequence[KernelPlan]) -> str:
        """Return the name of the tensor that holds a result in the launcher of ``plans``."""
        if node in self.program.outputs:
            return self.output_names[self.program.outputs.index(node)]
        if isinstance(node, (Pieces, Call)):
            return self.names[node]
        for plan in plans:
            for operand in plan.stored:
                if operand.node is node:
                    return operand.name
        return node.name

    def describe(self) -> dict[str, Any]:
        """Return the facts for JSON: each kernel with its loops, what it reads and writes."""
        kernels = [
            {
                "name": plan.launched,
                "rows": [plan.axis_names[axis] for axis in plan.kernel.row_axes],
                "columns": [plan.axis_names[axis] for axis in plan.kernel.column_axes],
                "reads": [operand.name for operand in plan.loads],
                "writes": [operand.name for operand in plan.stored],
            }
            for plan in (*self.forward, *self.backward)
        ]
        return {"operator": self.operator_name, "kernels": kernels}


def planned_package(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool = False,
    frozen: Collection[str] = (),
    numbers: Sequence[int] | None = None,
    keeps_residuals: bool = True,
) -> Package:
    """Capture ``function`` with example arguments and decide its kernels.

    The arguments named in ``frozen`` get no gradient. The dropouts of the function have
    ``numbers``, from 0 on by default. Without ``keeps_residuals`` the backward reads arguments
    alone, so that it can follow a forward that stores nothing else. Raises EjectError.
    """
    captured, formulas = captured_both_ways(
        function, args, keywords, name, inference, frozen, numbers
    )
    inference = inference or not captured.returned.results
    sizes = Sizes(captured)
    taken = {"compute", "swept", "sweeps", "needs", "name", "torch", "Tensor", name}
    taken |= {argument.name for argument in captured.arguments} | set(sizes.names.values())
    output_names = formulas.returned.names(taken)
    output_names += tuple(f"new_{argument}" for argument in captured.written)
    upstream = [one for one in _upstream_names(captured, output_names) if one is not None]
    program = each_of_its_own(lower(captured, upstream), output_names, captured)
    names: dict[Node, str] = dict(zip(program.outputs, output_names, strict=True))
    residuals: tuple[Residual, ...] = ()
    read_outputs: tuple[tuple[int, Input], ...] = ()
    if keeps_residuals:
        program, read_outputs = with_outputs(program, captured, output_names)
        program, residuals = with_residuals(program, captured, [*taken, *upstream, *output_names])
    names |= {one.node: one.kept.name for one in residuals}
    results = [*program.outputs, *(one.node for one in residuals)]
    kernels = list(map(SummingKernel, _ordered(results, captured.hints)))
    forward = _plans(kernel_name(name), kernels, results, captured, sizes, names)
    for argument, gradient in zip(captured.arguments, program.gradients, strict=True):
        if gradient is not None:
            names.setdefault(gradient, f"grad_{argument.name}")
    gradients = _copies_behind([node for node in program.gradients if node is not None])
    ordered = _ordered(gradients, captured.hints)
    label = f"{name}_backward"
    kernels = list(map(SummingKernel, ordered))
    backward = _plans(label, kernels, gradients, captured, sizes, names)
    handing = with_handed_over(gradients, ordered, captured.hints)
    handing = in_running_order(with_values_read_apart(gradients, handing, captured.hints))
    cpp_kernels = with_row_sums(handing, to_pointwise=True)
    cpp_backward = backward
    if handing != ordered or any(one.sums for one in cpp_kernels):
        cpp_backward = _plans(label, cpp_kernels, gradients, captured, sizes, names)
    joined = with_row_sums(ordered, to_pointwise=True)
    triton_backward = _plans(label, joined, gradients, captured, sizes, names)
    package = Package(
        captured,
        formulas,
        program,
        sizes,
        forward,
        backward,
        cpp_backward,
        triton_backward,
        names,
        output_names,
        frozenset({*frozen, *captured.written, *_without_gradient(formulas, inference)}),
        residuals,
        read_outputs,
    )
    if package.has_gradient and (both := {*package.saved} & {*captured.written}):
        raise EjectError(
            f"the backward of {name} reads {' and '.join(sorted(both))}, which the forward writes "
            "over; let it return the new value."
        )
    if not writes_in_place(package):
        return package
    return replace(package, in_place=True, forward=sharing_code(forward, captured, sizes, names))


def writes_in_place(package: Package) -> bool:
    """Return whether the kernels can write new values where the old ones are: the function returns
    nothing else, as the step of an optimizer, and no element is read after it is written.

    Every new value is that of a kernel that reads the old one at the same position or not at all,
    and neither a later kernel nor a PyTorch call reads the old one. With reductions, a kernel
    stores in its last sweep, and results that have one element for each row may have to be written
    elsewhere first (``Sweep``'s ``apart``).
    """
    if not package.captured.written or package.returned.results or package.has_gradient:
        return False
    if package.captured.seed is not None or package.residuals:
        return False
    written = dict(zip(package.program.outputs, package.captured.written, strict=True))
    done: set[str] = set()
    for plan in package.forward:
        stored = {written[one.node]: one for one in plan.stored if one.node in written}
        for one in plan.loads:
            if one.node is None:
                continue
            behind = list(behind_calls(one.node))
            names = {node.name for node in behind if isinstance(node, Input)}
            if names & done or (len(behind) > 1 and names & set(written.values())):
                return False
            for name in names & stored.keys():
                if one.node is not behind[-1] or one.pattern != stored[name].pattern:
                    return False
        if stored and (plan.scans or plan.sums):
            return False
        done |= stored.keys()
    return done == set(written.values())


def captured_both_ways(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool,
    frozen: Collection[str] = (),
    numbers: Sequence[int] | None = None,
    products: bool = False,
) -> tuple[Captured, Captured]:
    """Return what ``capture`` gives in the simple operators of kernels, and in PyTorch's own.

    Raises EjectError, also where a rounding between two steps would be lost.
    """
    definitions = definitions_in_kernels(), definitions_in_formulas()
    captured, formulas = capture(
        function, args, keywords, name, inference, definitions, frozen, numbers, products
    )
    _refuse_lost_rounding(formulas)
    exact = {one: exact_size(other, captured.hints) for one, other in captured.equal.items()}
    return replace(captured, equal=exact), formulas


def _without_gradient(captured: Captured, inference: bool) -> set[str]:
    """Return the floating arguments that require no gradient in the example: buffers of a module,
    and parameters that it has frozen."""
    nodes = captured.traced.graph.find_nodes(op="placeholder")
    pairs = ((argument_name(node), node.meta["example_value"]) for node in nodes)
    return {
        name
        for name, value in pairs
        if not inference
        and isinstance(value, Tensor)
        and value.is_floating_point()
        and not value.requires_grad
    }


def _refuse_lost_rounding(captured: Captured) -> None:
    """Raise EjectError where the function rounds to fewer bits than its arguments have."""
    rounding = coarsest_rounding(captured.traced)
    if rounding is None:
        return
    dtype, line = rounding
    for argument in captured.arguments:
        own = argument.tensor.dtype
        if own.is_floating_point and torch.finfo(own).eps < torch.finfo(dtype).eps:
            raise EjectError(
                f"{captured.name} rounds to {dtype_name(dtype)} between two steps ({line}), which "
                "a kernel of both would not; eject the parts before and after it."
            )


def _least(size: sympy.Expr) -> dict[sympy.Symbol, int] | None:
    """Return how large each symbol has to be for a size not to be negative, its divisions taken as
    exact; None if that cannot be said for each symbol by itself."""
    exact = sympy.expand(without_floors(size))
    constant, rest = exact.as_coeff_Add()
    terms = rest.as_coefficients_dict() if rest != 0 else {}
    if all(count >= 0 for count in terms.values()) and constant >= 0:
        return {}
    symbols = sorted(exact.free_symbols, key=str)
    if len(terms) == 1 and 0 < -constant <= next(iter(terms.values())):
        return dict.fromkeys(symbols, 1)  # a product of sizes is 1 or more where each of them is
    if len(symbols) != 1 or exact.diff(symbols[0]).free_symbols:
        return None
    slope = exact.diff(symbols[0])
    return {symbols[0]: math.ceil(-constant / slope)} if slope > 0 else None


def _upstream_names(captured: Captured, outputs: Sequence[str]) -> tuple[str | None, ...]:
    if len(outputs) == 1:
        return ("grad_output",)
    needs = zip(outputs, captured.needs_gradient, strict=True)
    return tuple(f"grad_{name}" if need else None for name, need in needs)


def each_of_its_own(program: Program, outputs: Sequence[str], captured: Captured) -> Program:
    """Return the program with a copy in place of each output and gradient that is an input, or one
    that came before: a kernel stores every result in memory of its own. A gradient that is an
    upstream one is stored by no kernel: the launcher gives it in the argument's dtype."""

    def own(results: Sequence[Node | None], names: Sequence[str]) -> tuple[Any, ...]:
        seen: list[Node] = []
        found: list[Node | None] = []
        for node, name in zip(results, names, strict=True):
            if node in program.upstream:
                common = name, node.sizes, node.kind, "", False
                found.append(Call(*common, operator=SAME, operands=(node,)))
                continue
            is_held = isinstance(node, Input) or (isinstance(node, Call) and names is outputs)
            if node is not None and (node in seen or is_held):
                node = Pointwise(name, node.sizes, node.kind, "", False, "same", (node,))
            if node is not None:
                seen.append(node)
            found.append(node)
        return tuple(found)

    gradients = [f"grad_{argument.name}" for argument in captured.arguments]
    return replace(
        program,
        outputs=own(program.outputs, outputs),
        gradients=own(program.gradients, gradients),
    )


def _copies_behind(results: Sequence[Node]) -> list[Node]:
    """Return results in an order in which those that are copies of others follow these, so that the
    kernel that computes the one stores the other, too."""
    copies: dict[Node, list[Node]] = {}
    for node in results:
        if isinstance(node, Pointwise) and node.function == "same":
            for source in operands_of(node):
                copies.setdefault(source, []).append(node)
    behind = {copy for source in results for copy in copies.get(source, ())}
    found: list[Node] = []
    for node in results:
        if node not in behind:
            found += [node, *copies.get(node, ())]
    return found


def _ordered(results: Sequence[Node], hints: Mapping[sympy.Symbol, int]) -> list[Kernel]:
    """Return the kernels for ``results`` in the order in which they run."""
    kernels = scheduled(results, hints)
    return in_running_order(with_values_read_apart(results, kernels, hints, WORTH_ON_A_GPU))


def _plans(
    name: str,
    kernels: Sequence[SummingKernel],
    results: Sequence[Node],
    captured: Captured,
    sizes: Sizes,
    names: dict[Node, str],
) -> tuple[KernelPlan, ...]:
    """Return the kernels, which compute ``results``, with their names, and add the names of what
    they store to ``names``."""
    read = [load.tensor for one in kernels for load in one.kernel.loads()]
    loaded = [one for node in (*read, *results) for one in behind_calls(node)]
    needed = {leaf for node in (*results, *loaded) for leaf in leaves(node)}
    names.update(names_between(needed, [*results, *loaded], names, captured, sizes))
    plans: list[KernelPlan] = []
    for place, one in enumerate(kernels):
        stores = [member.node for member in one.kernel.members if member.node in needed]
        label = f"{name}_{names[stores[0]]}" if place else name
        plans.append(planned(label, one.kernel, stores, sizes, names, one.sums))
    return tuple(plans)


def names_between(
    needed: Collection[Node],
    stored: Sequence[Node],
    names: Mapping[Node, str],
    captured: Captured,
    sizes: Sizes,
) -> dict[Node, str]:
    """Return names for what kernels store for others, and for parts of tensors: each once, because
    launchers hold them side by side."""
    taken = [argument.name for argument in captured.arguments]
    namer = Namer([*taken, *sizes.names.values(), *names.values()])
    found: dict[Node, str] = {}
    for node in dict.fromkeys(stored):
        if isinstance(node, Pieces):
            whole = names.get(node) or namer.name(node.name)
            found[node] = whole
            for place, leaf in enumerate(leaves(node)):
                found[leaf] = names.get(leaf) or namer.name(f"{whole}_{place}")
        elif node in needed and node not in names and not isinstance(node, Input):
            found[node] = namer.name(node.name)
    return found


def in_running_order(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels such that each comes after those whose results it reads."""
    makers = {member.node: kernel for kernel in kernels for member in kernel.members}
    order: list[Kernel] = []

    def visit(kernel: Kernel) -> None:
        if kernel in order:
            return
        for load in kernel.loads():
            for one in behind_calls(load.tensor):
                for leaf in leaves(one):
                    maker = makers.get(leaf)
                    if maker is not None and maker is not kernel:
                        visit(maker)
        order.append(kernel)

    for kernel in kernels:
        visit(kernel)
    return order
