"""Capture a function as one graph of ATen operators: its outputs and, after them, its gradients.

Dynamo traces the Python code and AOTAutograd differentiates it, both with symbolic sizes, so that
the graph holds for other sizes than the example's. Every node keeps the name that the user's code
gave to its value, and the line.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx.experimental import _config as fx_config
from torch.utils import _contextlib as _NO_GRAD

from fuselab.ejection.blocks import take_blocks
from fuselab.ejection.calls import source_line
from fuselab.ejection.carriers import add_carriers, carriers_of
from fuselab.ejection.cumulative import traceable_averages
from fuselab.ejection.decisions import decisions, listening, not_listening, reads_dtypes
from fuselab.ejection.dropout import SEEDS, dropouts_in, is_seed, seed_beside, seeded
from fuselab.ejection.equal_sizes import equal_sizes, equate_sizes
from fuselab.ejection.libraries import refuse_calls_of_libraries
from fuselab.ejection.recurrent import take_cells_apart
from fuselab.ejection.repeated import upsampling_as_views
from fuselab.ejection.returned import Returned, StandIns, output_node, results_of
from fuselab.ejection.taken import (
    annotation,
    argument_of,
    mapped,
    tensors_in,
    with_own_parameters,
)
from fuselab.ejection.written import written_in
from fuselab.errors import EjectError
from fuselab.runtime.dispatch.overlap import lies_in_memory


@dataclass(frozen=True)
class Argument:
    """A parameter of the captured function, by its name in the package."""

    name: str
    node: fx.Node

    @property
    def tensor(self) -> Tensor:
        value: Tensor = self.node.meta["val"]
        return value


@dataclass(frozen=True)
class Captured:
    """The joint graph of a function.

    ``graph`` computes ``outputs`` from ``arguments`` and ``gradients`` from these and ``upstream``,
    one placeholder for each output that needs a gradient. ``gradients`` has one entry for each
    argument, None where there is none. ``sizes`` tells each symbol's place: argument name, dim.
    ``traced`` is the graph of PyTorch functions as the user's code called them. ``ranges`` has the
    least and the largest value of each integer argument of the example. ``returned`` says what the
    function makes of the outputs, and ``given`` has the arguments of the example by the names of
    the function's parameters. The function writes over the arguments ``written``; their new values
    are the last of the outputs. ``seed`` names the argument from which dropouts take their masks,
    the last one; None where nothing is dropped. ``numbers`` are those of the dropouts, by which the
    masks from one seed differ. ``decisions`` are conditions on sizes; where one does not hold, the
    user's code computes something else.
    """

    name: str
    function: Callable[..., Any]
    graph: fx.Graph
    traced: fx.GraphModule
    arguments: tuple[Argument, ...]
    outputs: tuple[fx.Node, ...]
    upstream: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    sizes: Mapping[sympy.Symbol, tuple[str, int]]
    hints: Mapping[sympy.Symbol, int]
    ranges: Mapping[str, tuple[int, int]]
    returned: Returned
    given: Mapping[str, Any]
    equal: Mapping[sympy.Symbol, sympy.Expr]
    written: tuple[str, ...] = ()
    seed: str | None = None
    numbers: tuple[int, ...] = ()
    decisions: tuple[sympy.Basic, ...] = ()
    reads_dtypes: bool = False

    @property
    def needs_gradient(self) -> tuple[bool, ...]:
        """Return for each output whether a gradient flows through it: not through new values of
        arguments."""
        return (*self.returned.needs_gradient, *(False for _ in self.written))

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    @property
    def of_users(self) -> tuple[str, ...]:
        """Return the parameters that the user's function and its module have: all but the seed."""
        return tuple(name for name in self.parameters if name != self.seed)

    @property
    def fixed(self) -> dict[str, Any]:
        """Return the arguments that hold no tensors, whose values in the example hold for good."""
        return {name: one for name, one in self.given.items() if annotation(one) is None}

    @property
    def public(self) -> dict[str, str]:
        """Return the parameters of the public function, each with its type: those of the user's
        function that tensors are given to, and the module's own."""
        taken = {name: kind for name, one in self.given.items() if (kind := annotation(one))}
        held = tensors_in(self.given)
        return taken | {name: "Tensor" for name in self.of_users if name not in held}

    @property
    def is_flat(self) -> bool:
        """Return whether the public function takes what the operator does."""
        return list(self.public) == list(self.of_users)

    def behind_gradients(self) -> set[fx.Node]:
        """Return the gradients and all nodes that they are computed from."""
        return with_sources([node for node in self.gradients if node is not None])


