"""Prove one replacement against the original, and measure whether it is worth keeping."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from fuselab import structures
from fuselab.errors import TargetError
from fuselab.fusion.emit import Region
from fuselab.fusion.equal_dropout import EqualDropout
from fuselab.measure.interleave import Candidate, interleave
from fuselab.measure.steady_step import steady, step
from fuselab.measure.verdict import FEWEST_ROUNDS, Outcome, Verdict, verdict
from fuselab.prove.accuracy import Bar
from fuselab.runtime import fallback

_LARGEST_FLOAT64_COPY_BYTES = 4 << 30


def values_of(graph: fx.Graph, module: nn.Module, tensors: Sequence[Tensor]) -> dict[fx.Node, Any]:
    """Return the value of every node of a traced forward, as it was before a later in-place
    change."""
    interpreter = _Recorder(fx.GraphModule(module, graph))
    with torch.random.fork_rng(devices=sorted({t.device.index for t in tensors if t.is_cuda})):
        interpreter.run(*tensors)
    # The interpreter runs a copy of the graph, whose nodes have the same order.
    return dict(
        zip(
            graph.nodes,
            (interpreter.recorded.get(node) for node in interpreter.graph.nodes),
            strict=True,
        )
    )


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.recorded: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.recorded[n] = pytree.tree_map_only(
            Tensor,
            lambda tensor: tensor.detach().clone().requires_grad_(_differentiable(tensor)),
            value,
        )
        return value


def _differentiable(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_floating_point()


def prove_region(region: Region, inputs: Sequence[Any]) -> str | None:
    """Return None if outputs and gradients of ``region.after`` meet the bar, else what does not.

    Where the region does not run in float64 (a norm of ``x.float()``, whose weights are float64
    then), both are compared in their own dtypes.
    """
    return _prove(region.before, region.after, inputs, {}, or_near=True)


def prove_model(
    original: nn.Module, fused: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> str | None:
    """Prove whole models, outputs and gradients, as ``prove_region``; call ``can_copy`` first."""
    return _prove(original, fused, args, kwargs)


def prove_outputs(
    original: nn.Module, fused: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> str | None:
    """Prove the outputs only, for a model that cannot be differentiated."""
    with torch.no_grad():
        return _prove(original, fused, args, kwargs)


def near_outputs(
    original: nn.Module, fused: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> str | None:
    """Return None if outputs in the model's own dtype are near the original's, else which is not.

    This is for a model that does not run in float64. The error may be the square root of the
    dtype's eps times the output's largest magnitude.
    """
    outputs = []
    for model in (original, fused):
        given = pytree.tree_map_only(Tensor, Tensor.clone, (tuple(args), kwargs))
        leaves = pytree.tree_leaves(given)
        with torch.no_grad(), torch.random.fork_rng(devices=_devices(leaves)):
            torch.manual_seed(0)
            with EqualDropout():
                output = model(*given[0], **given[1])
        outputs.append(structures.tensors(output))
    pairs = enumerate(zip(*outputs, strict=True))
    return next((text for place, pair in pairs if (text := _far(place, *pair))), None)


def _far(place: int, expected: Tensor | None, actual: Tensor | None) -> str | None:
    """Return a sentence if a result is not near the original's, in the original's dtype."""
    if expected is None or actual is None:
        other = actual if expected is None else expected
        same = other is None or not other.any()  # a gradient of zero, or none
    elif expected.shape != actual.shape or expected.dtype != actual.dtype:
        same = False
    elif not expected.is_floating_point():
        same = torch.equal(expected, actual)
    else:
        largest = expected.nan_to_num(0.0, 0.0, 0.0).abs().amax() if expected.numel() else 0.0
        bound = float(largest) * torch.finfo(expected.dtype).eps ** 0.5
        same = torch.allclose(actual, expected, rtol=0.0, atol=bound, equal_nan=True)
    return None if same else f"output {place} is another"


def can_copy(model: nn.Module) -> bool:
    """Return whether a float64 copy of the model's parameters is small enough to prove it whole."""
    return 8 * sum(value.numel() for value in model.parameters()) <= _LARGEST_FLOAT64_COPY_BYTES


