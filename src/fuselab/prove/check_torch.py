"""Checks of an operator inside PyTorch: opcheck, compile, autocast, torch.func."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import FuselabError, summary
from fuselab.op import tensors_in
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import at, differentiable, filled, mapped, needed
from fuselab.prove.check_memory import storage_like
from fuselab.prove.draw import LAYOUTS
from fuselab.prove.outputs import as_declared, floating, outputs_in, sum_over
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, call_bar, has_gradient, judged, with_gradients
from fuselab.runtime import dispatch

_OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def raw_operators_are_sound(subject: Subject, trial: Trial) -> Outcome:
    """Run torch.library.opcheck on the raw forward, and on the raw backward with its saved
    values."""
    if any(value.shape.count(0) > 1 for value in tensors_in(trial.args)):
        return Outcome(refused="opcheck of any operator fails on tensors with two empty dimensions")
    if any(bool(output.isnan().any()) for output in floating(subject.expected(*trial.args))):
        return Outcome(
            refused="opcheck takes NaN, here the mean of nothing or its like, for a fault"
        )
    packet = getattr(getattr(torch.ops, subject.op.namespace), subject.op.short_name)
    for overload in packet.overloads():
        args = trial.args
        if overload == "scalar_tensor":
            args = tuple(
                torch.full((), value, device=subject.device, dtype=_scalar_dtype(subject))
                if isinstance(value, float)
                else value
                for value in args
            )
        problem = _opcheck(getattr(packet, overload), (*args, subject.implementation))
        if problem is not None:
            hint = f" {_float_hint(subject)}" if overload == "scalar_tensor" else ""
            return Outcome(problem + hint)
    gradient = subject.op.gradient
    if gradient is None:
        return Outcome()
    output = subject.call(*trial.args)
    upstream = as_declared(subject.op, outputs_in(output), subject.upstream(trial))
    saved = gradient.save(output, *trial.args)
    backward = getattr(
        getattr(torch.ops, subject.op.namespace), f"{subject.op.short_name}_backward"
    )
    needs = needed(subject.op, trial.args)
    values = (needs, *tensors_in((upstream,)), *saved, subject.implementation)
    return Outcome(_opcheck(backward.default, values))


def _scalar_dtype(subject: Subject) -> torch.dtype:
    return torch.float64 if subject.dtype == torch.float64 else torch.float32


def _float_hint(subject: Subject) -> str:
    """Return the sentence that explains an error of a call whose floats are tensors."""
    names = ", ".join(subject.op.float_parameters)
    return (
        f"Inside torch.compile a float ({names}) arrives as a 0-d tensor, in the reference as in "
        "the kernels' launchers; docs/contract.md says how a kernel takes it."
    )


def _explaining_floats(
    trial_of: Callable[[Subject, Trial], Outcome],
) -> Callable[[Subject, Trial], Outcome]:
    """Return the check with the reason added where Dynamo meets a float that it cannot know."""

    @functools.wraps(trial_of)
    def explained(subject: Subject, trial: Trial) -> Outcome:
        from torch._dynamo.exc import UserError  # Dynamo takes a second to import

        try:
            return trial_of(subject, trial)
        except UserError as error:
            if not subject.op.float_parameters:
                raise
            return Outcome(f"raised {summary(error, 120)}. {_float_hint(subject)}")

    return explained


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


def _structure(args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the facts that torch.compile may specialise on.

    Returns None if a size is 0 or 1, because torch.compile always specialises on those.
    """
    tensors = tensors_in(args)
    sizes = [size for tensor in tensors for size in tensor.shape]
    if any(size < 2 for size in sizes):
        return None
    equal = tuple(sizes.index(size) for size in sizes)
    plain = mapped(
        lambda value: (
            (value.ndim, value.dtype, value.is_contiguous())
            if isinstance(value, Tensor)
            else None
            if isinstance(value, float)
            else value
        ),
        args,
    )
    return (*plain, equal)


def _of_one_structure(subject: Subject, trial: Trial, wanted: int) -> list[tuple[Any, ...]]:
    """Return up to ``wanted`` argument lists that differ only in sizes, so that one dynamic graph
    must serve all of them."""
    groups: dict[Any, dict[Any, tuple[Any, ...]]] = {}
    start = trial.draw.below(1 << 16)
    for index in range(start, start + 400):
        drawn = subject.draw("sizes", index, ("contiguous",), ("normal",), max_numel=2048)
        if drawn is None:
            continue
        structure = _structure(drawn.args)
        if structure is None:
            continue
        group = groups.setdefault(structure, {})
        group[tuple(value.shape for value in tensors_in(drawn.args))] = drawn.args
        if len(group) == wanted:
            return list(group.values())
    return list(max(groups.values(), key=len).values()) if groups else []


def _with_other_floats(args: Sequence[Any], number: int) -> tuple[Any, ...]:
    return tuple(
        value * 1.5 + 0.25 * number if isinstance(value, float) else value for value in args
    )