def with_sources(results: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes of a graph and all that they are computed from."""
    found: set[fx.Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


_MANY = 1 << 30
_SILENT = ("torch._subclasses.fake_tensor", "torch._dynamo.metrics_context")  # loggers
_HELD = ("_parameters", "_buffers", "_modules")  # of a module
_NOTHING = ("LOAD_CONST", None)  # before a return, in bytecode


# Functions that tell something and compute nothing: kernels leave them out. What tells the tracer
# so has another name in older versions.
_TELLING = {
    print,
    warnings.warn,
    *(getattr(logging.Logger, name) for name in ("debug", "info", "warning", "error", "log")),
}
_UNHEARD = (
    "ignore_logging_functions"
    if hasattr(torch._dynamo.config, "ignore_logging_functions")
    else "ignore_logger_methods"
)


class _CapturedError(Exception):
    """Raised to end the compilation once the graph is known: nothing is to be compiled."""


def capture(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool = False,
    definitions: Sequence[Mapping[Any, Callable[..., Any]]] = (MappingProxyType({}),),
    frozen: Collection[str] = (),
    numbers: Sequence[int] | None = None,
    products: bool = False,
) -> tuple[Captured, ...]:
    """Return the graphs of ``function`` called with ``args`` and ``keywords``, one for each of the
    ``definitions``, by which operators become simpler ones. The function is traced once for all.

    Every floating tensor gets a gradient, unless ``inference``, but for those named in ``frozen``.
    The dropouts of the function have ``numbers``, from 0 on by default. Raises EjectError with
    the user's line where the function cannot be one graph, or calls what libraries compute, but for
    ``products`` where these are taken.
    """
    inference = inference or _returns_nothing(function)
    held: dict[str, Any] = {"joints": []}

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        refuse_calls_of_libraries(module.graph, products)
        held["traced"], held["stand_ins"] = module, StandIns(module)
        held["decisions"], held["reads_dtypes"] = decisions(), reads_dtypes()
        held["results"] = results_of(module.graph)
        # Only what is computed: AOTAutograd would return the bases of views as well.
        last = output_node(module.graph)
        outputs, last.args = last.args, (held["results"],)
        module.recompile()
        try:
            if held["results"] or (inference and written_in(module.graph)):
                held["numbers"] = numbers or range(len(dropouts_in(module.graph)))
                carriers = carriers_of(module.graph, held["decisions"])
                seeded_module, given = seeded(
                    module, inputs, held["numbers"], carriers, _declared(function)
                )
                held["placeholders"] = seeded_module.graph.find_nodes(op="placeholder")
                held["joints"] = [_joint(seeded_module, given, simpler) for simpler in definitions]
        finally:
            last.args = outputs
        return held["stand_ins"]

    try:
        held["structure"] = _run_dynamo(backend, function, args, keywords, name, inference, frozen)
    except EjectError:
        if inference or not _only_writes(function, args, keywords):
            raise
        return capture(function, args, keywords, name, True, definitions, frozen, numbers, products)
    if "traced" in held and not held["results"] and not held["joints"]:
        if not inference and written_in(held["traced"].graph):
            # It returns no tensor, so that there is no gradient of it: the step of an optimizer.
            return capture(
                function, args, keywords, name, True, definitions, frozen, numbers, products
            )
        raise EjectError(
            f"{name} returns an argument or a view of it; there is nothing to compute."
        )
    if not held["joints"]:
        raise EjectError(f"{name} computes nothing from its tensors; there is no kernel to write.")
    take_blocks(held["traced"].graph, not inference)
    given = _given(function, args, keywords)
    return tuple(_captured(function, name, held, joint, given) for joint in held["joints"])


@dataclass(frozen=True)
class _Joint:
    """A graph of the outputs and, behind them, the gradients; the number of the outputs, None where
    the graph has these alone."""

    graph: fx.Graph
    outputs: int | None


def _joint(
    module: fx.GraphModule, inputs: list[Any], definitions: Mapping[Any, Callable[..., Any]]
) -> _Joint:
    """Return the graph of ATen operators of a traced module, after ``definitions``."""
    found: list[_Joint] = []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        found.append(_Joint(joint.graph, num_fwd_outputs))
        raise _CapturedError

    def keep_forward(gm: fx.GraphModule, example_inputs: Any) -> Any:
        found.append(_Joint(gm.graph, None))
        raise _CapturedError

    with (
        not_listening(),
        upsampling_as_views(module),
        contextlib.suppress(_CapturedError),
    ):
        aot_module_simplified(
            module,
            inputs,
            fw_compiler=keep_forward,
            bw_compiler=keep_forward,
            partition_fn=partition,
            decompositions=dict(definitions),
        )
    return found[0]


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool = False,
) -> Captured:
    """Return the graph of the PyTorch functions that ``function`` calls, without gradients; the
    nodes' values are in ``meta["example_value"]``. Raises EjectError as ``capture`` does."""
    inference = inference or _returns_nothing(function)
    held: dict[str, Any] = {}

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        held["decisions"], held["reads_dtypes"] = decisions(), reads_dtypes()
        take_cells_apart(module)
        held["traced"], held["stand_ins"] = module, StandIns(module)
        held["carriers"] = carriers_of(module.graph, held["decisions"])
        return held["stand_ins"]

    try:
        returned = _run_dynamo(backend, function, args, keywords, name, inference)
    except EjectError:
        if inference or not _only_writes(function, args, keywords):
            raise
        return trace(function, args, keywords, name, True)
    if "traced" not in held:
        raise EjectError(f"{name} computes nothing from its tensors; there is no kernel to write.")
    graph: fx.Graph = held["traced"].graph
    take_blocks(graph, not inference)
    add_carriers(graph, held["carriers"])
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    for node in nodes:
        node.meta["val"] = node.meta["example_value"]
    arguments = [
        Argument(argument_name(node), node)
        for node in nodes
        if isinstance(node.meta["val"], Tensor)
    ]
    given = _given(function, args, keywords)
    arguments.sort(key=_in_users_order(given, nodes))
    sizes, hints = _symbols(arguments)
    numbers = tuple(range(len(dropouts_in(graph))))
    seed = None
    if numbers:
        node = seed_beside(graph, _declared(function))
        seed = argument_name(node)
        arguments.append(Argument(seed, node))
    outputs = tuple(_flat(output_node(graph).args[0]))
    return Captured(
        name,
        function,
        graph,
        held["traced"],
        tuple(arguments),
        outputs,
        (),
        (),
        sizes,
        hints,
        _seeded_ranges(given, seed),
        Returned(outputs, held["stand_ins"].structure(name, returned)),
        given,
        {},
        seed=seed,
        numbers=numbers,
        decisions=held["decisions"],
        reads_dtypes=held["reads_dtypes"],
    )


def graph_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool,
) -> fx.Graph:
    """Return Dynamo's graph of a call. Raises EjectError as ``capture`` does."""
    held: list[fx.Graph] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        held.append(module.graph)
        return StandIns(module)

    _run_dynamo(backend, function, args, keywords, name, inference)
    if not held:
        raise EjectError(f"{name} computes nothing from its tensors; there is no kernel to write.")
    return held[0]


