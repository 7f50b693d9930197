"""Run a model once on example inputs and trace every module's own forward, children as leaves.

The run happens on a shadow of the model: same parameters, copied buffers, no hooks, its own random
state. So the user's hooks are not called and the user's model does not change.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fuselab.ejection.calls import without_kept_inputs
from fuselab.errors import TargetError
from fuselab.fusion.closures import rebind_attributes


@dataclass(frozen=True)
class Call:
    """The arguments with which one module was called."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def leaves(self) -> tuple[list[Any], Any]:
        """Return all arguments flattened, and the structure that restores them."""
        return pytree.tree_flatten((self.args, dict(self.kwargs)))


@dataclass(frozen=True)
class Condition:
    """A fact of the call's tensors that the forward branched on, and its value in the call."""

    node: fx.Node
    value: bool

    def holds(self, module: nn.Module, tensors: Sequence[Tensor]) -> bool:
        """Return whether it has the same value for another call's tensors."""
        return bool(_fact(self.node, module, tensors)) is self.value


@dataclass(frozen=True)
class SameRanks:
    """The condition that a call's tensors have the given numbers of dimensions."""

    ranks: tuple[int, ...]

    def holds(self, module: nn.Module, tensors: Sequence[Tensor]) -> bool:
        return tuple(tensor.dim() for tensor in tensors) == self.ranks


@dataclass(frozen=True)
class Traced:
    """A module whose own forward was traced: its graph takes the call's tensors, in order.

    The graph is the forward of calls for which the ``conditions`` hold.
    """

    path: str
    module: nn.Module
    graph: fx.Graph
    call: Call
    conditions: tuple[Condition | SameRanks, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.call.leaves()[0] if isinstance(leaf, Tensor)]


def shadow(model: nn.Module) -> nn.Module:
    """Return a copy with the same parameters, its own buffers and no hooks, which is safe to run.

    A module whose backward is the optimizer's step is marked by ``steps_in_backward``; its
    parameters are copied too.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for module in model.modules():
        if getattr(module, "steps_in_backward", False):
            for parameter in module.parameters():
                memo.pop(id(parameter), None)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # deepcopy accepts leaves only
                memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise TargetError(
            f"the model cannot be copied, so it cannot be tried: {type(error).__name__}: {error}"
        ) from error
    originals = {id(module) for module in model.modules()}
    rebind_attributes({key: memo[key] for key in originals if key in memo})
    for module in copied.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                value.clear()
    return copied


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module runs code compiled before: torch.compile's or TorchScript's."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or type(module).__module__ == "torch._dynamo.eval_frame"
    )


def modules_to_look_into(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return ``named_modules`` without those inside a compiled module, which itself is listed."""
    found = list(model.named_modules())
    compiled = [f"{path}." if path else "" for path, module in found if is_compiled(module)]
    return [
        (path, module)
        for path, module in found
        if not any(path.startswith(prefix) and f"{path}." != prefix and path for prefix in compiled)
    ]


def record_calls(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Call]:
    """Return the first call of every module while ``model`` runs, by path ("" is the model)."""
    calls: dict[str, Call] = {}

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(path, Call(args, kwargs))

        return hook

    handles = [
        module.register_forward_pre_hook(watch(path), with_kwargs=True)
        for path, module in modules_to_look_into(model)
        if not is_compiled(module)
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(args)):
            model(*args, **kwargs)
    except Exception as error:
        raise TargetError(
            f"the model raised {type(error).__name__} on the example inputs: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _cuda_devices(args: Sequence[Any]) -> list[int]:
    return [
        index
        for index in {
            leaf.device.index for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)
        }
        if index is not None
    ]


