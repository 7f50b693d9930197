"""A traced forward as an expression in which every spelling of an operation has one name.

``x + y``, ``torch.add(x, y)`` and ``x.add(y)`` become ``add``; ``nn.ReLU()(x)``, ``F.relu(x)`` and
``x.relu_()`` become ``relu``; ``nn.Linear``, ``F.linear`` and ``x @ weight.T`` become ``linear``
without bias, then ``add``, so that a chain that begins at the bias can be found. Both the user's
model and the patterns of ``FusedOp.rewrites`` are converted here, so they have the same form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

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
    "mod": "remainder",
    "bmm": "matmul",
    "mm": "matmul",
    "concat": "cat",
    "concatenate": "cat",
}

# Order of the parameters, because spellings pass them by position or by name.
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
    "embedding": (
        "input",
        "weight",
        "padding_idx",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "sparse",
    ),
    "embedding_bag": ("input", "weight", "offsets"),
    "cat": ("tensors", "dim"),
    "stack": ("tensors", "dim"),
    "flatten": ("input", "start_dim", "end_dim"),
    "unsqueeze": ("input", "dim"),
    "tril_indices": ("row", "col", "offset"),
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
    ("embedding", "padding_idx"): None,
    ("embedding", "max_norm"): None,
    ("embedding", "norm_type"): 2.0,
    ("embedding", "scale_grad_by_freq"): False,
    ("embedding", "sparse"): False,
    ("embedding_bag", "offsets"): None,
    ("embedding_bag", "max_norm"): None,
    ("embedding_bag", "norm_type"): 2,
    ("embedding_bag", "scale_grad_by_freq"): False,
    ("embedding_bag", "sparse"): False,
    ("embedding_bag", "per_sample_weights"): None,
    ("embedding_bag", "include_last_offset"): False,
    ("embedding_bag", "padding_idx"): None,
    ("flatten", "end_dim"): -1,
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
    nn.Flatten: lambda module: (
        "flatten",
        {"start_dim": module.start_dim, "end_dim": module.end_dim},
    ),
}

# Options of an embedding beside its weight; with any of them it is more than a look-up.
_EMBEDDING_OPTIONS = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")


@dataclass(eq=False)
class Value:
    """One value of the expression; compared by identity."""

    users: list[Value | fx.Node] = field(default_factory=list, init=False)


@dataclass(eq=False)
class Opaque(Value):
    """A value that is not analysed further: an input, or an operation without a canonical form."""

    node: fx.Node


@dataclass(eq=False)
class Attribute(Value):
    """A parameter or buffer reached by its dotted path from the traced module."""

    path: str


@dataclass(eq=False)
class Apply(Value):
    """A canonical operation. ``origin`` is the traced node it came from; others may share it."""

    name: str
    arguments: dict[str, Any]
    origin: fx.Node
    in_place: bool = False

    @property
    def operands(self) -> list[Value]:
        """The values among the arguments, also those in lists."""
        return values_in(self.arguments.values())


class Expression:
    """The expression of one traced graph.

    ``root`` is the module traced, None for a plain function; a child named in ``keep`` stays a
    call. ``kept`` gives the reason for each child that stays a call although it has, or nearly has,
    a canonical form.
    """

    def __init__(
        self, graph: fx.Graph, root: nn.Module | None = None, keep: Collection[str] = ()
    ) -> None:
        self.graph = graph
        self.values: dict[fx.Node, Value] = {}
        self.kept: dict[str, str] = {}
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
        """Yield every canonical operation, operands before their users."""
        seen: set[int] = set()

        def visit(value: Value) -> Iterator[Apply]:
            if id(value) in seen or not isinstance(value, Apply):
                return
            seen.add(id(value))
            for operand in value.operands:
                yield from visit(operand)
            yield value

        for node in self.graph.nodes:
            if node in self.values:
                yield from visit(self.values[node])

    def _value(self, node: fx.Node) -> Value:
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        if node.op in ("call_function", "call_method") and not is_fused(node):
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
        table = type(module) in (nn.Embedding, nn.EmbeddingBag)
        if not (linear or table or type(module) in _MODULES) or "forward" in vars(module):
            return None
        if path in self._keep:
            self.kept[path] = "it has hooks"
            return None
        if len(node.args) != 1 or node.kwargs:
            if type(module) is nn.EmbeddingBag:
                self.kept[path] = "offsets or weights are data: a bag may hold more than one id"
            return None
        if table:
            return self._table(path, module, node)
        if not linear:
            name, arguments = _MODULES[type(module)](module)
            return self._apply(name, node, node.args, arguments)
        product = self._make("linear", node, [node.args[0], self._attribute(f"{path}.weight")], {})
        if module.bias is None:
            return product
        return self._make("add", node, [product, self._attribute(f"{path}.bias")], {})

    def _table(self, path: str, module: nn.Module, node: fx.Node) -> Value | None:
        """Return the look-up of an embedding or of a bag of ids; patterns match bags of one id
        only."""
        for option in _EMBEDDING_OPTIONS:
            value = getattr(module, option)
            if value is not None and value is not False:
                self.kept[path] = f"it has {option}={value}, which a fused look-up does not know"
                return None
        name = "embedding" if type(module) is nn.Embedding else "embedding_bag"
        if name == "embedding_bag" and getattr(module, "include_last_offset", False):
            return None
        return self._make(name, node, [node.args[0], self._attribute(f"{path}.weight")], {})

    def _apply(
        self, name: str, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Value | None:
        name = _SAME_NAME.get(name, name)
        kwargs = dict(kwargs)
        in_place = bool(kwargs.pop("inplace", False)) or name.endswith("_")
        name = name.rstrip("_")
        if any(_hides_node(value) for value in (*args, *kwargs.values())):
            return None
        if name == "getitem":
            name, args = _unsqueezed(args)
        elif (name == "transpose" and tuple(args[1:]) in _LAST_TWO_OF_3) or (
            name == "getattr" and args[1] == "mT"
        ):
            name, args = "mT", args[:1]
        elif name == "embedding_bag":
            # patterns match bags of one id, where every mode returns the row
            kwargs.pop("mode", None)
        elif name == "matmul" and len(args) == 2:
            weight = self._transposed(self.values.get(args[1]))
            if weight is not None:
                name, args = "linear", (args[0], weight)
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
        named.pop("_stacklevel", None)  # of F.softmax: the stack level of its warning
        resolved: dict[str, Any] = {}
        for key, value in named.items():
            if isinstance(value, fx.Node):
                resolved[key] = self.values[value]
            elif isinstance(value, (list, tuple)):
                resolved[key] = self._resolve(value)
            elif isinstance(value, Value) or value != _DEFAULTS.get((name, key), ...):
                resolved[key] = value
        applied = Apply(name, resolved, node, in_place)
        for value in applied.operands:
            value.users.append(applied)
        return applied

    def _resolve(self, value: Any) -> Any:
        """Convert nested lists and tuples to tuples, with values for nodes."""
        if isinstance(value, (list, tuple)):
            return tuple(self._resolve(item) for item in value)
        return self.values[value] if isinstance(value, fx.Node) else value

    def _transposed(self, value: Value | None) -> Value | None:
        """Return the matrix of which ``value`` is certainly the transpose, or None."""
        if not isinstance(value, Apply):
            return None
        given: list[Any] = list(value.arguments.values())
        matrix: Value | None = given[0]
        if value.name == "t":
            return matrix
        has_two_dims = isinstance(matrix, Attribute) and self._rank(matrix) == 2
        is_transpose = (value.name, *given[1:]) in _MATRIX_TRANSPOSES
        return matrix if has_two_dims and is_transpose else None

    def _rank(self, attribute: Attribute) -> int | None:
        value: Any = self._root
        for name in attribute.path.split("."):
            value = getattr(value, name, None)
        return value.dim() if isinstance(value, Tensor) else None

    def _attribute(self, path: str) -> Attribute:
        return self._attributes.setdefault(path, Attribute(path))


# Spellings of a swap of the last two dimensions of a tensor of three, as bmm needs it.
_LAST_TWO_OF_3 = ((1, 2), (2, 1), (-1, -2), (-2, -1))
# Tuples, not sets: an argument may be a slice, which has no hash.
_MATRIX_TRANSPOSES = (("getattr", "T"), ("mT",), ("transpose", 0, 1), ("transpose", 1, 0))


def values_in(items: Iterable[Any]) -> list[Value]:
    """Return the values among ``items``, also those in tuples."""
    found: list[Value] = []
    for item in items:
        if isinstance(item, Value):
            found.append(item)
        elif isinstance(item, tuple):
            found += values_in(item)
    return found


def is_fused(node: fx.Node) -> bool:
    """Return whether a node is the call of an operator that ``fuse`` has put in."""
    return getattr(node.target, "is_fused_operator", False) is True


def _unsqueezed(args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return ``x[:, None]`` as ``x.unsqueeze(1)``, and any other index unchanged."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    places = [place for place, item in enumerate(index) if item is None]
    rest = [item for item in index if item is not None]
    if len(places) == 1 and all(item == slice(None) for item in rest):
        return "unsqueeze", (args[0], places[0])
    return "getitem", args


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling ``module`` runs a hook that a replacement would leave out."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _function_name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _hides_node(value: Any) -> bool:
    """Return whether a dict or a slice contains a node; such operations stay opaque."""
    if isinstance(value, (list, tuple)):
        return any(_hides_node(item) for item in value)
    if isinstance(value, slice):
        return any(isinstance(item, fx.Node) for item in (value.start, value.stop, value.step))
    return isinstance(value, dict) and any(
        isinstance(item, fx.Node) or _hides_node((item,)) for item in value.values()
    )


def of_pattern(
    pattern: Callable[..., Any], lists: Collection[str] = (), length: int = 0
) -> Expression:
    """Build the expression of a rewrite's pattern, a plain function of tensors and values.

    Every parameter in ``lists`` is a list of ``length`` inputs, called ``name_0`` and so on.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def input(name: str) -> fx.Proxy:
        return fx.Proxy(graph.placeholder(name), tracer)

    given = [
        [input(element) for element in elements_of(name, length)] if name in lists else input(name)
        for name in parameters_of(pattern)
    ]
    result = pattern(*given)
    graph.output(result.node if isinstance(result, fx.Proxy) else result)
    return Expression(graph)


def elements_of(name: str, length: int) -> list[str]:
    """Return the names of the elements of a pattern's list."""
    return [f"{name}_{place}" for place in range(length)]


def parameters_of(pattern: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameter names of a pattern, in order."""
    return tuple(inspect.signature(pattern).parameters)