def _run_dynamo(
    backend: Callable[..., Any],
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool,
    frozen: Collection[str] = (),
    retries: bool = True,
) -> Any:
    """Trace a call as one graph with symbolic sizes, give it to ``backend``, and return what the
    call of the code that ``backend`` returns gives.

    The arguments ``frozen`` require no gradient. Where PyTorch refuses a gradient for others, they
    are frozen too and the call is traced again, if ``retries``.

    Raises EjectError with the user's line where the function cannot be one graph.
    """
    positions = itertools.zip_longest(args, _declared(function)[: len(args)])
    held: set[int] = set()

    def example(tensor: Tensor, key: str) -> Tensor:
        # The tracer stands in for tensors of one storage by writing to them, which would look as if
        # the function wrote. No values are computed, so that memory without content does.
        if lies_in_memory(tensor) and (storage := tensor.untyped_storage().data_ptr()):
            if storage in held:
                tensor = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
            held.add(storage)
        return _example(tensor, not inference and key not in frozen)

    examples = [mapped(arg, example, key or "") for arg, key in positions]
    named = {key: mapped(arg, example, key) for key, arg in keywords.items()}
    dynamo_config: Any = torch._dynamo.config
    shape_config: Any = fx_config
    with (
        shape_config.patch(use_duck_shape=False),
        dynamo_config.patch(
            specialize_float=True,
            specialize_int=True,
            allow_rnn=True,
            # A function of PyTorch that many modules share, such as an activation's forward, is
            # compiled again for each.
            recompile_limit=_MANY,
            accumulated_recompile_limit=_MANY,
            **{_UNHEARD: _TELLING},
        ),
        torch.set_grad_enabled(not inference),
        traceable_averages(function),
        listening(),
        _silent(),
        _unchanged(function),
    ):
        called = with_own_parameters(function)

        def naming(module: fx.GraphModule, inputs: list[Any]) -> Any:
            _name_parameters(module.graph, _given(function, args, keywords))
            return backend(module, inputs)

        compiled = torch.compile(called, backend=naming, dynamic=True, fullgraph=True)
        try:
            return compiled(*examples, **named)
        except BackendCompilerFailed as error:
            raise EjectError(f"{name} cannot be traced: {_reason(error)}.") from error
        except Unsupported as error:
            raise EjectError(
                f"{name} cannot be one graph: {_first_line(error)}{_user_line(error)}; eject a "
                "part of it that has no such line."
            ) from error
        except TorchDynamoException as error:
            more: set[str] = set()
            if retries and not inference:
                more = _written_arguments(function, args, keywords)
                if "is not differentiable with respect to argument" in str(error):
                    more |= _constant_arguments(function, args, keywords)
                more -= set(frozen)
            if not more:
                raise EjectError(
                    f"{name} cannot be traced: {_reason(error)}{_user_line(error)}."
                ) from error
        finally:
            # Else the next call of a function that the user compiles would begin with this code.
            torch._dynamo.eval_frame.remove_from_cache(called)
    # PyTorch refuses to write over tensors that want a gradient, such as running statistics, and
    # some of its functions have no gradient for their targets or weights.
    return _run_dynamo(backend, function, args, keywords, name, inference, {*frozen, *more})


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep what PyTorch says of errors that are caught here off the screen, and of its own: torch
    2.11 cannot write the functions of ``_TELLING`` into its metrics."""
    loggers = [logging.getLogger(name) for name in _SILENT]
    were_disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error detected in")
            yield
    finally:
        for logger, was_disabled in zip(loggers, were_disabled, strict=True):
            logger.disabled = was_disabled


@contextlib.contextmanager
def _unchanged(function: Callable[..., Any]) -> Iterator[None]:
    """Give a module and its children their own attributes back. The compiled call assigns what it
    gets, which stands in for tensors, where the forward assigns to ``self``."""
    modules = list(function.modules()) if isinstance(function, nn.Module) else []
    before = [
        (own := vars(one), dict(own), {name: dict(own[name]) for name in _HELD if name in own})
        for one in modules
    ]
    try:
        yield
    finally:
        for own, attributes, held in before:
            own.clear()
            own.update(attributes)
            for name, items in held.items():
                own[name].clear()
                own[name].update(items)


def _constant_arguments(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> set[str]:
    """Return the names of floating arguments for which the function has no gradient.

    The others have one together. Where two arguments cannot both have one, the first has it.
    """
    given = _given(function, args, keywords)
    tensors = tensors_in(given)
    frozen = {key for key, (value, _) in tensors.items() if value.is_floating_point()}

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        return StandIns(module)

    for key in [key for key in tensors if key in frozen]:
        with contextlib.suppress(EjectError):
            fewer = frozen - {key}
            _run_dynamo(backend, function, args, keywords, "", False, fewer, retries=False)
            frozen = fewer
    return frozen


def _written_arguments(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> set[str]:
    """Return the names of the arguments that a function writes over, as far as it can be traced
    without gradients."""
    return _effects(function, args, keywords)[0]


def _only_writes(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> bool:
    """Return whether a function returns no tensor and writes over arguments, as the step of an
    optimizer does. It may use what PyTorch refuses where a gradient is wanted: ``out=...``."""
    written, results = _effects(function, args, keywords)
    return bool(written) and not results


def _returns_nothing(function: Callable[..., Any]) -> bool:
    """Return whether it can be seen in the code of a function, without tracing it, that it returns
    nothing: then there is no gradient of it."""
    while getattr(getattr(function, "__code__", None), "co_filename", "") == _NO_GRAD.__file__:
        function = vars(function)["__wrapped__"]
    if not inspect.isfunction(function) or inspect.isgeneratorfunction(function):
        return False
    before: tuple[str, Any] = ("", None)
    for one in dis.get_instructions(function):
        if one.opname == "RETURN_CONST" and one.argval is not None:
            return False
        if one.opname == "RETURN_VALUE" and (one.is_jump_target or before != _NOTHING):
            return False
        before = one.opname, one.argval
    return True


def _effects(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[set[str], int]:
    """Return the names of the arguments that a function writes over, and the number of tensors that
    it computes and returns, as far as it can be traced without gradients."""
    written: set[str] = set()
    results = 0

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal results
        written.update(argument_name(node) for node in written_in(module.graph))
        results = len(results_of(module.graph))
        return StandIns(module)

    with contextlib.suppress(EjectError):
        _run_dynamo(backend, function, args, keywords, "", True)
    return written, results


def _given(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments of the example by the names of their parameters."""
    forward = function.forward if isinstance(function, nn.Module) else function
    return inspect.signature(forward).bind(*args, **keywords).arguments


