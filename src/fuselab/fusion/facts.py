"""Facts of a call's tensors, such as sizes and dtypes, by which a forward may decide.

A trace follows the decisions of the recorded call. Each is a condition of the trace, which another
call has to meet.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree


class NotTraceableError(Exception):
    """The forward cannot be reproduced by a trace; the message completes a line "left alone:
    ..."."""


class Decisions:
    """The condition that facts of a call's tensors have the values that the forward read.

    ``graph`` computes the facts of the call's tensors, ``ways`` how each was read: ``bool`` for a
    branch, ``len``, ``operator.index``.
    """

    def __init__(
        self, graph: fx.Graph, ways: Sequence[Callable[[Any], Any]], values: Sequence[Any]
    ) -> None:
        self.ways, self.values = tuple(ways), tuple(values)
        code = graph.python_code(root_module="self")
        namespace = dict(code.globals)
        exec(compile(code.src, "<facts of a call>", "exec"), namespace)
        self.facts: Callable[..., Sequence[Any]] = namespace["forward"]

    def holds(self, module: nn.Module, tensors: Sequence[Tensor]) -> bool:
        """Return whether they have the same values for another call's tensors."""
        try:
            facts = self.facts(module, *tensors)
        except (IndexError, TypeError, ValueError, ZeroDivisionError):  # of another rank
            return False
        return all(
            way(found) == value
            for way, found, value in zip(self.ways, facts, self.values, strict=True)
        )


@dataclass(frozen=True)
class SameRanks:
    """The condition that a call's tensors have the given numbers of dimensions."""

    ranks: tuple[int, ...]

    def holds(self, module: nn.Module, tensors: Sequence[Tensor]) -> bool:
        return tuple(tensor.dim() for tensor in tensors) == self.ranks


@dataclass(frozen=True)
class SameInputs:
    """The condition that a call's tensors have the sizes, strides, dtypes and devices of the
    recorded call, so that intermediate results have theirs too.

    ``children`` are the paths of the modules that computed such a result, with ``_outline_of``
    each.
    """

    tensors: tuple[Any, ...]
    autocast: tuple[bool, ...]
    children: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls, module: nn.Module, tensors: Sequence[Tensor], children: Sequence[str]
    ) -> SameInputs:
        """Return the condition that the given call of the module meets."""
        outlines = tuple((path, _outline_of(module.get_submodule(path))) for path in children)
        return cls(tuple(map(_likeness, tensors)), _autocast(tensors), outlines)

    def holds(self, module: nn.Module, tensors: Sequence[Tensor]) -> bool:
        return (
            tuple(map(_likeness, tensors)) == self.tensors
            and _autocast(tensors) == self.autocast
            and all(_outline_of(module.get_submodule(path)) == one for path, one in self.children)
        )


@dataclass(frozen=True)
class SameGradMode:
    """The condition that gradients are recorded, or are not, as in the recorded call."""

    enabled: bool

    def holds(self, module: nn.Module, tensors: Sequence[Tensor]) -> bool:
        return torch.is_grad_enabled() is self.enabled


AnyCondition = Decisions | SameRanks | SameInputs | SameGradMode