def trace_forward(path: str, module: nn.Module, call: Call, hooked: Collection[str] = ()) -> Traced:
    """Trace ``module.forward`` alone; arguments that are no tensors are taken as constants.

    Children stay calls, except an ``nn.Sequential``, because a chain may begin or end inside one.
    Those named in ``hooked`` stay calls too.

    Raises whatever ``torch.fx`` raises for a forward that cannot be traced (control flow on data),
    and NotTraceableError for one that a trace would not reproduce.
    """
    own = vars(module).get("forward")
    if own is not None and not isinstance(own, FunctionType):
        raise NotTraceableError("its forward was replaced on the instance, by no plain function")
    leaves, structure = call.leaves()
    names = [f"tensor_{index}" for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    original = type(module).forward if own is None else _without_self(own)

    def forward(self: nn.Module, *tensors: Any) -> Any:
        waiting = iter(tensors)
        filled = [next(waiting) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return original(self, *args, **kwargs)

    def traced(all_factories: bool) -> tuple[_ChildrenAreLeaves, fx.Graph]:
        return _trace_once(module, call, hooked, names, forward, all_factories)

    try:
        tracer, graph = traced(all_factories=False)
    except _FrozenTensorError:
        tracer, graph = traced(all_factories=True)
    conditions = tracer.conditions(graph)
    _erase_identities(graph, module, hooked)
    _check_reproduces(module, graph, call)
    return Traced(path, module, graph, call, conditions)


def _trace_once(
    module: nn.Module,
    call: Call,
    hooked: Collection[str],
    names: Sequence[str],
    forward: Callable[..., Any],
    all_factories: bool,
) -> tuple[_ChildrenAreLeaves, fx.Graph]:
    """Trace ``forward``, of the module and as many tensors as there are names, over a copy of the
    module. Raises NotTraceableError where it changes what it must not."""
    # torch.fx reads the parameters off the signature, and treats *tensors as a single one.
    namespace: dict[str, Any] = {"inner": forward}
    listed = ", ".join(["self", *names])
    exec(f"def forward({listed}):\n    return inner({listed})", namespace)
    stand_in = copy.copy(module)
    stand_in.__dict__.pop("forward", None)
    stand_in.__class__ = type(
        type(module).__name__, (type(module),), {"forward": namespace["forward"]}
    )
    before = dict(vars(stand_in))
    contents = {name: _contents(value) for name, value in before.items()}
    tracer = _ChildrenAreLeaves(stand_in, call, hooked)
    with _recording_factories(tracer, all_factories):
        graph = tracer.trace(stand_in)
    changed = [
        name for name, value in vars(stand_in).items() if before.get(name, stand_in) is not value
    ]
    changed += [
        name
        for name, held in contents.items()
        if name not in changed and held != _contents(vars(stand_in)[name])
    ]
    if any(name.startswith("_tensor_constant") for name in changed):
        raise _FrozenTensorError("its forward builds a tensor, which a trace would freeze")
    if changed:
        what = "a buffer" if changed[0] == "_buffers" else f"self.{changed[0]}"
        raise NotTraceableError(f"its forward changes {what}, which a trace leaves out")
    return tracer, graph


def _erase_identities(graph: fx.Graph, module: nn.Module, hooked: Collection[str]) -> None:
    """Remove the calls of every ``nn.Identity`` without hooks, and of dropout functions outside of
    training, so that the reader reads the input."""
    without_kept_inputs(graph)
    for node in list(graph.nodes):
        if node.op == "call_module" and str(node.target) not in hooked and len(node.args) == 1:
            child = module.get_submodule(str(node.target))
            if type(child) is nn.Identity and "forward" not in vars(child):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(*args, **kwargs)


def _contents(value: Any) -> Any:
    """Return the identities of a container's items, to detect changes; None for anything else."""
    if isinstance(value, dict):
        return [(id(key), id(held)) for key, held in value.items()]
    return [id(held) for held in value] if isinstance(value, (list, set, deque)) else None


def _check_reproduces(module: nn.Module, graph: fx.Graph, call: Call) -> None:
    """Run the forward and its trace, and raise NotTraceableError if they differ.

    A trace loses ``x += y`` and aliases, for example.
    """

    def run(forward: Any, *, whole_call: bool) -> tuple[list[Any], Any]:
        copied = pytree.tree_map_only(Tensor, Tensor.clone, (call.args, dict(call.kwargs)))
        leaves = pytree.tree_leaves(copied)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(tensors)):
            torch.manual_seed(0)
            output = forward(*copied[0], **copied[1]) if whole_call else forward(*tensors)
        results, structure = pytree.tree_flatten(output)
        return [*results, *tensors], structure

    expected, structure = run(module.forward, whole_call=True)
    actual, its_structure = run(fx.GraphModule(module, graph), whole_call=False)
    if structure != its_structure:
        raise NotTraceableError("it returns a container that a trace turns into another kind")
    same = len(expected) == len(actual) and all(
        torch.equal(torch.nan_to_num(mine), torch.nan_to_num(theirs))
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor)
        else type(mine) is type(theirs)
        for mine, theirs in zip(actual, expected, strict=True)
    )
    if not same:
        raise NotTraceableError("a trace does not reproduce it (does it change a tensor in place?)")


class NotTraceableError(Exception):
    """The forward cannot be reproduced by a trace; the message completes a line "left alone:
    ..."."""


class _FrozenTensorError(NotTraceableError):
    """The forward makes a tensor that its trace holds as a constant."""


