"""The larger levers tried on a TARGET: the step under each, timed in turn with the step as it is.

A lever is a setting of PyTorch that needs no change of the model's code. Beside the time stands
what it does to the numbers: the outputs are compared with those of the step as it is, on the same
weights and inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fuselab import structures
from fuselab.inspect import targets
from fuselab.inspect.profile import target_step
from fuselab.inspect.targets import Target
from fuselab.inspect.user_code import plain
from fuselab.measure.statistics import median_interval
from fuselab.measure.steady_step import seconds_of, time_steps
from fuselab.measure.verdict import verdict

BUDGET_S = 4.0
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Trial:
    """One lever. ``us`` is the median step, ``difference`` the norm of the outputs' change over
    their own norm; None if they have other shapes or none. ``reason`` says why it did not run."""

    name: str
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    speedup: float | None = None
    outcome: str | None = None
    difference: float | None = None
    note: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class _Lever:
    """A lever before it runs: how to make its target, and a context around every step."""

    name: str
    make: Callable[[], Target]
    around: Callable[[], Any] | None = None
    samples: float = 1.0  # how many times as many rows a step has
    note: str | None = None


def try_levers(
    target: Target,
    *,
    backward: bool = False,
    budget_s: float = BUDGET_S,
    progress: Callable[[str], None] = lambda words: None,
) -> list[Trial]:
    """Time a TARGET's step under every lever that applies to it; the first row is as it is.

    On a CPU: autocast to bfloat16, channels-last for images, a fused optimizer, twice the batch
    (its time is per batch as it is) and torch.compile. On a GPU also TF32, and torch.compile with
    CUDA graphs. A lever that raises is a row with its reason. Raises TargetError if the target
    itself fails.
    """
    expected = _outputs(target, target, None)
    ready: list[tuple[_Lever, Target, float | None]] = [
        (_Lever(AS_IT_IS, lambda: target), target, None)
    ]
    failed: list[Trial] = []
    # All outputs come first: a step with an optimizer changes the weights that they share.
    for lever in _levers(target, backward):
        progress(f"running it with {lever.name}")
        try:
            changed = lever.make()
            ready.append(
                (lever, changed, _difference(_outputs(changed, target, lever.around), expected))
            )
        except Exception as error:  # torch.compile and autocast raise whatever a model makes them
            failed.append(_failed(lever, error))
    steps: dict[str, Callable[[], Any]] = {}
    made: dict[str, tuple[_Lever, float | None]] = {}
    for lever, changed, difference in ready:
        step = _step(changed, backward, lever)
        try:
            seconds_of(step, target.device)
        except Exception as error:
            if lever.name == AS_IT_IS:
                raise
            failed.append(_failed(lever, error))
            continue
        steps[lever.name] = step
        made[lever.name] = lever, difference
    progress("timing them in turn")
    timed = time_steps(steps, target.device, budget_s)
    rows = []
    for name, (lever, difference) in made.items():
        samples = timed[name]
        if not samples.times_us:
            rows.append(Trial(name, reason=plain(samples.failed, 120)))
            continue
        times = [us / lever.samples for us in samples.times_us]
        found = verdict(times, timed[AS_IT_IS].times_us)
        _, low, high = median_interval(times)
        is_first = name == AS_IT_IS
        rows.append(
            Trial(
                name,
                median(times),
                low,
                high,
                found.speedup,
                None if is_first else str(found.outcome),
                None if is_first else difference,
                lever.note,
            )
        )
    return [*rows, *failed]


def _failed(lever: _Lever, error: Exception) -> Trial:
    return Trial(lever.name, reason=plain(f"{type(error).__name__}: {error}", 120).rstrip("."))


def _levers(target: Target, backward: bool) -> Iterator[_Lever]:
    on_gpu = target.device.type == "cuda"
    if on_gpu:
        yield _Lever("TF32", lambda: target, _tf32)
    yield _Lever("bfloat16 autocast", lambda: _autocast(target))
    if target.is_module and any(
        leaf.dim() == 4 for leaf in structures.tensors((target.args, target.kwargs))
    ):
        yield _Lever("channels-last", lambda: _channels_last(target))
    if backward and _takes_fused(target):
        yield _Lever("fused optimizer", lambda: replace(target, optimizer=_fused(target)))
    if targets.batch_size(target) > 0:
        yield _Lever(
            "twice the batch", lambda: _twice(target), samples=2.0, note="per batch as it is"
        )
    yield _Lever("torch.compile", lambda: replace(target, callable=torch.compile(target.callable)))
    if on_gpu:
        yield _Lever(
            "torch.compile, CUDA graphs",
            lambda: replace(
                target, callable=torch.compile(target.callable, mode="reduce-overhead")
            ),
        )


def _step(target: Target, backward: bool, lever: _Lever) -> Callable[[], Any]:
    step = target_step(target, backward)
    around = lever.around
    if around is None:
        return step

    def wrapped() -> Any:
        with around():
            return step()

    return wrapped


# --- the levers ----------------------------------------------------------------------------------


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _InAutocast(nn.Module):
    def __init__(self, module: nn.Module, device_type: str) -> None:
        super().__init__()
        self.module, self.device_type = module, device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, torch.bfloat16):
            return self.module(*args, **kwargs)


def _autocast(target: Target) -> Target:
    kind, function = target.device.type, target.callable
    if isinstance(function, nn.Module):
        return replace(target, callable=_InAutocast(function, kind))

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, torch.bfloat16):
            return function(*args, **kwargs)

    return replace(target, callable=cast)


def _channels_last(target: Target) -> Target:
    assert isinstance(target.callable, nn.Module)
    module = copy.deepcopy(target.callable)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def turn(leaf: Any) -> Any:
        is_image = isinstance(leaf, Tensor) and leaf.dim() == 4
        return leaf.contiguous(memory_format=torch.channels_last) if is_image else leaf

    args, kwargs = structures.mapped((target.args, dict(target.kwargs)), turn)
    return replace(target, callable=module, args=args, kwargs=kwargs)


def _takes_fused(target: Target) -> bool:
    module, make = target.callable, target.optimizer
    return make is not None and isinstance(module, nn.Module) and isinstance(make(module), FUSED)


def _fused(target: Target) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        assert target.optimizer is not None
        optimizer = target.optimizer(module)
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        return optimizer

    return make


def _twice(target: Target) -> Target:
    args, kwargs = targets.with_batch(target, 2 * targets.batch_size(target))
    return replace(target, args=args, kwargs=kwargs)


# --- what a lever does to the numbers ------------------------------------------------------------


def _outputs(target: Target, original: Target, around: Callable[[], Any] | None) -> list[Tensor]:
    """Return the floating outputs of one forward, with the same random numbers for every lever."""
    if isinstance(original.callable, nn.Module):
        original.callable.eval()
    if isinstance(target.callable, nn.Module):
        target.callable.eval()
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(targets.SEED)
        with torch.no_grad():
            if around is None:
                output = target.run()
            else:
                with around():
                    output = target.run()
    return [
        leaf.detach().clone() for leaf in structures.tensors(output) if leaf.is_floating_point()
    ]


def _difference(found: list[Tensor], expected: list[Tensor]) -> float | None:
    """Return the norm of the difference over the norm of what is expected."""
    if not expected or [a.shape for a in found] != [b.shape for b in expected]:
        return None
    change = sum(
        float((a.double() - b.double()).square().sum())
        for a, b in zip(found, expected, strict=True)
    )
    whole = sum(float(b.double().square().sum()) for b in expected)
    return (change / whole) ** 0.5 if whole > 0 else None
