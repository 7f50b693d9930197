"""Run a model once on example inputs and trace every module's own forward, children as leaves.

The run happens on a shadow of the model: same parameters, copied buffers, no hooks, its own random
state. So the user's hooks are not called and the user's model does not change.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fuselab import structures
from fuselab.ejection.calls import without_kept_inputs
from fuselab.errors import TargetError
from fuselab.fusion.answering import answering
from fuselab.fusion.closures import rebind_attributes
from fuselab.fusion.facts import (
    AnyCondition,
    Decisions,
    NotTraceableError,
    ReadableProxy,
    Results,
    SameGradMode,
    SameInputs,
    children_before,
    fact,
    holds_data,
    is_fact,
    items_of,
)


@dataclass(frozen=True)
class Call:
    """The arguments with which one module was called."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def leaves(self) -> tuple[list[Any], Any]:
        """Return all arguments flattened, and the structure that restores them."""
        return pytree.tree_flatten((self.args, dict(self.kwargs)))


@dataclass(frozen=True)
class Traced:
    """A module whose own forward was traced: its graph takes the call's tensors, in order.

    The graph is the forward of calls for which the ``conditions`` hold.
    """

    path: str
    module: nn.Module
    graph: fx.Graph
    call: Call
    conditions: tuple[AnyCondition, ...] = ()

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
    if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in call.leaves()[0]):
        raise NotTraceableError("it is called with nested tensors")
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

    # In evaluation a model is called, and was measured, without gradients.
    with torch.set_grad_enabled(module.training):
        try:
            tracer, graph = traced(all_factories=False)
        except _FrozenTensorError:
            tracer, graph = traced(all_factories=True)
        conditions = tracer.conditions(graph)
        _erase_identities(graph, module, hooked)
        with torch.set_grad_enabled(module.training and tracer.asks_grad_mode):
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
    kind: Any = type(type(module).__name__, (type(module),), {"forward": namespace["forward"]})
    stand_in = kind.__new__(kind)
    stand_in.__dict__.update(vars(module))
    stand_in.__dict__.pop("forward", None)
    before = dict(vars(stand_in))
    contents = {name: _contents(value) for name, value in before.items()}
    tracer = _ChildrenAreLeaves(stand_in, call, hooked)
    with answering(tracer, all_factories):
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
        raise _FrozenTensorError(
            "it reads a tensor that is no argument, parameter, buffer or attribute (made by other "
            "means than torch.zeros and the like, or held in a list), which a trace would freeze"
        )
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
        with torch.random.fork_rng(devices=_cuda_devices(tensors)):
            torch.manual_seed(0)
            output = forward(*copied[0], **copied[1]) if whole_call else forward(*tensors)
        structure = pytree.tree_structure(output)
        return [
            *structures.leaves(output),
            *tensors,
            *(one.clone() for one in module.buffers()),
        ], structure

    buffers = list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    expected, structure = run(module.forward, whole_call=True)
    with torch.no_grad():  # both begin with the same running statistics
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    actual, its_structure = run(fx.GraphModule(module, graph), whole_call=False)
    if structure != its_structure:
        raise NotTraceableError("it returns a container that a trace turns into another kind")
    same = len(expected) == len(actual) and all(
        torch.equal(torch.nan_to_num(mine), torch.nan_to_num(theirs))
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor)
        else type(mine) is type(theirs) and (not isinstance(mine, _NUMBERS) or mine == theirs)
        for mine, theirs in zip(actual, expected, strict=True)
    )
    if not same:
        raise NotTraceableError("a trace does not reproduce it (does it change a tensor in place?)")


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
        self.decided: list[tuple[fx.Node, Callable[[Any], Any], Any]] = []
        self.repeats = False  # a value was read that may be the number of a loop's rounds
        self.follows = False  # a size or a dtype of an intermediate result was read
        self.followed: list[str] = []  # the children that such results come from
        self.asks_grad_mode = False
        self.results: Results | None = None
        self.evaluates = False  # modules are run, and not traced
        self.grad_mode = torch.is_grad_enabled()
        self.differentiable: set[fx.Node] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            type(m) is not nn.Sequential
            or module_qualified_name in self.hooked
            or "forward" in vars(m)
        )

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ReadableProxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if self.repeats and len(self.graph.nodes) > _LONGEST_UNROLLED:
            raise NotTraceableError(
                f"it loops over a size, and has more than {_LONGEST_UNROLLED} operations unrolled"
            )
        node = super().create_node(*args, **kwargs)
        if self._may_need_gradient(node):
            self.differentiable.add(node)
            if self.grad_mode and not torch._C.is_grad_enabled() and node.op != "get_attr":
                raise NotTraceableError("it turns gradients off for a part of it")
        return node

    def _may_need_gradient(self, node: fx.Node) -> bool:
        """Return whether a call may record gradients for its result where they are turned on."""
        if node.op == "placeholder":
            place = sum(1 for one in self.graph.nodes if one.op == "placeholder") - 1
            return self.tensors[place].is_floating_point()
        if node.op == "get_attr":
            return isinstance(fact(node, self.module, self.tensors), nn.Parameter)
        if node.target == "detach" or is_fact(node, of_results=True):
            return False
        return node.op == "call_module" or not self.differentiable.isdisjoint(node.all_input_nodes)

    def class_of(self, proxy: fx.Proxy) -> type:
        """Return the class of what a proxy stands for, as far as it is known."""
        node = proxy.node
        if node.op in ("placeholder", "get_attr"):
            return Tensor
        try:
            value = self._result(node)
        except NotTraceableError:
            return type(proxy)
        return Tensor if isinstance(value, Tensor) else type(value)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.evaluates:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self.evaluates:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide a branch on what the tensors are (dtypes, shapes) as the recorded call does."""
        return bool(self.read(obj, bool))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return items_of(obj, self.read(obj, len))

    def read(self, proxy: fx.Proxy, way: Callable[[Any], Any]) -> Any:
        """Return what Python code reads of a traced value, if no data decides it: the value of the
        recorded call. That is a condition of the trace."""
        node = proxy.node
        try:
            value = fact(node, self.module, self.tensors)
        except NotTraceableError:
            # The size alone of an intermediate result may be read, and not its values.
            if way is not len and not is_fact(node, of_results=True):
                raise NotTraceableError(_BY_DATA) from None
            value = self._result(node)
            self.followed += children_before(node)
            self.follows = True
        else:
            if way not in (len, bool) and holds_data(value):
                raise NotTraceableError(_BY_DATA) from None
            self.decided.append((node, way, way(value)))
        self.repeats |= way is not bool
        return way(value)

    def _result(self, node: fx.Node) -> Any:
        """Return the value of an intermediate result, with tensors that have no data."""
        self.evaluates = True
        try:
            if self.results is None:
                self.results = Results(shadow(self.module), self.tensors)
            return self.results.value(node)
        finally:
            self.evaluates = False

    def conditions(self, graph: fx.Graph) -> tuple[AnyCondition, ...]:
        """Return the decisions, and remove the facts from ``graph`` that nothing else reads."""
        apart = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        nodes = {node for node, _, _ in self.decided}
        for node in graph.nodes:
            if node.op == "placeholder" or (nodes and _is_needed_by_facts(node)):
                known[node] = apart.node_copy(node, lambda used: known[used])
        found: list[AnyCondition] = []
        if self.decided:
            read = list(dict.fromkeys(self.decided))
            apart.output(tuple(known[node] for node, _, _ in read))
            apart.eliminate_dead_code()
            found.append(Decisions(apart, [way for _, way, _ in read], [one for *_, one in read]))
        if self.asks_grad_mode:
            found.append(SameGradMode(self.grad_mode))
        if self.follows:
            children = list(dict.fromkeys(self.followed))
            found.append(SameInputs.of(self.module, self.tensors, children))
        for node in reversed(graph.nodes):
            is_free = node.op == "get_attr" or is_fact(node, of_results=self.follows)
            if found and not node.users and is_free:
                graph.erase_node(node)
        return tuple(found)


_NUMBERS = (bool, int, float, str)
_LONGEST_UNROLLED = 500  # nodes: a kernel is tried for each chain of them
_BY_DATA = "it decides by values of a tensor"


def _is_needed_by_facts(node: fx.Node) -> bool:
    """Return whether a node is a parameter, or a fact."""
    return node.op == "get_attr" or is_fact(node)


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