def _likeness(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _autocast(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    devices = dict.fromkeys(tensor.device.type for tensor in tensors)
    return tuple(map(torch.is_autocast_enabled, devices))


def _outline_of(module: nn.Module) -> Any:
    """Return the training mode and the sizes of a module's own parameters."""
    held = module._parameters.values()
    return module.training, tuple(None if one is None else one.shape for one in held)


_SOURCES = ("placeholder", "get_attr")
# What a tensor is, whatever its values are.
_FACTS = frozenset(
    {"dtype", "device", "type", "index", "ndim", "shape", "layout", "requires_grad"}
    | {"is_cuda", "is_cpu", "is_nested", "is_sparse", "is_quantized"}
)
_FACT_METHODS = frozenset({"dim", "ndimension", "size", "numel", "is_floating_point", "is_complex"})
_OF_TENSORS = frozenset({torch.is_floating_point, torch.is_complex})
_FACT_FUNCTIONS = frozenset(
    {operator.getitem, operator.not_, operator.and_, operator.or_, operator.neg, operator.pow}
    | {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}
    | {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod}
    | {operator.truediv, math.sqrt, math.log, math.log2, math.ceil, math.floor, math.prod}
)


def is_fact(value: Any, *, of_results: bool = False) -> bool:
    """Return whether a node follows from dtypes, shapes and devices of arguments and attributes, or
    ``of_results`` of other calls too, and not from values."""
    if not isinstance(value, fx.Node) or value.kwargs:
        return False

    def is_tensor(owner: Any) -> bool:
        return isinstance(owner, fx.Node) and (of_results or owner.op in _SOURCES)

    def is_known(item: Any) -> bool:
        if isinstance(item, slice):
            item = (item.start, item.stop, item.step)
        if isinstance(item, (tuple, list)):
            return all(map(is_known, item))
        return not isinstance(item, fx.Node) or is_fact(item, of_results=of_results)

    if value.op == "call_method":
        tensor, *rest = value.args
        return value.target in _FACT_METHODS and is_tensor(tensor) and all(map(is_known, rest))
    if value.op != "call_function":
        return False
    if value.target is getattr:
        owner, name = value.args
        # Results of a trace require no gradient.
        known = name in _FACTS and (name != "requires_grad" or not of_results)
        return known and (is_tensor(owner) or is_fact(owner, of_results=of_results))
    if value.target in _OF_TENSORS:
        return is_tensor(value.args[0])
    return value.target in _FACT_FUNCTIONS and all(map(is_known, value.args))


def fact(value: Any, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
    """Evaluate a fact of arguments and attributes, or one of its operands.

    Raises NotTraceableError for anything else.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(fact(item, module, tensors) for item in value)
    if isinstance(value, slice):
        return slice(*fact((value.start, value.stop, value.step), module, tensors))
    if not isinstance(value, fx.Node):
        return value
    if value.op == "placeholder":
        places = [node for node in value.graph.nodes if node.op == "placeholder"]
        return tensors[places.index(value)]
    if value.op == "get_attr":
        *owners, name = str(value.target).split(".")
        for owner in owners:  # getattr would record while a trace is under way
            module = module._modules[owner]  # type: ignore[assignment]
        held = {**module._buffers, **module._parameters}
        return held[name] if name in held else vars(module)[name]
    if not is_fact(value):
        raise NotTraceableError("it branches on data")
    given = [fact(item, module, tensors) for item in value.args]
    if value.op == "call_method":
        return getattr(given[0], str(value.target))(*given[1:])
    return value.target(*given)  # type: ignore[operator]


class Results:
    """The values of a graph's nodes in one call, with tensors that have no data.

    ``module`` is run; it must be a copy that nothing else uses.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        self.module = module
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.tensors = iter([self.mode.from_tensor(tensor) for tensor in tensors])
        self.values: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> Any:
        """Return the value of a node of a graph that may still grow.

        Raises NotTraceableError if it, or the size of a tensor before it, follows from data.
        """
        with self.mode, torch.no_grad():
            for one in node.graph.nodes:
                if one not in self.values:
                    try:
                        self.values[one] = self._run(one)
                    except Exception as error:  # operators without an implementation for shapes
                        raise NotTraceableError(
                            f"it decides by a result whose size is not known: "
                            f"{type(error).__name__} in {one.target}"
                        ) from error
                if one is node:
                    break
        return self.values[node]

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.op == "placeholder":
            return next(self.tensors)
        if node.op == "get_attr":
            value: Any = self.module
            for name in str(node.target).split("."):
                value = getattr(value, name)
            return value
        if node.op == "call_module":
            return self.module.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def children_before(node: fx.Node) -> list[str]:
    """Return the paths of the modules from whose results a node follows."""
    seen: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen[one] = None
            waiting += one.all_input_nodes
    return list(dict.fromkeys(str(one.target) for one in seen if one.op == "call_module"))


class ReadableProxy(fx.Proxy):
    """A traced value that Python code may read where a fact of the call decides it: ``len(x)``,
    ``range(x.size(0))``, ``for row in x``. Its tracer is a ``Reader``."""

    tracer: Any

    def __getattr__(self, name: str) -> ReadableAttribute:
        return ReadableAttribute(self, name)

    def __len__(self) -> int:
        return int(self.tracer.read(self, len))

    def __index__(self) -> int:
        return int(self.tracer.read(self, operator.index))

    def __int__(self) -> int:
        return int(self.tracer.read(self, int))

    def __float__(self) -> float:
        return float(self.tracer.read(self, float))

    def __round__(self, digits: int | None = None) -> Any:
        value = self.tracer.read(self, float)
        return round(value, digits)

    def __setitem__(self, place: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, place, value), {})


class ReadableAttribute(fx.proxy.Attribute, ReadableProxy):
    """An attribute of a traced value, which may be a method of it."""


def as_it_is(value: Any) -> Any:
    """Return the value: the way of reading a dtype."""
    return value


def items_of(proxy: fx.Proxy, count: int) -> Iterator[Any]:
    """Yield the first ``count`` items of a traced tuple or tensor."""
    return (proxy[place] for place in range(count))  # type: ignore[index]


def holds_data(value: Any) -> bool:
    """Return whether a value is a tensor, or contains one."""
    return any(isinstance(leaf, (Tensor, FakeTensor)) for leaf in pytree.tree_leaves(value))
