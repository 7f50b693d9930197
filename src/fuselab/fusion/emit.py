"""From matches back to graphs: a chain before and after, and a module's rewritten forward."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fuselab.errors import ArgumentError, DtypeError
from fuselab.fusion.expression import Apply, Attribute, Opaque, Value, has_hooks
from fuselab.fusion.match import Match
from fuselab.fusion.trace import Traced, is_compiled
from fuselab.runtime.dispatch import operator

Emit = Callable[[Any], Any]


def guarded(match: Match) -> Callable[..., Tensor]:
    """The operator's public function; what it refuses (other shapes, later) the reference takes."""
    public = operator(match.op)
    reference = match.op.reference

    def call(*args: Any, **kwargs: Any) -> Tensor:
        try:
            return public(*args, **kwargs)
        except (ArgumentError, DtypeError):
            return reference(*args, **kwargs)

    call.__name__ = match.op.short_name
    call.__qualname__ = match.op.short_name
    call.__module__ = "fuselab.ops"
    return call


def _argument(
    graph: fx.Graph, value: Any, known: Mapping[fx.Node, fx.Node], rows: dict[Any, Any]
) -> Any:
    """Put what ``value`` stands for into ``graph`` and return its node or constant."""
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
            raise AssertionError(f"'{value.name}' is neither traced whole nor a product")
    rows[value] = result
    return result


def emit_call(
    graph: fx.Graph,
    match: Match,
    known: Mapping[fx.Node, fx.Node],
    function: Callable[..., Tensor],
) -> fx.Node:
    """The operator's call, with the chain's inputs as its arguments."""
    inputs = match.rewrite.call(**match.bindings)
    rows: dict[Any, Any] = {}
    for value in match.covered:
        # Under autocast a Linear casts its bias with the rest; one taken out of it is cast here.
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
    args = tuple(_argument(graph, value, known, rows) for value in inputs.args)
    kwargs = {key: _argument(graph, value, known, rows) for key, value in inputs.kwargs.items()}
    return graph.call_function(function, args, kwargs)


def _in_dtype_of(bias: Tensor, product: Tensor) -> Tensor:
    return bias if bias.dtype == product.dtype else bias.to(product.dtype)


class Region:
    """One match on its own: the traced nodes it replaces, and the call in their place.

    ``before`` and ``after`` are modules over the same parameters that take the region's inputs.
    """

    def __init__(self, traced: Traced, match: Match) -> None:
        self.traced, self.match = traced, match
        origins = set(match.origins)
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

    def _module(
        self, emit: Callable[[fx.Graph, dict[fx.Node, fx.Node]], fx.Node]
    ) -> fx.GraphModule:
        graph = fx.Graph()
        known = {
            node: graph.placeholder(f"input_{index}") for index, node in enumerate(self.inputs)
        }
        graph.output(emit(graph, known))
        return fx.GraphModule(self.traced.module, graph)

    def _emit_before(self, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> fx.Node:
        for node in self.inner:
            for used in node.all_input_nodes:
                if used.op == "get_attr" and used not in known:
                    known[used] = graph.node_copy(used)
            known[node] = graph.node_copy(node, lambda used: known[used])
        return known[self.match.root.origin]

    def _emit_after(self, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> fx.Node:
        return emit_call(graph, self.match, known, guarded(self.match))


def rewritten(traced: Traced, matches: Sequence[Match]) -> fx.Graph:
    """The module's graph with every match replaced by its operator's call."""
    by_root = {match.root.origin: match for match in matches}
    replaced = {node for match in matches for node in match.origins}
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node in by_root:
            known[node] = emit_call(graph, by_root[node], known, guarded(by_root[node]))
        elif node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], lambda used: known[used]))
        elif node not in replaced:
            known[node] = graph.node_copy(node, lambda used: known[used])
    return graph


def install(module: nn.Module, traced: Traced, matches: Sequence[Match]) -> None:
    """Give ``module`` the traced forward with every match replaced.

    The class of this one instance becomes a subclass that runs the graph where the call looks like
    the one it was traced from (tensors in the same places, equal values elsewhere) and so does the
    module (same training mode and plain attributes, same children, no hook on a child that the
    graph does not call), and the class's own forward elsewhere. Pickles as the original class.
    """
    graph, call = rewritten(traced, matches), traced.call
    original = type(module)
    code = graph.python_code(root_module="self")
    name = f"<fused forward of {original.__qualname__} {id(module):x}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    namespace = dict(code.globals)
    exec(compile(code.src, name, "exec"), namespace)
    fused = namespace["forward"]
    leaves, structure = call.leaves()
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    only_tensors = not call.kwargs and all(isinstance(value, Tensor) for value in call.args)
    count = len(leaves)
    settings = _settings(module)
    replaced = {node for match in matches for node in match.origins}
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    bypassed = {node.target for node in calls if node in replaced}
    outline = _outline(module, {str(node.target) for node in calls if node.target not in bypassed})

    def as_traced(self: nn.Module) -> bool:
        state = self.__dict__
        return all(state.get(name, _missing) == value for name, value in settings) and _is_outlined(
            self, outline
        )

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if as_traced(self):
            if only_tensors:
                if (
                    not kwargs
                    and len(args) == count
                    and all(isinstance(value, Tensor) for value in args)
                ):
                    return fused(self, *args)
            else:
                given, its_structure = pytree.tree_flatten((args, kwargs))
                if its_structure == structure and all(
                    isinstance(value, Tensor) if tensor else _same(value, leaf)
                    for value, leaf, tensor in zip(given, leaves, is_tensor, strict=True)
                ):
                    return fused(self, *(value for value in given if isinstance(value, Tensor)))
        return original.forward(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _unfused, (original,), self.__dict__

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


_missing = object()


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain attributes a trace has taken as constants, the training mode among them."""
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, NoneType))
        and (name == "training" or not name.startswith("_"))
    )


def _outline(module: nn.Module, called: Collection[str], prefix: str = "") -> dict[str, Any]:
    """The children by name: type and own outline of those that the graph does not call."""
    return {
        name: None
        if child is None or f"{prefix}{name}" in called
        else (type(child), _outline(child, called, f"{prefix}{name}."))
        for name, child in module._modules.items()
    }


def _is_outlined(module: nn.Module, outline: Mapping[str, Any]) -> bool:
    """Whether ``module`` still has these children, and no hook on those that are not called."""
    children = module._modules
    if tuple(children) != tuple(outline):
        return False
    for name, entry in outline.items():
        if entry is not None:
            child = children[name]
            if (
                child is None
                or type(child) is not entry[0]
                or has_hooks(child)
                or not _is_outlined(child, entry[1])
            ):
                return False
    return True


def _unfused(original: type[nn.Module]) -> nn.Module:
    """What a pickle of a fused module begins with: an instance of the class it was made from."""
    return original.__new__(original)


def _same(value: Any, recorded: Any) -> bool:
    return not isinstance(value, Tensor) and type(value) is type(recorded) and value == recorded


def shared_copy(model: nn.Module) -> nn.Module:
    """A module tree of its own over the same parameters, buffers, hooks and plain attributes."""
    copies: dict[int, nn.Module] = {}

    def twin_of(module: nn.Module) -> nn.Module:
        if is_compiled(module):  # its code holds the modules it was compiled from
            return module
        if id(module) not in copies:
            twin = copies[id(module)] = module.__class__.__new__(module.__class__)
            twin.__dict__.update(module.__dict__)
            twin.__dict__["_modules"] = {
                name: None if child is None else twin_of(child)
                for name, child in module._modules.items()
            }
        return copies[id(module)]

    return twin_of(model)
