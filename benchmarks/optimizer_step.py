"""The step of Adam over all parameters of a model: ejected from plain PyTorch, and PyTorch's own.

    python benchmarks/optimizer_step.py [--device cuda] [--only NAME ...]

Each figure is of the step alone, all gradients given. On a GPU it is replayed from a CUDA graph
with cold caches; "host" is the time until a call without a graph returns. The floor is the time of
what must move at the bandwidth that ``--gb-per-s`` names: seven numbers for each element of a
parameter, which are read four times with its gradient and states and written three times.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import fuselab
from fuselab.measure.timing import time
from fuselab.runtime import builds

BUDGET_S = 0.3  # seconds for one figure
MODELS: dict[str, Sequence[tuple[int, ...]]] = {
    "mlp of 6": ((512, 512), (512,), (512, 512), (512,), (10, 512), (10,)),
    "tower of 24": tuple((512 + n, 512) if n % 2 else (512 + n,) for n in range(24)),
    "one table": ((8192, 8192),),
}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--gb-per-s", type=float, help="bandwidth of the floor")
    options = parser.parse_args()
    is_gpu = options.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for name in options.only:
            shapes = MODELS[name]
            moved = 7 * 4 * sum(torch.Size(shape).numel() for shape in shapes)
            rate = options.gb_per_s
            floor = f", floor {moved / rate / 1e3:.1f} us" if rate else ""
            print(f"{name}: {len(shapes)} parameters, {moved / 1e6:.1f} MB{floor}")
            for label, step in steps(shapes, options.device, Path(folder)).items():
                step()
                builds.wait_for_background(60.0)
                timing = time(step, device=options.device, graph=is_gpu, budget_s=BUDGET_S)
                print(f"  {label:24} {timing.median_us:10.1f} us, host {host_us(step):8.1f} us")


def steps(shapes: Sequence[tuple[int, ...]], device: str, folder: Path) -> dict[str, Step]:
    """Return the step of each way by its name."""
    args = arguments(shapes, device)
    name = f"adam_{len(shapes)}"
    fuselab.eject(adam, *copy.deepcopy(args), out=folder / name, name=name)
    ejected = getattr(importlib.import_module(name), name)
    found: dict[str, Step] = {}
    for kind in ("triton", "cuda") if device != "cpu" else ("cpp",):
        found[f"ejected, {kind}"] = ours(ejected, copy.deepcopy(args), kind)
    for kind in ("fused", "foreach"):
        found[f"torch.optim.Adam, {kind}"] = theirs(args, kind, capturable=device != "cpu")
    compiled, own = torch.compile(adam), copy.deepcopy(args)
    found["torch.compile"] = lambda: compiled(*own)
    return found


def arguments(shapes: Sequence[tuple[int, ...]], device: str) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    lists = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
    lists.append([one.square() for one in lists[2]])
    numbers = [torch.tensor(3.0).to(device), torch.tensor(1e-3).to(device)]
    return [*([one.to(device) for one in held] for held in lists), *numbers]


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
