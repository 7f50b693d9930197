"""Modules drawn by a seed: a product and, behind it, a random chain of memory-bound operations.

Run as a script it fuses many of them and prints those that ``fuse`` does not cover or gets wrong:

    PYTHONPATH=src python tests/fusion/random_modules.py FIRST_SEED COUNT
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.fusion import fuse as fuse_module
from fuselab.fusion.fuse import Decision, FuseResult, fuse_with_report
from fuselab.measure.verdict import Outcome, Verdict

BATCH, CHANNELS, HEIGHT = 32, 16, 12
LARGEST_CHAIN = 6

ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Hardtanh,
    nn.Mish,
    nn.ELU,
    lambda: nn.ReLU(inplace=True),
    lambda: nn.LeakyReLU(0.2),
    lambda: nn.Softplus(),
    lambda: nn.Hardswish(),
)
FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x * 0.5,
    lambda x: x + 1.5,
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x * torch.sigmoid(x),
    lambda x: torch.clamp(x, -2.0, 2.0),
    lambda x: x.abs() + x,
    lambda x: F.relu(x) ** 2,
    lambda x: x / (1 + x.abs()),
    lambda x: F.softmax(x, dim=-1),
    lambda x: x.square().sum(-1, keepdim=True).sqrt() + x,
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: F.softmax(x, dim=1),
)
REDUCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.sum(-1),
    lambda x: x.mean(dim=1),
    lambda x: torch.logsumexp(x, dim=-1),
    lambda x: x.amax(dim=-1),
    lambda x: x.norm(dim=-1),
)


class RandomModule(nn.Module):
    """A product, a chain of drawn operations with parameters in between, perhaps a reduction."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        source = random.Random(seed)
        torch.manual_seed(seed)
        self.is_image = source.random() < 0.5
        self.product: nn.Module
        if self.is_image:
            self.product = nn.Conv2d(3, CHANNELS, 3, padding=1)
            norms = [
                lambda: nn.GroupNorm(4, CHANNELS),
                lambda: nn.BatchNorm2d(CHANNELS),
                lambda: nn.InstanceNorm2d(CHANNELS),
            ]
            shape = (CHANNELS, 1, 1)
        else:
            self.product = nn.Linear(24, 384, bias=source.random() < 0.7)
            norms = [
                lambda: nn.LayerNorm(384),
                lambda: nn.GroupNorm(8, 384),
                lambda: nn.BatchNorm1d(384),
                lambda: nn.RMSNorm(384),
            ]
            shape = (384,)
        self.steps: list[tuple[str, int]] = []
        self.layers = nn.ModuleList()
        self.weights = nn.ParameterList()
        for _ in range(source.randint(2, LARGEST_CHAIN)):
            kind = source.choice(("activation", "function", "function", "norm", "add", "mul"))
            if kind == "function":
                self.steps.append((kind, source.randrange(len(FUNCTIONS))))
            elif kind in ("add", "mul"):
                self.steps.append((kind, len(self.weights)))
                self.weights.append(nn.Parameter(torch.randn(shape)))
            else:
                made = source.choice(ACTIVATIONS if kind == "activation" else norms)()
                self.steps.append(("layer", len(self.layers)))
                self.layers.append(made)
        self.reduction = source.choice([None, None, *range(len(REDUCTIONS))])

    def forward(self, input: Tensor) -> Tensor:
        value = self.product(input)
        for kind, place in self.steps:
            if kind == "layer":
                value = self.layers[place](value)
            elif kind == "function":
                value = FUNCTIONS[place](value)
            elif kind == "add":
                value = value + self.weights[place]
            else:
                value = value * self.weights[place]
        return value if self.reduction is None else REDUCTIONS[self.reduction](value)

    def example(self) -> Tensor:
        """Return an input."""
        shape = (BATCH, 3, HEIGHT, HEIGHT) if self.is_image else (BATCH, 24)
        return torch.randn(shape)


@dataclass(frozen=True)
class Outcomes:
    """What ``fuse`` made of a module: its result, and what is not as it should be."""

    result: FuseResult
    problems: tuple[str, ...]


def fused(seed: int, training: bool) -> Outcomes:
    """Fuse a module, every kernel measured as faster, and compare it with the original."""
    module = RandomModule(seed).train(training)
    for layer in module.layers:
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            layer.eval()  # in training it updates its statistics, which no kernel does
    input = module.example()
    before = fuse_module.measure
    verdict = Verdict(Outcome.FASTER, 2.0, 2.0, 2.0, 12)
    fuse_module.measure = lambda *args, **kwargs: (2.0, 1.0, verdict)
    try:
        result = fuse_with_report(module, input)
    finally:
        fuse_module.measure = before
    problems = [
        f"{tried.decision}: {tried.chain}: {tried.reason}"
        for tried in result.replacements
        if tried.folder is not None and tried.decision is not Decision.KEPT
    ]
    problems += [f"left: {left.reason}" for left in result.left if "bytes" not in left.reason]
    problems += [f"outside of any kernel: {name}" for name in outside(module, result, input)]
    if "proved against float64" not in result.proof:
        problems.append(result.proof)
    return Outcomes(result, tuple(problems))


def outside(module: RandomModule, result: FuseResult, input: Tensor) -> list[str]:
    """Return the calls that the fused model still makes beside its product and its kernels."""
    source = getattr(type(result.model), "fused_source", None)
    if source is None:
        return [] if len(module.steps) < 2 else ["everything"]
    calls = [
        line.partition(" = ")[2].partition(";")[0]
        for line in source.splitlines()
        if " = " in line and "(" in line and " = getattr(" not in line
    ]
    skipped = ("fuselab_ops", "self.product", "torch.nn.functional.linear")
    return [call for call in calls if not call.startswith(skipped)]


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:3])
    bad = 0
    for seed in range(first, first + count):
        for training in (False, True):
            try:
                problems = fused(seed, training).problems
            except Exception as error:
                problems = (f"{type(error).__name__}: {error}",)
            bad += bool(problems)
            print(f"{seed} {'training' if training else 'eval'}: {problems or 'covered, right'}")
    print(f"{bad} of {2 * count} not as they should be")
