"""Procedures for either process: the function under question inside torch.compile, torch.func,
opcheck and gradcheck."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import DifferentiationError
from fuselab.op import tensors_in
from fuselab.prove.arguments import at, filled, needed
from fuselab.prove.held import Held, results
from fuselab.prove.outputs import as_declared, floating, outputs_in, sum_over

Function = Callable[..., Any]

_OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck_problem(
    held: Held, args: Sequence[Any], scalar_dtype: torch.dtype, upstream: Sequence[Tensor] | None
) -> tuple[str, str] | None:
    """Run torch.library.opcheck on the raw forward, and on the raw backward with its saved values
    where there is an ``upstream`` gradient.

    Returns the name of the overload that failed and what opcheck says, or None.
    """
    op, implementation = held.op, held.implementation
    namespace = getattr(torch.ops, op.namespace)
    packet = getattr(namespace, op.short_name)
    for overload in packet.overloads():
        given = tuple(args)
        if overload == "scalar_tensor":
            device = tensors_in(args)[0].device
            given = tuple(
                torch.full((), value, device=device, dtype=scalar_dtype)
                if isinstance(value, float)
                else value
                for value in args
            )
        problem = _opcheck(getattr(packet, overload), (*given, implementation))
        if problem is not None:
            return overload, problem
    if op.gradient is None or upstream is None:
        return None
    output = held(*args)
    gradients = as_declared(op, outputs_in(output), upstream)
    saved = op.gradient.save(op.with_residuals(output, args), *args)
    backward = getattr(namespace, f"{op.short_name}_backward")
    values = (needed(op, args), *tensors_in((gradients,)), *saved, implementation)
    problem = _opcheck(backward.default, values)
    return None if problem is None else ("backward", problem)


def _opcheck(overload: Any, args: tuple[Any, ...]) -> str | None:
    outcome = torch.library.opcheck(
        overload, args, test_utils=_OPCHECKS, raise_exception=False, rtol=0.02, atol=0.02
    )
    for test, verdict in outcome.items():
        if verdict != "SUCCESS":
            lines = [line for line in str(verdict).strip().splitlines() if line.strip()]
            return f"{overload}: opcheck's {test} says: {lines[0][:200] if lines else verdict}"
    return None


@contextlib.contextmanager
def quiet_dynamo() -> Iterator[None]:
    """Reset Dynamo before and after, and silence its log; the check itself reports a broken
    graph."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    torch.compiler.reset()
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        torch.compiler.reset()


class CountingBackend:
    """A torch.compile backend that counts the graphs it receives and compiles them by another
    one."""

    def __init__(self, name: str) -> None:
        self.compile = torch._dynamo.lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return self.compile(graph, inputs)


def compiled(function: Function, backend: Any) -> Function:
    """Return the function compiled as one graph for all sizes."""
    found: Function = torch.compile(
        lambda *args: function(*args), backend=backend, fullgraph=True, dynamic=True
    )
    return found


def compiled_results(
    function: Function, backend: str, several: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Return the outputs of one compiled function for several lists of arguments, and how many
    graphs there were after each of them."""
    counting = CountingBackend(backend)
    outputs: list[list[Tensor]] = []
    graphs: list[int] = []
    with quiet_dynamo():
        compiled_function = compiled(function, counting)
        for args in several:
            outputs.append([one.detach() for one in results(compiled_function, *args)])
            graphs.append(counting.graphs)
    return {"outputs": outputs, "graphs": graphs}


def compiled_graphs(function: Function, several: Sequence[Sequence[Any]]) -> int:
    """Return how many graphs torch.compile builds of a function for these lists of arguments; 1
    where it cannot be compiled as one graph."""
    from torch._dynamo.exc import TorchDynamoException  # Dynamo takes a second to import

    with quiet_dynamo():
        counting = CountingBackend("aot_eager")
        compiled_function = compiled(function, counting)
        try:
            for args in several:
                compiled_function(*args)
        except TorchDynamoException:
            return 1
    return counting.graphs


def when_compiled(function: Function, procedure: Function, *args: Any) -> Any:
    """Run a procedure on the compiled function, whose gradients are compiled too."""
    with quiet_dynamo():
        return procedure(compiled(function, "aot_eager"), *args)


def transformed(
    function: Function, name: str, places: Sequence[int], values: Sequence[Any]
) -> list[Tensor]:
    """Return what a transform of torch.func, one of ``TRANSFORMS``, gives for the tensors at
    ``places``."""
    return TRANSFORMS[name](function, places, values)


def _loss(function: Function, places: Sequence[int], values: Sequence[Any]) -> Function:
    def scalar(*tensors: Tensor) -> Tensor:
        outputs = outputs_in(function(*filled(values, places, tensors)))
        return sum_over(outputs, lambda output: (output * output).sum())

    return scalar


def _grad(function: Function, places: Sequence[int], values: Sequence[Any]) -> list[Tensor]:
    argnums = tuple(range(len(places)))
    return list(torch.func.grad(_loss(function, places, values), argnums)(*at(values, places)))


def _vmap(function: Function, places: Sequence[int], values: Sequence[Any]) -> list[Tensor]:
    def of_sample(*one: Tensor) -> tuple[Tensor, ...]:
        return outputs_in(function(*filled(values, places, one)))

    return list(torch.vmap(of_sample)(*at(values, places)))


def _vmap_grad(function: Function, places: Sequence[int], values: Sequence[Any]) -> list[Tensor]:
    argnums = tuple(range(len(places)))
    gradient = torch.func.grad(_loss(function, places, values), argnums)
    return list(torch.vmap(gradient)(*at(values, places)))


def _jvp(function: Function, places: Sequence[int], values: Sequence[Any]) -> list[Tensor]:
    tensors = tuple(tensor.detach() for tensor in at(values, places))
    tangents = tuple(torch.ones_like(tensor) for tensor in tensors)

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(floating(outputs_in(function(*filled(values, places, tensors)))))

    found: Any = torch.func.jvp(of_tensors, tensors, tangents)
    return [tensor for of_kind in found for tensor in of_kind]


Transform = Callable[[Function, Sequence[int], Sequence[Any]], list[Tensor]]
TRANSFORMS: dict[str, Transform] = {
    "grad": _grad,
    "vmap": _vmap,
    "vmap(grad)": _vmap_grad,
    "jvp": _jvp,
}


def numeric_derivatives(
    function: Function,
    places: Sequence[int],
    args: Sequence[Any],
    tolerance: float,
    fast: bool,
    seed: int,
) -> None:
    """Run torch.autograd.gradcheck, and gradgradcheck unless the second derivative is refused.

    Raises what they raise. With ``fast`` a random projection of the Jacobian is compared.
    """

    def checked(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(floating(results(function, *filled(args, places, inputs))))

    inputs = [tensor.detach().clone().requires_grad_() for tensor in at(args, places)]
    devices = [tensor.device for tensor in inputs[:1] if tensor.is_cuda]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        torch.autograd.gradcheck(checked, inputs, nondet_tol=tolerance, fast_mode=fast)
        try:
            torch.autograd.gradgradcheck(checked, inputs, nondet_tol=tolerance, fast_mode=fast)
        except Exception as error:
            refuses = isinstance(error, (DifferentiationError, NotImplementedError))
            if not refuses and "once_differentiable" not in str(error):
                raise