@_explaining_floats
def one_graph_serves_all(subject: Subject, trial: Trial) -> Outcome:
    """Check that one graph serves every size and every float value, with fullgraph and dynamic.

    Where the reference itself needs more graphs for the same arguments, an operator may need as
    many: PyTorch decides by sizes that are computed, such as the one channel of a group.
    """
    listed = _of_one_structure(subject, trial, 4)
    if not listed:
        return Outcome(refused="no two draws of the operator differ in size alone")
    # Either backend counts graphs. Inductor takes seconds, so only one row of a full check uses it.
    with_inductor = subject.first and not subject.quick
    backend = CountingBackend("inductor" if with_inductor else "aot_eager")
    outcome = Outcome()
    with quiet_dynamo():
        compiled = _compiled(lambda *args: subject.call(*args), backend)
        floats = [_with_other_floats(listed[0], number) for number in range(1, 4)]
        has_floats = any(isinstance(value, float) for value in listed[0])
        kinds = [("sizes", listed), *([("values of a float", floats)] if has_floats else [])]
        tried: list[Sequence[Any]] = []
        for kind, several in kinds:
            tried += several
            for args in several:
                bar = subject.bar(args)
                outcome = judged(bar, outputs_in(compiled(*args)), "compiled ")
                if outcome.problem is not None:
                    return outcome
            if backend.graphs > 1 and backend.graphs > _graphs_of_the_reference(subject, tried):
                return Outcome(
                    f"{len(several)} {kind} made torch.compile build {backend.graphs} graphs"
                )
    return outcome


def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(
        function, backend=backend, fullgraph=True, dynamic=True
    )
    return compiled


def _graphs_of_the_reference(subject: Subject, several: Sequence[Sequence[Any]]) -> int:
    """Return how many graphs torch.compile builds of the reference for these argument lists; 1
    where the reference cannot be compiled as one graph."""
    from torch._dynamo.exc import TorchDynamoException  # Dynamo takes a second to import

    backend = CountingBackend("aot_eager")
    compiled = _compiled(lambda *args: subject.op.reference(*args), backend)
    try:
        for args in several:
            compiled(*args)
    except TorchDynamoException:
        return 1
    return backend.graphs


