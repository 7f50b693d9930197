"""From matches back to graphs: a chain before and after, and a module's rewritten forward."""

from __future__ import annotations

import copy
import dataclasses
import linecache
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fuselab.errors import ArgumentError, DtypeError, UnsupportedError
from fuselab.fusion.chains import Chain, ChainFinder
from fuselab.fusion.closures import rebind_attributes
from fuselab.fusion.equal_dropout import seed_of_call
from fuselab.fusion.expression import (
    Apply,
    Attribute,
    Opaque,
    Value,
    parameters_of,
    values_in,
)
from fuselab.fusion.facts import SameRanks
from fuselab.fusion.match import Match
from fuselab.fusion.trace import Traced, is_compiled, shadow
from fuselab.fusion.unchanged import State, is_outlined, outline_of, same_argument
from fuselab.op import FusedOp, Inputs
from fuselab.runtime.dispatch import operator

Emit = Callable[[Any], Any]


def guarded(op: FusedOp, inputs_of: Callable[..., Inputs]) -> Callable[..., Any]:
    """Return a function that calls the operator with what ``inputs_of`` makes of its arguments.

    If the operator refuses the arguments (other shapes, in a later call), the reference runs
    instead.
    """
    public = operator(op)
    reference = op.reference

    def call(*values: Any) -> Any:
        inputs = inputs_of(*values)
        try:
            return public(*inputs.args, **inputs.kwargs)
        except (ArgumentError, DtypeError):
            return reference(*inputs.args, **inputs.kwargs)

    call.__name__ = op.short_name
    call.__qualname__ = op.short_name
    call.__module__ = "fuselab.ops"
    call.is_fused_operator = True  # type: ignore[attr-defined]
    return call


def of_match(match: Match) -> Callable[..., Any]:
    """Return the guarded call of a match's operator with the match's bindings."""
    inputs_of, names = match.rewrite.call, tuple(match.bindings)
    return guarded(match.op, lambda *values: inputs_of(**dict(zip(names, values, strict=True))))


def of_chain(op: FusedOp, chain: Chain) -> Callable[..., Any]:
    """Return the guarded call of an operator that was written for a chain: with a new seed in every
    call, where the chain drops elements."""
    if chain.drops:
        return guarded(op, lambda *values: Inputs((*values, seed_of_call(values[0].device))))
    return guarded(op, lambda *values: Inputs(values))


def _argument(
    graph: fx.Graph, value: Any, known: Mapping[fx.Node, fx.Node], rows: dict[Any, Any]
) -> Any:
    """Put what ``value`` stands for into ``graph`` and return its node or constant."""
    if isinstance(value, tuple):
        return [_argument(graph, item, known, rows) for item in value]
    if not isinstance(value, Value):
        return value
    if value in rows:
        return rows[value]
    if isinstance(value, Attribute):
        result: Any = graph.get_attr(value.path)
    elif isinstance(value, Opaque):
        result = known[value.node]
    else:
        assert isinstance(value, Apply)
        if value.origin in known:
            result = known[value.origin]
        elif value.name == "linear":
            # The product of a Linear whose bias the operator takes.
            result = graph.call_function(
                F.linear,
                tuple(
                    _argument(graph, operand, known, rows) for operand in value.arguments.values()
                ),
            )
        else:
            raise UnsupportedError(
                f"'{value.name}' inside of the chain is neither traced whole nor a product."
            )
    rows[value] = result
    return result