class _ChildrenAreLeaves(fx.Tracer):
    """A tracer for which every child stays a call, except a plain ``nn.Sequential``.

    Other children are traced on their own.
    """

    proxy_buffer_attributes = True
    record_stack_traces = True

    def __init__(self, module: nn.Module, call: Call, hooked: Collection[str]) -> None:
        super().__init__()
        self.module, self.hooked = module, hooked
        self.tensors = [leaf for leaf in call.leaves()[0] if isinstance(leaf, Tensor)]
        self.decided: list[fx.Node] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            type(m) is not nn.Sequential
            or module_qualified_name in self.hooked
            or "forward" in vars(m)
        )

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide a branch on what the tensors are (dtypes, shapes) as the recorded call does."""
        try:
            decision = bool(_fact(obj.node, self.module, self.tensors))
        except NotTraceableError:
            return super().to_bool(obj)
        self.decided.append(obj.node)
        return decision

    def conditions(self, graph: fx.Graph) -> tuple[Condition, ...]:
        """Return the decisions, and remove the facts from ``graph`` that nothing else reads."""
        apart = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        found = []
        for node in graph.nodes:
            if node.op == "placeholder" or (self.decided and _is_needed_by_facts(node)):
                known[node] = apart.node_copy(node, lambda used: known[used])
            if node in self.decided:
                value = bool(_fact(node, self.module, self.tensors))
                found.append(Condition(known[node], value))
        for node in reversed(graph.nodes):
            if self.decided and not node.users and _is_needed_by_facts(node):
                graph.erase_node(node)
        return tuple(found)


_SOURCES = ("placeholder", "get_attr")
# What a tensor is, whatever its values are.
_FACTS = frozenset(
    {"dtype", "device", "type", "index", "ndim", "shape", "layout", "requires_grad"}
    | {"is_cuda", "is_cpu", "is_nested", "is_sparse", "is_quantized"}
)
_FACT_METHODS = frozenset({"dim", "ndimension", "size", "numel", "is_floating_point", "is_complex"})
_FACT_FUNCTIONS = frozenset(
    {torch.is_floating_point, torch.is_complex, operator.getitem}
    | {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}
    | {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod}
    | {operator.not_, operator.and_, operator.or_}
)


def _is_needed_by_facts(node: fx.Node) -> bool:
    """Return whether a node is a parameter, or a fact."""
    return node.op == "get_attr" or _is_fact(node)


def _is_fact(value: Any) -> bool:
    """Return whether a node follows from dtypes, shapes and devices of arguments and attributes,
    not from values."""
    if not isinstance(value, fx.Node) or value.kwargs:
        return False
    if value.op == "call_method":
        tensor, *rest = value.args
        return value.target in _FACT_METHODS and _is_source(tensor) and all(map(_is_known, rest))
    if value.op != "call_function":
        return False
    if value.target is getattr:
        owner, name = value.args
        return name in _FACTS and (_is_source(owner) or _is_fact(owner))
    if value.target in (torch.is_floating_point, torch.is_complex):
        return _is_source(value.args[0])
    return value.target in _FACT_FUNCTIONS and all(map(_is_known, value.args))


def _is_source(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op in _SOURCES


def _is_known(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_known, value))
    return _is_fact(value) if isinstance(value, fx.Node) else not isinstance(value, slice)


def _fact(value: Any, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
    """Evaluate a fact of arguments and attributes, or one of its operands.

    Raises NotTraceableError for anything else.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(_fact(item, module, tensors) for item in value)
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
    if not _is_fact(value):
        raise NotTraceableError("it branches on data")
    given = [_fact(item, module, tensors) for item in value.args]
    if value.op == "call_method":
        return getattr(given[0], str(value.target))(*given[1:])
    return value.target(*given)  # type: ignore[operator]


# The functions of torch that make tensors of nothing but sizes and numbers: a trace does not see
# their calls.
_FACTORIES = (
    *("zeros", "ones", "full", "empty", "eye", "arange", "linspace", "tensor"),
    *("tril_indices", "triu_indices"),
)


@contextlib.contextmanager
def _recording_factories(tracer: fx.Tracer, all_of_them: bool) -> Iterator[None]:
    """Let a trace in this thread record calls that make a tensor of a size of another; or
    ``all_of_them``, since without that a tensor is a constant of the trace."""
    thread, originals = threading.get_ident(), {name: getattr(torch, name) for name in _FACTORIES}

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            follows = any(isinstance(leaf, fx.Proxy) for leaf in leaves)
            if threading.get_ident() == thread and (follows or all_of_them):
                return tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return make

    try:
        for name, original in originals.items():
            setattr(torch, name, recorded(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def source_line(module: nn.Module) -> str:
    """Return ``file:line`` of a module's forward, or its class if that is not the user's code."""
    try:
        file = inspect.getsourcefile(type(module).forward)
        line = inspect.getsourcelines(type(module).forward)[1]
    except (OSError, TypeError):
        return type(module).__qualname__
    if type(module).__module__.startswith("torch."):
        return f"torch.{type(module).__qualname__}"
    return f"{file}:{line}"
