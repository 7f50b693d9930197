"""Modules drawn by a seed: a product and, behind it, a random chain of memory-bound operations.

Run as a script it fuses many of them and prints those that ``fuse`` does not cover or gets wrong:

    PYTHONPATH=src python tests/fusion/random_modules.py FIRST_SEED COUNT [float64|bfloat16]
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.ejection.groups import ARRANGING
from fuselab.fusion import fuse as fuse_module
from fuselab.fusion.chains import ChainFinder
from fuselab.fusion.fuse import fuse_with_report
from fuselab.fusion.generate import Generator
from fuselab.fusion.judge import values_of
from fuselab.fusion.result import Decision, FuseResult
from fuselab.fusion.trace import Call, trace_forward
from fuselab.measure.verdict import Outcome, Verdict

LARGEST_CHAIN = 6
PRODUCTS = frozenset(("bmm", "einsum", "linear", "matmul", "product"))

# A product with its weights: the class and its arguments, and the shape of an input.
LAYERS: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.Linear(24, 384), (32, 24)),
    (lambda: nn.Linear(24, 384, bias=False), (32, 24)),
    (lambda: nn.Linear(24, 48), (8, 40, 24)),
    (lambda: nn.Linear(12, 16), (4, 6, 48, 12)),
    (lambda: nn.Conv1d(6, 24, 3, padding=1), (8, 6, 72)),
    (lambda: nn.Conv2d(3, 16, 3, padding=1), (8, 3, 12, 12)),
    (lambda: nn.Conv2d(4, 16, 1, bias=False), (8, 4, 12, 12)),
    (lambda: nn.Conv3d(3, 8, 3, padding=1), (4, 3, 4, 10, 12)),
    (lambda: nn.ConvTranspose2d(4, 16, 2, stride=2), (8, 4, 6, 6)),
)
# A product of two inputs, and their shapes.
FUNCTIONS_OF_TWO: tuple[tuple[Callable[[Tensor, Tensor], Tensor], Any], ...] = (
    (lambda x, y: x @ y, ((64, 40), (40, 192))),
    (torch.matmul, ((4, 6, 24, 16), (4, 6, 16, 24))),
    (torch.bmm, ((8, 40, 24), (8, 24, 48))),
    (lambda x, y: torch.einsum("bqhd,bkhd->bhqk", x, y), ((4, 24, 6, 8), (4, 24, 6, 8))),
)
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.GELU,
    lambda: nn.GELU(approximate="tanh"),
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Hardtanh,
    nn.Mish,
    nn.ELU,
    nn.SELU,
    nn.Softsign,
    nn.LogSigmoid,
    nn.Hardsigmoid,
    nn.PReLU,
    nn.ReLU6,
    lambda: nn.ReLU(inplace=True),
    lambda: nn.LeakyReLU(0.2),
    lambda: nn.Softplus(),
    lambda: nn.Hardswish(),
    lambda: nn.Softshrink(0.3),
    lambda: nn.CELU(1.5),
    lambda: nn.Threshold(0.1, 0.2),
    lambda: nn.Dropout(0.4),
)
# A pointwise function of a value.
POINTWISE: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x * 0.5,
    lambda x: 1.5 + x,
    lambda x: 2 - x,
    lambda x: x / 3,
    lambda x: -x,
    lambda x: x * torch.sigmoid(x),
    lambda x: torch.clamp(x, -2.0, 2.0),
    lambda x: x.clamp_min(0.1).log(),
    lambda x: x.abs() + x,
    lambda x: F.relu(x) ** 2,
    lambda x: F.relu(x).square(),
    lambda x: x / (1 + x.abs()),
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: x.masked_fill(x < -1, 0.5),
    lambda x: torch.erf(x) * x,
    lambda x: torch.exp(-x.square()),
    lambda x: torch.sin(x) + torch.cos(x),
    lambda x: (x.abs() + 0.1).rsqrt(),
    lambda x: torch.log1p(x.abs()),
    lambda x: x.tanh().mul(3).add(0.5),
    lambda x: torch.lerp(x, x.tanh(), 0.3),
    lambda x: torch.maximum(x, 0.3 * x),
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: F.softplus(x, beta=2.0),
    lambda x: F.dropout(x, 0.3, False),
    lambda x: F.hardtanh(x, -0.5, 1.5),
)
# A function of a value and a dimension, which keeps the shape.
ALONG: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda x, dim: F.softmax(x, dim=dim),
    lambda x, dim: torch.softmax(x * 0.3, dim),
    lambda x, dim: F.log_softmax(x, dim=dim),
    lambda x, dim: x - x.mean(dim, keepdim=True),
    lambda x, dim: x.square().sum(dim, keepdim=True).sqrt() + x,
    lambda x, dim: F.normalize(x, dim=dim),
    lambda x, dim: x / (x.amax(dim, keepdim=True).abs() + 1),
    lambda x, dim: x - torch.logsumexp(x, dim, keepdim=True),
    lambda x, dim: x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-5),
    lambda x, dim: (x - x.mean(dim, keepdim=True)) / (x.std(dim, keepdim=True) + 0.1),
    lambda x, dim: x * torch.sigmoid(x.mean(dim, keepdim=True)),
)
REDUCTIONS: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda x, dim: x.sum(dim),
    lambda x, dim: x.mean(dim=dim),
    lambda x, dim: torch.logsumexp(x, dim=dim),
    lambda x, dim: x.amax(dim=dim),
    lambda x, dim: x.amin(dim),
    lambda x, dim: x.norm(dim=dim),
    lambda x, dim: x.var(dim),
    lambda x, dim: x.std(dim, keepdim=True),
    lambda x, dim: x.abs().mean(dim, keepdim=True),
    lambda x, dim: x.mean((0, dim)),
    lambda x, dim: x.max(dim).values,
    lambda x, dim: torch.sum(x.square(), dim=(0, dim)),
)
# A combination with a tensor that broadcasts: a parameter, a buffer or an earlier value.
COMBINED: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: y - x,
    lambda x, y: x.mul(y),
    lambda x, y: torch.add(x, y, alpha=0.5),
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: torch.maximum(x, y),
    lambda x, y: torch.where(y > 0, x, x * 0.1),
    lambda x, y: torch.addcmul(x, x, y, value=0.2),
)
STEPS = ("activation", "pointwise", "pointwise", "along", "norm", "parameter", "buffer", "earlier")


@dataclass(frozen=True)
class Step:
    """One step of a chain: its kind, its place in the kind's table, and a dimension or the name of
    the tensor that it takes."""

    kind: str
    place: int
    argument: Any = None


class RandomModule(nn.Module):
    """A product, a chain of drawn operations with parameters in between, perhaps a reduction."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.source = random.Random(seed)
        torch.manual_seed(seed)
        self.product: nn.Module | None = None
        self.of_two: int | None = None
        if self.source.random() < 0.7:
            make, *self.shapes = self.source.choice(LAYERS)
            self.product = make()
        else:
            self.of_two = self.source.randrange(len(FUNCTIONS_OF_TWO))
            self.shapes = list(FUNCTIONS_OF_TWO[self.of_two][1])
        self.is_image = isinstance(self.product, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        self.steps: list[Step] = []
        self.layers = nn.ModuleList()
        self.weights = nn.ParameterList()
        value = self.multiplied(*self.example())
        shape = value.shape
        for _ in range(self.source.randint(1, LARGEST_CHAIN)):
            self.steps.append(self.drawn(self.source.choice(STEPS), shape))
        if self.source.random() < 0.5:
            self.steps.append(self.drawn("reduction", shape))
            if self.source.random() < 0.5:
                self.steps.append(self.drawn("pointwise", shape))

    def drawn(self, kind: str, shape: Sequence[int]) -> Step:
        """Return a step of a kind on a value of a shape, and make its layer or its tensor."""
        choose, rank = self.source.choice, len(shape)
        if kind in ("activation", "norm"):
            made = choose(ACTIVATIONS if kind == "activation" else self.norms(shape))()
            self.layers.append(made)
            return Step("layer", len(self.layers) - 1)
        if kind in ("parameter", "buffer"):
            kept = choose([0, 1, 1, rank - 1, rank])
            own = list(shape[rank - kept :]) if not self.is_image else [shape[1]] + [1] * (rank - 2)
            name = f"{kind}_{len(self.steps)}"
            if kind == "parameter":
                self.register_parameter(name, nn.Parameter(torch.randn(own)))
            else:
                self.register_buffer(name, torch.randn(own))
            return Step("combined", self.source.randrange(len(COMBINED)), name)
        if kind == "earlier":
            place = self.source.randint(0, len(self.steps))
            return Step("combined", self.source.randrange(len(COMBINED)), place)
        table = {"pointwise": POINTWISE, "along": ALONG, "reduction": REDUCTIONS}[kind]
        dim = choose([1, rank - 1, -1])
        return Step(kind, self.source.randrange(len(table)), dim)

    def norms(self, shape: Sequence[int]) -> list[Callable[[], nn.Module]]:
        """Return the norms that take a value of a shape."""
        rank, channels, last = len(shape), shape[1], shape[-1]
        found: list[Callable[[], nn.Module]] = [
            lambda: nn.LayerNorm(last),
            lambda: nn.LayerNorm(shape[1:], elementwise_affine=False),
            lambda: nn.RMSNorm(last, eps=1e-5),
            lambda: nn.GroupNorm(8, channels) if channels % 8 == 0 else nn.GroupNorm(1, channels),
        ]
        batch = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[rank]
        found += [lambda: batch(channels), lambda: batch(channels, track_running_stats=False)]
        if rank > 2:
            instance = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}[rank]
            found += [
                lambda: instance(channels),
                lambda: instance(channels, affine=True),
                lambda: instance(channels, affine=True, track_running_stats=True),
            ]
        return found

    def multiplied(self, *inputs: Tensor) -> Tensor:
        if self.of_two is not None:
            return FUNCTIONS_OF_TWO[self.of_two][0](*inputs)
        assert self.product is not None
        product: Tensor = self.product(*inputs)
        return product

    def forward(self, *inputs: Tensor) -> Tensor:
        value = self.multiplied(*inputs)
        values = [value]
        for step in self.steps:
            if step.kind == "layer":
                value = self.layers[step.place](value)
            elif step.kind == "pointwise":
                value = POINTWISE[step.place](value)
            elif step.kind == "along":
                value = ALONG[step.place](value, step.argument)
            elif step.kind == "reduction":
                value = REDUCTIONS[step.place](value, step.argument)
            else:
                named = isinstance(step.argument, str)
                other = getattr(self, step.argument) if named else values[step.argument]
                value = COMBINED[step.place](value, other)
            values.append(value)
        return value

    def example(self) -> tuple[Tensor, ...]:
        """Return inputs."""
        return tuple(torch.randn(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Outcomes:
    """What ``fuse`` made of a module: its result, and what is not as it should be."""

    result: FuseResult
    problems: tuple[str, ...]


def drawn_module(seed: int, training: bool) -> RandomModule:
    """Return a module, in training or in evaluation."""
    module = RandomModule(seed).train(training)
    dropouts = [layer for layer in module.layers if isinstance(layer, nn.Dropout)]
    for layer in dropouts[1:]:  # a chain has one dropout
        layer.eval()
    return module


def without_kernel(seed: int, training: bool) -> list[str]:
    """Return the names of the operations of a module that neither its product nor a kernel would
    compute. Kernels are planned and not compiled, so that this takes half a second."""
    module = drawn_module(seed, training)
    traced = trace_forward("", module, Call(module.example(), {}))
    finder = ChainFinder(traced, values_of(traced.graph, traced.module, traced.tensors), ())
    written = Generator(lambda text: None).written(finder, finder.chains())
    held = {node for one in written for node in one.chain.nodes}
    left = [node for node in finder.calls if node not in held and str(node.target) != "product"]
    names = [finder.name_of(node) for node in left]
    return [name for name in names if name not in PRODUCTS | ARRANGING]


def fused(seed: int, training: bool, dtype: torch.dtype = torch.float32) -> Outcomes:
    """Fuse a module, every kernel measured as faster, and compare it with the original."""
    module = drawn_module(seed, training).to(dtype)
    inputs = tuple(one.to(dtype) for one in module.example())
    before = fuse_module.measure
    verdict = Verdict(Outcome.FASTER, 2.0, 2.0, 2.0, 12)
    fuse_module.measure = lambda *args, **kwargs: (2.0, 1.0, verdict)
    try:
        result = fuse_with_report(module, inputs)
    finally:
        fuse_module.measure = before
    problems = [
        f"{tried.decision}: {tried.chain}: {tried.reason}"
        for tried in result.replacements
        if tried.folder is not None and tried.decision is not Decision.KEPT
    ]
    problems += [f"left: {left.reason}" for left in result.left]
    problems += [f"outside of any kernel: {name}" for name in outside(module, result)]
    if result.kept and "proved against float64" not in result.proof:
        problems.append(result.proof)
    return Outcomes(result, tuple(problems))


def outside(module: RandomModule, result: FuseResult) -> list[str]:
    """Return the operations that the fused model still computes beside its product and its kernels,
    unless a single one stands behind the product, which eager computes in one pass too. A dropout
    in evaluation gives back its input."""
    dropouts = {
        f"getattr(self.layers, '{place}')"
        for place, layer in enumerate(module.layers)
        if isinstance(layer, nn.Dropout) and not layer.training
    }
    source = getattr(type(result.model), "fused_source", None)
    if source is None:
        return [] if "saw 2 operations" in result.searched else [result.searched]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            name = called.rpartition(".")[2]
            is_known = name in PRODUCTS | ARRANGING or called in dropouts
            is_own = name.startswith("fuselab_ops") or name.endswith("update_statistics")
            is_left = not is_own and not is_known
        elif isinstance(node, ast.UnaryOp):
            is_left = not isinstance(node.operand, ast.Constant)  # the dimension -1
        else:
            is_matmul = isinstance(getattr(node, "op", None), ast.MatMult)
            is_left = isinstance(node, (ast.BinOp, ast.Compare)) and not is_matmul
        if is_left:
            found.append(ast.unparse(node))
    return found


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:3])
    dtype = getattr(torch, sys.argv[3]) if len(sys.argv) > 3 else torch.float32
    bad = 0
    for seed in range(first, first + count):
        training = bool(seed % 2)
        try:
            problems = fused(seed, training, dtype).problems
        except Exception as error:
            problems = (f"{type(error).__name__}: {error}",)
        bad += bool(problems)
        mode = "training" if training else "eval"
        print(f"{seed} {mode}: {problems or 'covered, right'}", flush=True)
    print(f"{bad} of {count} not as they should be")