def emit_call(
    graph: fx.Graph,
    match: Match,
    known: Mapping[fx.Node, fx.Node],
    function: Callable[..., Tensor],
) -> fx.Node:
    """Add the operator's call to ``graph``, with the chain's inputs as arguments and the rewrite's
    ``result`` applied; return the resulting node."""
    rows: dict[Any, Any] = {}
    for value in match.covered:
        # Under autocast a Linear casts its bias itself; a bias taken out of it is cast here.
        product = value.arguments.get("input")
        if (
            value.name == "add"
            and isinstance(product, Apply)
            and product.name == "linear"
            and product.origin is value.origin
            and product not in match.covered
        ):
            bias = value.arguments["other"]
            rows[bias] = graph.call_function(
                _in_dtype_of,
                (
                    _argument(graph, bias, known, rows),
                    _argument(graph, product, known, rows),
                ),
            )
    given = {name: _argument(graph, value, known, rows) for name, value in match.bindings.items()}
    called = graph.call_function(function, tuple(given.values()))
    if match.rewrite.result is None:
        return called
    _, *names = parameters_of(match.rewrite.result)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {name: fx.Proxy(given[name], tracer) for name in names}
    result: Any = match.rewrite.result(fx.Proxy(called, tracer), **proxies)
    node: fx.Node = result.node
    return node


def _in_dtype_of(bias: Tensor, product: Tensor) -> Tensor:
    return bias if bias.dtype == product.dtype else bias.to(product.dtype)


class Region:
    """A part of a traced forward on its own: the nodes replaced, and the call in their place.

    ``before`` and ``after`` are modules over the same parameters that take the region's inputs.
    """

    traced: Traced
    inputs: list[fx.Node]
    before: fx.GraphModule
    after: fx.GraphModule

    def _module(self, emit: Callable[[fx.Graph, dict[fx.Node, fx.Node]], Any]) -> fx.GraphModule:
        graph = fx.Graph()
        known = {
            node: graph.placeholder(f"input_{index}") for index, node in enumerate(self.inputs)
        }
        graph.output(emit(graph, known))
        return fx.GraphModule(self.traced.module, graph)