def _prove(
    before: nn.Module,
    after: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    or_near: bool = False,
) -> str | None:
    leaves, structure = pytree.tree_flatten((tuple(args), kwargs))
    buffers = dict(before.named_buffers())
    state: dict[str, Tensor] = {**dict(before.named_parameters()), **buffers}
    values = [
        *(_leaf(leaf) for leaf in leaves),
        *(value.detach().clone().requires_grad_(value.requires_grad) for value in state.values()),
    ]
    upstream: list[Tensor] = []

    def evaluate(module: nn.Module, values: Sequence[Any]) -> list[Tensor | None]:
        given, carried = values[: len(leaves)], values[len(leaves) :]
        # In-place operations and running statistics must not change the caller's tensors.
        given = [value.clone() if isinstance(value, Tensor) else value for value in given]
        args, kwargs = pytree.tree_unflatten(given, structure)
        carried = [value if value.requires_grad else value.clone() for value in carried]
        with torch.random.fork_rng(devices=_devices(values)):
            torch.manual_seed(0)
            with EqualDropout():
                state_of = dict(zip(state, carried, strict=True))
                output = functional_call(module, state_of, args, kwargs)
        results = structures.tensors(output)
        floating = [one for one in results if one.is_floating_point() or one.is_complex()]
        if not upstream:
            generator = torch.Generator().manual_seed(1)
            upstream.extend(
                torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one.device)
                for one in floating
            )
        # An operator may attach a gradient, which is zero, where eager has none: of a parameter
        # that is only compared with.
        pairs = [
            (one, grad.to(one.dtype))
            for one, grad in zip(floating, upstream, strict=True)
            if one.requires_grad
        ]
        wanted = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            roots, given_grads = zip(*pairs, strict=True)
            grads = torch.autograd.grad(roots, wanted, given_grads, allow_unused=True)
        # Running statistics are results too.
        updated = carried[len(carried) - len(buffers) :]
        return [*(value.detach() for value in (*results, *updated)), *grads]

    try:
        bar = Bar(functools.partial(evaluate, before), values, [])
    except RuntimeError:
        if not or_near:
            raise
        with fallback.strict():
            pairs = zip(evaluate(before, values), evaluate(after, values), strict=True)
        return next(
            (text for place, pair in enumerate(pairs) if (text := _far(place, *pair))), None
        )
    with fallback.strict():
        results = evaluate(after, values)
    problems = [judgement.problem for judgement in bar.judge(results) if judgement.problem]
    return problems[0] if problems else None


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(_differentiable(leaf))
    return leaf


def _devices(values: Sequence[Any]) -> list[int]:
    return sorted(
        {value.device.index for value in values if isinstance(value, Tensor) and value.is_cuda}
    )


def measure(
    before: Callable[..., Any],
    after: Callable[..., Any],
    args: Sequence[Any],
    parameters: Sequence[Tensor],
    *,
    training: bool,
    budget_s: float,
) -> tuple[float, float, Verdict]:
    """Return the median us per call of both, and the verdict on ``after``.

    The time is what a training or serving loop sees: steady-state wall time, warm, including the
    host's own time; forward and backward if ``training``, else the forward without gradients.
    """
    device = next(
        (value.device for value in args if isinstance(value, Tensor)), torch.device("cpu")
    )
    calls, counts = {}, {}
    for name, function in (("before", before), ("after", after)):
        once = step(function, args, {}, parameters, backward=training)
        calls[name], counts[name] = steady(once, device)
    with fallback.strict():
        samples = interleave(
            [Candidate(name, call) for name, call in calls.items()],
            torch.device("cpu"),
            cold=False,
            budget_s=budget_s,
            fewest=FEWEST_ROUNDS,
            decided=lambda times: (
                verdict(times["after"], times["before"]).outcome is not Outcome.UNCLEAR
            ),
        )
    failed = next((result.failed for result in samples.values() if result.failed), None)
    if failed is not None:
        raise TargetError(f"the model raised while it was timed: {failed}")
    times = {name: result.times_us for name, result in samples.items()}
    decision = verdict(times["after"], times["before"])
    middle = {name: median(values) / counts[name] for name, values in times.items()}
    return middle["before"], middle["after"], decision