@_explaining_floats
def compiled_gradients_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge forward and backward of a compiled function, in one graph each."""
    bar, results_of = call_bar(subject, trial)
    with quiet_dynamo():
        results = results_of(_compiled(lambda *args: subject.call(*args), "aot_eager"))
    return judged(bar, results, "compiled ")


def autocast_like_the_reference(subject: Subject, trial: Trial) -> Outcome:
    """Judge dtype and values under torch.autocast, also where the inputs' dtypes are mixed.

    An implementation that does not support the inputs after autocast is not judged on them.
    """
    device, op = subject.device.type, subject.op
    outcome, refused = None, None
    floating = differentiable(op, trial.args)
    for autocast_dtype in (torch.bfloat16, torch.float16):
        if subject.interpreted and op.autocast and autocast_dtype == torch.bfloat16:
            continue  # the interpreter rounds bfloat16 wrongly
        narrowed = [tensor.to(autocast_dtype) for tensor in at(trial.args, floating[:1])]
        for args in (trial.args, filled(trial.args, floating[:1], narrowed)):

            def reference(
                values: Sequence[Any], autocast_dtype: torch.dtype = autocast_dtype
            ) -> list[Tensor]:
                # PyTorch's in-place operators do not autocast: the dtype of what is written stays.
                with torch.autocast(device, autocast_dtype, enabled=not op.mutates):
                    return subject.expected(*values)

            try:
                op.validate(*args)
                bar = Bar(reference, args, subject.bar(args).names)
            except (FuselabError, RuntimeError, TypeError, ValueError):
                continue  # the operator refuses this mixture of dtypes
            under = f"under autocast({device}, {autocast_dtype})"
            if op.autocast is not None and not op.mutates:
                cast = op.autocast(autocast_dtype, *args)
                reason = dispatch.why_not(op, subject.implementation, cast)
                if reason is not None:
                    refused = f"refuses inputs {under}: {reason}"
                    continue
            with torch.autocast(device, autocast_dtype):
                ours = subject.results(*args)
            outcome = judged(bar, ours, after=f" {under}")
            if outcome.problem is not None:
                return outcome
    return outcome or Outcome(refused=refused)


def transforms_like_the_reference(subject: Subject, trial: Trial) -> Outcome:
    """Judge torch.func.grad, vmap and vmap of grad; jvp must be right or refused."""
    args = trial.args
    places = subject.differentiable(args) or list(range(len(tensors_in(args))))
    outcome = Outcome()
    for name, transform in _transforms(places):
        if subject.op.gradient is None and name != "vmap":
            continue
        values = list(args)
        if name.startswith("vmap"):
            values = filled(args, places, [_batch_of_three(tensor) for tensor in at(args, places)])
        bar = Bar(lambda values: transform(subject.op.reference, values), values, [])  # noqa: B023
        try:
            ours = transform(subject.call, values)
        except Exception as error:
            if name == "jvp":
                continue
            return Outcome(f"torch.func.{name} raised {summary(error, 200)}")
        bar.names = [f"torch.func.{name} result {place}" for place in range(len(ours))]
        outcome = judged(bar, ours)
        if outcome.problem is not None:
            return outcome
    return outcome


def _batch_of_three(tensor: Tensor) -> Tensor:
    """Stack three samples for vmap, which differ if the tensor is floating."""
    if not tensor.is_floating_point():
        return torch.stack([tensor] * 3)
    return torch.stack([tensor, tensor * 0.5, tensor - 1])


Transform = Callable[[Callable[..., Any], Sequence[Any]], list[Tensor]]


def _transforms(places: Sequence[int]) -> list[tuple[str, Transform]]:
    def loss(function: Callable[..., Any], values: Sequence[Any]) -> Callable[..., Tensor]:
        def scalar(*tensors: Tensor) -> Tensor:
            outputs = outputs_in(function(*filled(values, places, tensors)))
            return sum_over(outputs, lambda output: (output * output).sum())

        return scalar

    argnums = tuple(range(len(places)))

    def grad(function: Callable[..., Any], values: Sequence[Any]) -> list[Tensor]:
        tensors = at(values, places)
        return list(torch.func.grad(loss(function, values), argnums)(*tensors))

    def vmap(function: Callable[..., Any], values: Sequence[Any]) -> list[Tensor]:
        def of_sample(*one: Tensor) -> tuple[Tensor, ...]:
            return outputs_in(function(*filled(values, places, one)))

        return list(torch.vmap(of_sample)(*at(values, places)))

    def vmap_grad(function: Callable[..., Any], values: Sequence[Any]) -> list[Tensor]:
        tensors = at(values, places)
        return list(torch.vmap(torch.func.grad(loss(function, values), argnums))(*tensors))

    def jvp(function: Callable[..., Any], values: Sequence[Any]) -> list[Tensor]:
        tensors = tuple(tensor.detach() for tensor in at(values, places))
        tangents = tuple(torch.ones_like(tensor) for tensor in tensors)

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(floating(outputs_in(function(*filled(values, places, tensors)))))

        results: Any = torch.func.jvp(of_tensors, tensors, tangents)
        return [tensor for of_kind in results for tensor in of_kind]

    return [("grad", grad), ("vmap", vmap), ("vmap(grad)", vmap_grad), ("jvp", jvp)]


def deterministic_mode_repeats(subject: Subject, trial: Trial) -> Outcome:
    """Check that forward and backward repeat their bits under
    torch.use_deterministic_algorithms(True)."""
    places = subject.differentiable(trial.args) if subject.op.gradient is not None else []
    upstream = subject.upstream(trial) if places else None
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            if places:
                results = with_gradients(subject.call, places, [*trial.args, upstream])
            else:
                results = [*subject.results(*trial.args)]
            runs.append([storage_like(value) for value in results if value is not None])
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
    for again in runs[1:]:
        if not all(torch.equal(one, other) for one, other in zip(runs[0], again, strict=True)):
            return Outcome("two runs differ under torch.use_deterministic_algorithms(True)")
    return Outcome()


def _narrow(subject: Subject) -> tuple[Verdict, str] | None:
    """Return None unless autocast leaves this dtype unchanged, as it does float64 and integers."""
    if subject.dtype == torch.float64 or not subject.dtype.is_floating_point:
        return Verdict.SKIPPED, f"autocast leaves {subject.dtype_name} alone"
    return None


def _returns_new(subject: Subject) -> tuple[Verdict, str] | None:
    if subject.op.mutates:
        return Verdict.SKIPPED, "no transform of torch.func follows what is written over"
    return None


CHECKS = (
    # The raw operators under torch.library.opcheck.
    Check(
        "operator",
        raw_operators_are_sound,
        quick=1,
        full=4,
        max_numel=256,
        shrink_tries=0,
        once=True,
    ),
    # One graph for all sizes and float values.
    Check(
        "compile", one_graph_serves_all, quick=1, full=2, max_numel=512, shrink_tries=0, once=True
    ),
    # Gradients of a compiled function.
    Check(
        "compiled gradients",
        compiled_gradients_are_right,
        quick=1,
        full=3,
        max_numel=512,
        applies=has_gradient,
        shrink_tries=0,
        once=True,
    ),
    # Dtype and values under torch.autocast.
    Check(
        "autocast", autocast_like_the_reference, quick=4, full=12, max_numel=512, applies=_narrow
    ),
    # Grad, vmap and their composition; jvp.
    Check(
        "torch.func",
        transforms_like_the_reference,
        quick=2,
        full=8,
        max_numel=256,
        applies=_returns_new,
        shrink_tries=20,
        once=True,
    ),
    # The same bits under use_deterministic_algorithms.
    Check(
        "deterministic mode",
        deterministic_mode_repeats,
        layouts=LAYOUTS,
        quick=2,
        full=8,
        max_numel=2048,
        once=True,
    ),
)