class MatchRegion(Region):
    """One match of an operator's pattern."""

    def __init__(self, traced: Traced, match: Match) -> None:
        self.traced, self.match = traced, match
        origins = set(match.origins)
        given = values_in(match.bindings.values())
        # A product whose bias the operator takes is computed here: of what its operands hold.
        products = [value for value in given if isinstance(value, Apply)]
        given += [operand for one in products if one.origin in origins for operand in one.operands]
        bound = {getattr(value, "origin", None) for value in given}
        origins |= {  # ``x @ weight.T`` includes the transpose
            used
            for node in match.origins
            for used in node.all_input_nodes
            if _swaps_dimensions(used) and used not in bound
        }
        self.inner = [node for node in traced.graph.nodes if node in origins]
        self.inputs = list(
            dict.fromkeys(
                used
                for node in self.inner
                for used in node.all_input_nodes
                if used not in origins and used.op != "get_attr"
            )
        )
        self.before = self._module(self._emit_before)
        self.after = self._module(self._emit_after)

    def _emit_before(self, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> fx.Node:
        for node in self.inner:
            _copied(graph, node, known)
        return known[self.match.root.origin]

    def _emit_after(self, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> fx.Node:
        return emit_call(graph, self.match, known, of_match(self.match))


class ChainRegion(Region):
    """One chain that ``op`` was written for."""

    def __init__(self, traced: Traced, chain: Chain, op: FusedOp) -> None:
        self.traced, self.chain, self.op = traced, chain, op
        self.inputs = [place for place in chain.inputs if isinstance(place, fx.Node)]
        self.before = self._module(self._emit_before)
        self.after = self._module(self._emit_after)
        # Whoever tries the chain must not update the model's own statistics.
        for layer in dict.fromkeys(path.rpartition(".")[0] for path in chain.updated):
            for module in (self.before, self.after):
                module.set_submodule(layer, shadow(module.get_submodule(layer)))

    def _emit_before(self, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> Any:
        return _joined([_copied(graph, node, known) for node in self.chain.outputs])

    def _emit_after(self, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> Any:
        return _joined(emit_chain(graph, self.chain, known, of_chain(self.op, self.chain)))


def _joined(outputs: Sequence[fx.Node]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _copied(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the copy of a node in ``graph``, made after those of all that it is computed from."""
    if node not in known:
        for used in node.all_input_nodes:
            _copied(graph, used, known)
        known[node] = graph.node_copy(node, lambda used: known[used])
    return known[node]


def emit_chain(
    graph: fx.Graph,
    chain: Chain,
    known: Mapping[fx.Node, fx.Node],
    function: Callable[..., Any],
) -> list[fx.Node]:
    """Add the call of a chain's operator to ``graph`` and return a node for each output."""
    arguments = [
        graph.get_attr(place) if isinstance(place, str) else known[place] for place in chain.inputs
    ]
    called = graph.call_function(function, tuple(arguments))
    count = len(chain.outputs)
    if count + len(chain.updated) == 1:
        return [called]
    results = [
        graph.call_function(getitem, (called, place)) for place in range(count + len(chain.updated))
    ]
    if chain.updated:
        buffers, counters = (
            tuple(graph.get_attr(path) for path in paths)
            for paths in (chain.updated, chain.counters)
        )
        graph.call_function(update_statistics, (buffers, tuple(results[count:]), counters))
    return results[:count]


def update_statistics(
    buffers: Sequence[Tensor], values: Sequence[Tensor], counters: Sequence[Tensor]
) -> None:
    """Write the new values of running statistics, and count the batch, as their layer does."""
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        for counter in counters:
            counter.add_(1)


def with_chains(traced: Traced, finder: ChainFinder, kept: Mapping[Chain, FusedOp]) -> Traced:
    """Return the module's trace with every chain in ``kept`` replaced by its operator's call."""
    chain_of = {node: chain for chain in kept for node in chain.nodes}
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    emitted: set[Chain] = set()

    def visit(node: fx.Node) -> None:
        chain = chain_of.get(node)
        if node in known or chain in emitted:
            return
        if chain is None:
            # Calls whose order matters stay in order, whichever a chain asks for first.
            for earlier in (*finder.before.get(node, ()), *node.all_input_nodes):
                visit(earlier)
            known[node] = graph.node_copy(node, lambda used: known[used])
            return
        emitted.add(chain)
        for place in chain.inputs:
            if isinstance(place, fx.Node):
                visit(place)
        outputs = emit_chain(graph, chain, known, of_chain(kept[chain], chain))
        for output, made in zip(chain.outputs, outputs, strict=True):
            made.stack_trace = output.stack_trace
            known[output] = made

    for node in traced.graph.nodes:
        if node.op == "output":
            for used in node.all_input_nodes:
                visit(used)
            graph.output(fx.node.map_arg(node.args[0], lambda used: known[used]))
        elif node not in chain_of and node.op != "get_attr" and not finder.is_number(node):
            visit(node)
    return dataclasses.replace(traced, graph=graph)


def rewritten(traced: Traced, matches: Sequence[Match]) -> Traced:
    """Return the module's trace with every match in its graph replaced by its operator's call."""
    by_root = {match.root.origin: match for match in matches}
    replaced = {node for match in matches for node in match.origins}
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        before = len(graph.nodes)
        if node in by_root:
            known[node] = emit_call(graph, by_root[node], known, of_match(by_root[node]))
            for added in list(graph.nodes)[before:]:
                added.stack_trace = node.stack_trace
        elif node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], lambda used: known[used]))
        elif node not in replaced:
            known[node] = graph.node_copy(node, lambda used: known[used])
    # Erase the transposes of weights that an operator takes untransposed.
    for node in reversed(graph.nodes):
        if not node.users and _swaps_dimensions(node):
            graph.erase_node(node)
    conditions = traced.conditions
    # lists are joined along a dimension counted from 0
    if any(match.rewrite.lists for match in matches):
        conditions += (SameRanks(tuple(tensor.dim() for tensor in traced.tensors)),)
    return dataclasses.replace(traced, graph=graph, conditions=conditions)


def _swaps_dimensions(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("t", "transpose")
    return node.op == "call_function" and (
        node.target in (torch.t, torch.transpose)
        or (node.target is getattr and node.args[1] in ("T", "mT"))
    )


def install(module: nn.Module, traced: Traced, final: Traced) -> None:
    """Give ``module`` the forward ``final`` that ``rewritten`` made from ``traced``.

    The class of this one instance becomes a subclass. It runs the graph if the call looks like the
    traced one (tensors in the same places, equal values elsewhere) and so does the module (same
    training mode and plain attributes, same children, no hook on a child that the graph does not
    call). Otherwise it runs the original class's forward. It pickles as the original class.
    """
    fused_graph, call = final.graph, traced.call
    original = type(module)
    # A forward that was set on the instance would come before that of any class.
    own = module.__dict__.pop("forward", None)
    code = fused_graph.python_code(root_module="self")
    name = f"<fused forward of {original.__qualname__} {id(module):x}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    namespace = dict(code.globals)
    exec(compile(code.src, name, "exec"), namespace)
    fused = namespace["forward"]
    leaves, structure = call.leaves()
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    only_tensors = not call.kwargs and all(isinstance(value, Tensor) for value in call.args)
    count = len(leaves)
    state = State.of_module(module)
    states = [
        None if tensor else State.of(leaf) for leaf, tensor in zip(leaves, is_tensor, strict=True)
    ]
    # A layer that is called in one place and replaced in another is watched too.
    counts = [
        Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
        for graph in (fused_graph, traced.graph)
    ]
    called = {target for target, count in counts[0].items() if count == counts[1][target]}
    outline = outline_of(module, called)
    conditions = tuple(dict.fromkeys(final.conditions))

    def as_traced(self: nn.Module) -> bool:
        return state.holds_in(self.__dict__) and is_outlined(self, outline)

    def as_decided(self: nn.Module, tensors: Sequence[Tensor]) -> bool:
        return all(condition.holds(self, tensors) for condition in conditions)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if as_traced(self):
            if only_tensors:
                if (
                    not kwargs
                    and len(args) == count
                    and all(isinstance(value, Tensor) for value in args)
                    and as_decided(self, args)
                ):
                    return fused(self, *args)
            else:
                given, its_structure = pytree.tree_flatten((args, kwargs))
                if its_structure == structure and all(
                    isinstance(value, Tensor) if tensor else same_argument(value, leaf, state)
                    for value, leaf, tensor, state in zip(
                        given, leaves, is_tensor, states, strict=True
                    )
                ):
                    tensors = [value for value in given if isinstance(value, Tensor)]
                    if as_decided(self, tensors):
                        return fused(self, *tensors)
        return original.forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        held = self.__dict__ if own is None else {**self.__dict__, "forward": own}
        return _unfused, (original,), held

    def duplicate(self: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
        twin = self.__class__.__new__(self.__class__)
        if memo is None:
            twin.__dict__.update(self.__dict__)
        else:
            memo[id(self)] = twin
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    module.__class__ = type(
        original.__name__,
        (original,),
        {
            "forward": forward,
            "__reduce_ex__": reduce,
            "__copy__": duplicate,
            "__deepcopy__": duplicate,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "fused_source": code.src,
        },
    )


def _unfused(original: type[nn.Module]) -> nn.Module:
    """Create the empty instance of the original class with which a fused module unpickles."""
    return original.__new__(original)


def shared_copy(model: nn.Module) -> nn.Module:
    """Return new modules over the same parameters, buffers, hooks and plain attributes."""
    copies: dict[int, nn.Module] = {}

    def twin_of(module: nn.Module) -> nn.Module:
        if is_compiled(module):  # its code refers to the modules it was compiled from
            return module
        if id(module) not in copies:
            twin = copies[id(module)] = module.__class__.__new__(module.__class__)
            twin.__dict__.update(module.__dict__)
            twin.__dict__["_modules"] = {
                name: None if child is None else twin_of(child)
                for name, child in module._modules.items()
            }
        return copies[id(module)]

    made = twin_of(model)
    rebind_attributes(copies)
    return made
