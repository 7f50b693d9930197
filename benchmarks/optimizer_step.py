"""Steps of optimizers over all parameters of a model, ejected from plain PyTorch, and their peers.

    python benchmarks/optimizer_step.py [--device cuda] [--only NAME ...]

Each figure is of the step alone, all gradients given. On a GPU it is replayed from a CUDA graph
with cold caches; "host" is the time until a call without a graph returns. The floor is the time of
what must move at the bandwidth that ``--gb-per-s`` names, parameters, gradients and states: for
each element of a parameter seven numbers in Adam's step and, because the norms come first, eleven
in LAMB's (arXiv 1904.00962); three in that of row-wise Adagrad, whose states are one number a row.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import fuselab
from fuselab.measure.timing import time
from fuselab.runtime import builds

BUDGET_S = 0.3  # seconds for one figure
_MLP = ((512, 512), (512,), (512, 512), (512,), (10, 512), (10,))
_TOWER = tuple((512 + n, 512) if n % 2 else (512 + n,) for n in range(24))
Step = Callable[[], object]


def adam(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    step: Tensor,
    lr: Tensor,
) -> None:
    step += 1
    for param, grad, mean, square in zip(params, grads, means, squares, strict=True):
        mean.lerp_(grad, 0.1)
        square.mul_(0.999).addcmul_(grad, grad, value=0.001)
        root = (square / (1 - 0.999**step)).sqrt() + 1e-8
        param.sub_(lr * (mean / (1 - 0.9**step)) / root)


def lamb(
    params: list[Tensor], grads: list[Tensor], means: list[Tensor], squares: list[Tensor]
) -> None:
    for param, grad, mean, square in zip(params, grads, means, squares, strict=True):
        mean.mul_(0.9).add_(grad, alpha=0.1)
        square.mul_(0.999).addcmul_(grad, grad, value=0.001)
        update = mean / (square.sqrt() + 1e-6) + 0.01 * param
        param.sub_(1e-3 * param.norm() / (update.norm() + 1e-6) * update)


def row_wise_adagrad(tables: list[Tensor], grads: list[Tensor], sums: list[Tensor]) -> None:
    for table, grad, total in zip(tables, grads, sums, strict=True):
        total.add_(grad.square().mean(1))
        table.sub_(0.01 * grad / (total.sqrt() + 1e-8)[:, None])


@dataclass(frozen=True)
class Measured:
    """A step over tensors of these shapes; ``numbers`` are what it moves for each element."""

    step: Callable[..., None]
    shapes: Sequence[tuple[int, ...]]
    numbers: int


MEASURED = {
    "Adam, mlp of 6": Measured(adam, _MLP, 7),
    "Adam, tower of 24": Measured(adam, _TOWER, 7),
    "Adam, one table": Measured(adam, ((8192, 8192),), 7),
    "LAMB, mlp of 6": Measured(lamb, _MLP, 11),
    "LAMB, tower of 24": Measured(lamb, _TOWER, 11),
    "LAMB, one table": Measured(lamb, ((8192, 8192),), 11),
    "row-wise Adagrad, 12 tables": Measured(
        row_wise_adagrad, tuple((5000 * n, 128) for n in range(1, 13)), 3
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=MEASURED, default=[*MEASURED])
    parser.add_argument("--gb-per-s", type=float, help="bandwidth of the floor")
    options = parser.parse_args()
    is_gpu = options.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for name in options.only:
            measured = MEASURED[name]
            elements = sum(torch.Size(shape).numel() for shape in measured.shapes)
            moved, rate = measured.numbers * 4 * elements, options.gb_per_s
            floor = f", floor {moved / rate / 1e3:.1f} us" if rate else ""
            print(f"{name}: {len(measured.shapes)} parameters, {moved / 1e6:.1f} MB{floor}")
            for label, step in steps(measured, options.device, Path(folder)).items():
                step()
                builds.wait_for_background(60.0)
                timing = time(step, device=options.device, graph=is_gpu, budget_s=BUDGET_S)
                host = f"host {host_us(step):8.1f} us"
                print(f"  {label:24} {timing.median_us:10.1f} us, {host}", flush=True)


def steps(measured: Measured, device: str, folder: Path) -> dict[str, Step]:
    """Return the step of each way by its name."""
    function, shapes = measured.step, measured.shapes
    args = arguments(function, shapes, device)
    name = f"{function.__name__}_{len(shapes)}"
    fuselab.eject(function, *copy.deepcopy(args), out=folder / name, name=name)
    ejected = getattr(importlib.import_module(name), name)
    found: dict[str, Step] = {}
    for kind in ("triton", "cuda") if device != "cpu" else ("cpp",):
        found[f"ejected, {kind}"] = ours(ejected, copy.deepcopy(args), kind)
    if function is adam:
        for kind in ("fused", "foreach"):
            found[f"torch.optim.Adam, {kind}"] = theirs(args, kind, capturable=device != "cpu")
    compiled, own, eager = torch.compile(function), copy.deepcopy(args), copy.deepcopy(args)
    found["torch.compile"] = lambda: compiled(*own)
    found["eager"] = lambda: function(*eager)
    return found


def arguments(
    function: Callable[..., None], shapes: Sequence[tuple[int, ...]], device: str
) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    lists = [
        [torch.randn(shape, generator=generator).to(device) for shape in shapes] for _ in range(3)
    ]
    if function is row_wise_adagrad:
        return [*lists[:2], [one[:, 0].square() for one in lists[2]]]
    lists.append([one.square() for one in lists[2]])
    numbers = [torch.tensor(3.0).to(device), torch.tensor(1e-3).to(device)]
    return [*lists, *(numbers if function is adam else [])]


def ours(ejected: Callable[..., Any], args: Sequence[Any], kind: str) -> Step:
    return lambda: ejected(*args, implementation=kind)


def theirs(args: Sequence[Any], kind: str, capturable: bool) -> Step:
    parameters = [torch.nn.Parameter(one.clone()) for one in args[0]]
    for parameter, grad in zip(parameters, args[1], strict=True):
        parameter.grad = grad.clone()
    options: dict[str, Any] = {kind: True, "capturable": capturable}
    rate = args[5].clone() if capturable else 1e-3
    return torch.optim.Adam(parameters, lr=rate, **options).step


def host_us(step: Step, calls: int = 50) -> float:
    """Return the microseconds until a call returns, in the mean."""
    for _ in range(3):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(calls):
        step()
    return (perf_counter() - begin) / calls * 1e6


if __name__ == "__main__":
    main()
