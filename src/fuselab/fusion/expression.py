"""A traced forward as an expression in which every spelling of an operation has one name.

``x + y``, ``torch.add(x, y)`` and ``x.add(y)`` become ``add``; ``nn.ReLU()(x)``, ``F.relu(x)`` and
``x.relu_()`` become ``relu``; ``nn.Linear`` and ``F.linear`` become ``linear`` without bias, then
``add``, so that a chain that begins at the bias can be seen. Both the user's model and the
patterns of ``FusedOp.rewrites`` go through here, so they meet in the same form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne"})

_SAME_NAME = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "iadd": "add_",
    "imul": "mul_",
    "isub": "sub_",
    "itruediv": "div_",
    "special_softmax": "softmax",
}

# Order of the parameters, where spellings pass them by position or by name.
_PARAMETERS = {
    "add": ("input", "other", "alpha"),
    "sub": ("input", "other", "alpha"),
    "softmax": ("input", "dim", "dtype"),
    "log_softmax": ("input", "dim", "dtype"),
    "gelu": ("input", "approximate"),
    "leaky_relu": ("input", "negative_slope"),
    "linear": ("input", "weight", "bias"),
    "sum": ("input", "dim", "keepdim"),
    "mean": ("input", "dim", "keepdim"),
    "amax": ("input", "dim", "keepdim"),
    "max": ("input", "dim", "keepdim"),
    "addcmul": ("input", "tensor1", "tensor2", "value"),
}
_DEFAULTS = {
    ("add", "alpha"): 1,
    ("sub", "alpha"): 1,
    ("softmax", "dtype"): None,
    ("log_softmax", "dtype"): None,
    ("gelu", "approximate"): "none",
    ("leaky_relu", "negative_slope"): 0.01,
    ("sum", "keepdim"): False,
    ("mean", "keepdim"): False,
    ("amax", "keepdim"): False,
    ("max", "keepdim"): False,
    ("addcmul", "value"): 1,
}

# Child modules that are one canonical operation: their name and the arguments beside the input.
_MODULES: Mapping[type[nn.Module], Callable[[Any], tuple[str, dict[str, Any]]]] = {
    nn.Identity: lambda module: ("identity", {}),
    nn.ReLU: lambda module: ("relu_" if module.inplace else "relu", {}),
    nn.LeakyReLU: lambda module: (
        "leaky_relu_" if module.inplace else "leaky_relu",
        {"negative_slope": module.negative_slope},
    ),
    nn.GELU: lambda module: ("gelu", {"approximate": module.approximate}),
    nn.SiLU: lambda module: ("silu_" if module.inplace else "silu", {}),
    nn.Sigmoid: lambda module: ("sigmoid", {}),
    nn.Tanh: lambda module: ("tanh", {}),
    nn.Softmax: lambda module: ("softmax", {"dim": module.dim}),
    nn.LogSoftmax: lambda module: ("log_softmax", {"dim": module.dim}),
}


@dataclass(eq=False)
class Value:
    """One value of the expression; compared by identity."""

    users: list[Value | fx.Node] = field(default_factory=list, init=False)


@dataclass(eq=False)
class Opaque(Value):
    """A value that nothing looks into: an input, or an operation without a canonical form."""

    node: fx.Node


@dataclass(eq=False)
class Attribute(Value):
    """A parameter or buffer reached by its dotted path from the traced module."""

    path: str


@dataclass(eq=False)
class Apply(Value):
    """A canonical operation. ``origin`` is the traced node it came from, perhaps with others."""

    name: str
    arguments: dict[str, Any]
    origin: fx.Node
    in_place: bool = False


class Expression:
    """The expression of one traced graph.

    ``root`` is the module traced, None for a plain function; a child named in ``keep`` stays a
    call. ``kept`` lists those among them that would have had a canonical form.
    """

    def __init__(
        self, graph: fx.Graph, root: nn.Module | None = None, keep: Collection[str] = ()
    ) -> None:
        self.graph = graph
        self.values: dict[fx.Node, Value] = {}
        self.kept: list[str] = []
        self._keep = keep
        self._attributes: dict[str, Attribute] = {}
        self._root = root
        for node in graph.nodes:
            if node.op == "output":
                for used in node.all_input_nodes:
                    self.values[used].users.append(node)
                self.result = node.args[0]
            else:
                self.values[node] = self._value(node)

    def applications(self) -> Iterator[Apply]:
        """Every canonical operation, operands before their users."""
        seen: set[int] = set()

        def visit(value: Value) -> Iterator[Apply]:
            if id(value) in seen or not isinstance(value, Apply):
                return
            seen.add(id(value))
            for argument in value.arguments.values():
                if isinstance(argument, Value):
                    yield from visit(argument)
            yield value

        for node in self.graph.nodes:
            if node in self.values:
                yield from visit(self.values[node])

    def _value(self, node: fx.Node) -> Value:
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        if node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else _function_name(node.target)
            applied = self._apply(name, node, node.args, dict(node.kwargs))
            if applied is not None:
                return applied
        elif node.op == "call_module" and self._root is not None:
            applied = self._module(node)
            if applied is not None:
                return applied
        value = Opaque(node)
        for used in node.all_input_nodes:
            self.values[used].users.append(value)
        return value

    def _module(self, node: fx.Node) -> Value | None:
        assert self._root is not None
        path = str(node.target)
        module = self._root.get_submodule(path)
        linear = type(module) is nn.Linear
        if not (linear or type(module) in _MODULES) or len(node.args) != 1 or node.kwargs:
            return None
        if path in self._keep:
            self.kept.append(path)
            return None
        if not linear:
            name, arguments = _MODULES[type(module)](module)
            if name == "identity":
                return self.values[node.args[0]]  # type: ignore[index]
            return self._apply(name, node, node.args, arguments)
        product = self._make("linear", node, [node.args[0], self._attribute(f"{path}.weight")], {})
        if module.bias is None:
            return product
        return self._make("add", node, [product, self._attribute(f"{path}.bias")], {})

    def _apply(
        self, name: str, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Value | None:
        name = _SAME_NAME.get(name, name)
        kwargs = dict(kwargs)
        in_place = bool(kwargs.pop("inplace", False)) or name.endswith("_")
        name = name.rstrip("_")
        if any(_contains_node(value) for value in (*args, *kwargs.values())):
            return None
        if name == "linear" and (len(args) == 3 or kwargs.get("bias") is not None):
            bias = args[2] if len(args) == 3 else kwargs.pop("bias")
            if bias is not None:
                product = self._make("linear", node, list(args[:2]), kwargs)
                return self._make("add", node, [product, bias], {})
            args = args[:2]
        return self._make(name, node, list(args), kwargs, in_place)

    def _make(
        self,
        name: str,
        node: fx.Node,
        args: list[Any],
        kwargs: dict[str, Any],
        in_place: bool = False,
    ) -> Apply:
        order = _PARAMETERS.get(name, ())
        named = {
            order[place] if place < len(order) else str(place): value
            for place, value in enumerate(args)
        }
        named.update(kwargs)
        named.pop("_stacklevel", None)  # of F.softmax: where its warning points
        resolved: dict[str, Any] = {}
        for key, value in named.items():
            if isinstance(value, fx.Node):
                resolved[key] = self.values[value]
            elif isinstance(value, Value) or value != _DEFAULTS.get((name, key), ...):
                resolved[key] = value
        applied = Apply(name, resolved, node, in_place)
        for value in resolved.values():
            if isinstance(value, Value):
                value.users.append(applied)
        return applied

    def _attribute(self, path: str) -> Attribute:
        return self._attributes.setdefault(path, Attribute(path))


def has_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` runs a hook that a replacement would leave out."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _function_name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _contains_node(value: Any) -> bool:
    """Whether a list, tuple, dict or slice holds a node; such operations stay opaque."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, (list, tuple)):
        return False
    return any(isinstance(item, fx.Node) or _contains_node(item) for item in value)


def of_pattern(pattern: Callable[..., Any]) -> Expression:
    """The expression of a rewrite's pattern, a plain function of tensors and values."""
    graph = fx.Tracer().trace(pattern)
    return Expression(graph)


def parameters_of(pattern: Callable[..., Any]) -> tuple[str, ...]:
    """The parameter names of a pattern, in order."""
    return tuple(inspect.signature(pattern).parameters)