def _seeded_ranges(given: Mapping[str, Any], seed: str | None) -> dict[str, tuple[int, int]]:
    """Return the least and the largest value of each integer argument of the example, and of the
    seed."""
    found = {} if seed is None else {seed: SEEDS}
    return found | {
        name: (int(value.min()), int(value.max()))
        for name, (value, _) in tensors_in(given).items()
        if not value.is_floating_point() and not value.is_complex()
        if value.dtype != torch.bool and value.numel()
    }


def _declared(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that a function, or a module's forward, declares."""
    forward = function.forward if isinstance(function, nn.Module) else function
    return list(inspect.signature(forward).parameters)


def _example(tensor: Tensor, wants_gradient: bool) -> Tensor:
    own = tensor.detach()
    return own.requires_grad_(wants_gradient and own.is_floating_point())


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _reason(error: BaseException) -> str:
    """Return the sentence of the PyTorch operator that refused its arguments, if there is one."""
    if "data-dependent expression" in str(error):
        return "a condition in it depends on the values of a tensor"
    found = re.search(r"got (\w+Error)\([\"'](.*?)[\"']\)", str(error), re.DOTALL)
    inner = getattr(error, "inner_exception", error)
    return found[2].partition("\\n")[0].rstrip(".") if found else _first_line(inner)


def _user_line(error: BaseException) -> str:
    found = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    return f" (line {found[-1][1]} of {found[-1][0]})" if found else ""


def _captured(
    function: Callable[..., Any],
    name: str,
    held: dict[str, Any],
    joint: _Joint,
    given: Mapping[str, Any],
) -> Captured:
    traced: fx.GraphModule = held["traced"]
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    primals = [node for node in placeholders if not node.name.startswith("tangents")]
    upstream = tuple(node for node in placeholders if node.name.startswith("tangents"))
    results = _flat(output_node(joint.graph).args[0])
    count = len(results) if joint.outputs is None else joint.outputs
    returned = Returned(held["results"], held["stand_ins"].structure(name, held["structure"]))
    written = [argument_name(node) for node in written_in(traced.graph)]
    if count != len(returned.results) + len(written):
        raise EjectError(f"{name} writes over an argument; let it return the new value.")
    if upstream and sum(returned.needs_gradient) != len(upstream):
        if written:
            raise EjectError(
                f"{name} writes over an argument; let it return the new value, detach what it "
                "writes, or run under torch.no_grad()."
            )
        raise EjectError(f"{name}: it is not known which of its outputs have a gradient.")
    names: list[fx.Node] = held["placeholders"]
    arguments = [
        Argument(argument_name(source), node)
        for node, source in zip(primals, names, strict=True)
        if isinstance(node.meta["val"], Tensor)
    ]
    arguments.sort(key=_in_users_order(given, names))
    # The graph has new values in the order in which Dynamo met the arguments.
    values = dict(zip(written, results, strict=False))
    written = [one.name for one in arguments if one.name in values]
    new_values = [values[one] for one in written]
    found = dict(zip(primals, results[count:], strict=False))
    gradients = [found.get(argument.node) for argument in arguments]
    equate_sizes(joint.graph)
    # The backward takes no sizes from what is written over, because it must not save that.
    sizes, hints = _symbols(sorted(arguments, key=lambda one: one.name in written))
    equal = equal_sizes(joint.graph)
    seed = next((argument_name(node) for node in names if is_seed(node)), None)
    return Captured(
        name,
        function,
        joint.graph,
        traced,
        tuple(arguments),
        (*results[len(written) : count], *new_values),
        upstream,
        tuple(gradients),
        {symbol: place for symbol, place in sizes.items() if symbol not in equal},
        hints,
        _seeded_ranges(given, seed),
        returned,
        given,
        equal,
        tuple(written),
        seed,
        tuple(held["numbers"]),
        held["decisions"],
        held["reads_dtypes"],
    )


def _flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _name_parameters(graph: fx.Graph, given: Mapping[str, Any]) -> None:
    """Give the parameters and buffers of a module that are called as an argument of its forward is
    another name."""
    taken = {*given, *tensors_in(given)}
    for node in graph.find_nodes(op="placeholder"):
        name = argument_name(node)
        if _is_parameter(node) and name in taken:
            while name in taken:
                name = f"own_{name}"
            node.meta["argument_name"] = name
            taken.add(name)


def argument_name(node: fx.Node) -> str:
    """Return the user's name of a parameter: Dynamo calls ``x`` ``L_x_`` and ``self.norm.weight``
    ``L_self_modules_norm_parameters_weight_``."""
    if "argument_name" in node.meta:
        return str(node.meta["argument_name"])
    name = re.sub(r"^L_", "", str(node.target)).rstrip("_")
    if _is_parameter(node):
        name = re.sub(r"^\w*?_(?=modules_|parameters_|buffers_)", "", name)
        name = re.sub(r"(?:^|_)(?:modules|parameters|buffers)_", "_", name)
    elif local := re.fullmatch(r"L\['(\w+)'\]", _source_text(node)):
        return argument_of(local[1])
    return argument_of(name.strip("_"))


def _is_parameter(node: fx.Node) -> bool:
    """Return whether a placeholder is a parameter or a buffer of a module."""
    text = _source_text(node)
    if not text:
        return re.match(r"^L_\w+?_(modules|parameters|buffers)_", str(node.target)) is not None
    return re.search(r"\._(modules|parameters|buffers)\[", text) is not None


def _source_text(node: fx.Node) -> str:
    """Return where PyTorch's tracer found a placeholder's value, as text; empty if unknown."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return ""
    return str(source.name() if callable(source.name) else source.name)  # a method in some versions


def _in_users_order(
    given: Mapping[str, Any], names: Sequence[fx.Node]
) -> Callable[[Argument], tuple[bool, bool, int]]:
    """Return the key that sorts arguments: those of the call as the function declares them, then
    parameters and buffers, then the seed of dropouts."""
    declared = list(tensors_in(given))
    parameters = {argument_name(node) for node in names if _is_parameter(node)}
    seeds = {argument_name(node) for node in names if is_seed(node)}

    def key(argument: Argument) -> tuple[bool, bool, int]:
        place = declared.index(argument.name) if argument.name in declared else len(declared)
        return argument.name in seeds, argument.name in parameters, place

    return key


def _symbols(
    arguments: Sequence[Argument],
) -> tuple[dict[sympy.Symbol, tuple[str, int]], dict[sympy.Symbol, int]]:
    sizes: dict[sympy.Symbol, tuple[str, int]] = {}
    hints: dict[sympy.Symbol, int] = {}
    for argument in arguments:
        for dim, size in enumerate(argument.tensor.shape):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                sizes.setdefault(size.node.expr, (argument.name, dim))
                hints[size.node.expr] = size.node.hint
    return sizes, hints


def user_name(node: fx.Node) -> str:
    """Return the name that the user's code, or PyTorch, gave to a node's value."""
    origins = node.meta.get("from_node") or []
    return str(origins[0].name if origins else node.name)


def is_user_named(node: fx.Node) -> bool:
    """Return whether a node's value has the name of a variable of the user's code."""
    assigned = re.match(r"\s*([A-Za-z_]\w*)\s*[-+*/|&]?=[^=]", source_line(node).partition(": ")[2])
    return assigned is not None and assigned[1] == user_name(node)
