"""Compare lora_linear with its floor, the same layer without an adapter.

    python tools/lora_floor.py [--budget S] [--case NAME ...] [--provider NAME ...]

``fuselab bench`` refuses providers whose results differ, and the layer without an adapter computes
something else. Its times, medians in us of cold-L2 device time in one run, are therefore measured
here.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fuselab.measure.interleave import Candidate, interleave
from fuselab.op import Case
from fuselab.ops.lora_linear import lora_linear
from fuselab.ops.lora_linear.op import OP
from fuselab.ops.lora_linear.reference import in_place, reference

FLOOR = "without LoRA"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=3.0, help="seconds per shape and step")
    known = {case.name: case for case in OP.cases if "bench" in case.tags}
    parser.add_argument("--case", choices=known, metavar="NAME", nargs="+", default=[*known])
    parser.add_argument("--provider", nargs="+", help="all, where none is named")
    options = parser.parse_args()
    device = torch.device("cuda")
    for name in options.case:
        rows = table(known[name], device, torch.bfloat16, options.budget, options.provider)
        print(*rows, sep="\n", flush=True)


def table(
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float,
    wanted: Sequence[str] | None,
) -> list[str]:
    """Return one line per provider: forward, forward and backward, each with its ratio to the
    floor.

    ``wanted`` limits the providers, if it is given.
    """
    args = OP.bind(case.make(device, dtype, torch.Generator().manual_seed(0)))
    for place in (0, 3, 4):
        args[place].requires_grad_()
    providers: dict[str, Callable[..., Any]] = {
        FLOOR: without_adapter,
        "eager": reference,
        "in_place": in_place,
        "compile": torch.compile(reference, dynamic=False),
        "compile(in_place)": torch.compile(in_place, dynamic=False),
    }
    for name, implementation in OP.implementations.items():
        if implementation.device == device.type and implementation.supports(*args) is None:
            providers[name] = partial(lora_linear, implementation=name)
    if wanted is not None:
        providers = {name: providers[name] for name in providers if name in (FLOOR, *wanted)}
    steps: dict[str, Callable[..., Any]] = {"forward": forward, "forward+backward": both}
    medians = {}
    for step, run in steps.items():
        candidates = [Candidate(name, partial(run, call, args)) for name, call in providers.items()]
        for name, samples in interleave(candidates, device, budget_s=budget_s).items():
            if samples.failed:
                print(f"{case.name} {step} {name}: {samples.failed}")
            medians[step, name] = statistics.median(samples.times_us or [float("nan")])
    return [
        f"{case.name:24} {name:18}"
        + "".join(
            f" {step} {medians[step, name]:8.1f} ({medians[step, name] / medians[step, FLOOR]:.3f})"
            for step in steps
        )
        for name in providers
    ]


def without_adapter(input: Any, weight: Any, bias: Any, *_: Any) -> Any:
    return torch.relu(F.linear(input, weight, bias))


def forward(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return call(*args)


def both(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the gradients of the input, and of the adapter if there is one, from a dense upstream
    gradient."""
    leaves = [args[0]] if call is without_adapter else [args[place] for place in (0, 3, 4)]
    output = call(*args)
    return torch.autograd.grad(output, leaves, output.detach())


if __name__ == "__main__":
    main()
