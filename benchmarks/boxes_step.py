"""GIoU loss and its gradient for the predicted boxes alone, as a detector trains: us per step.

    python benchmarks/boxes_step.py [--device cuda] [--boxes 256] [--batch B ...]

``device`` is the device's time with cold caches, ``wall`` what a step takes when nothing else keeps
the machine busy (host and device, a synchronisation after each step), ``graph`` the device's time
of the step replayed from a CUDA graph. The upstream gradient is dense and differs from box to box;
with ``mean`` it is one number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fuselab.measure.timing import time
from fuselab.ops import generalized_box_iou_loss
from fuselab.ops.generalized_box_iou_loss.op import OP
from fuselab.ops.generalized_box_iou_loss.reference import clamped

Loss = Callable[..., Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--boxes", type=int, default=256, help="boxes per image")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 16384, 65536])
    options = parser.parse_args()
    device = torch.device(options.device)
    for batch in options.batch:
        for reduction in ("none", "mean"):
            print(f"{batch} x {options.boxes} boxes, float32, reduction {reduction}, us:")
            for name, loss in losses(device.type).items():
                step = training_step(loss, batch, options.boxes, reduction, device)
                print(f"  {name:20} {times(step, device)}", flush=True)


def losses(device_type: str) -> dict[str, Loss]:
    """Peers, then ours."""
    found: dict[str, Loss] = {"eager": OP.reference, "clamped": clamped}
    if device_type == "cuda":
        found["compile"] = torch.compile(OP.reference, dynamic=False)
        found["compile(clamped)"] = torch.compile(clamped, dynamic=False)
    found |= {
        name: partial(generalized_box_iou_loss, implementation=name)
        for name, implementation in OP.implementations.items()
        if implementation.device == device_type
    }
    return {**found, "auto": generalized_box_iou_loss}


def training_step(
    loss: Loss, batch: int, boxes: int, reduction: str, device: torch.device
) -> Callable[[], Any]:
    """Loss and gradient of random boxes, the same for every ``loss``."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        corner, size = torch.rand(2, batch, boxes, 2, generator=generator)
        return torch.cat([corner, corner + size], -1).to(device)

    predicted, target = drawn().requires_grad_(), drawn()
    shape = (batch, boxes) if reduction == "none" else ()
    upstream = torch.rand(shape, generator=generator).to(device)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(predicted, target, reduction), predicted, upstream)

    return step


def times(step: Callable[[], Any], device: torch.device) -> str:
    """``device``, ``wall`` and ``graph`` of a step, or why there are none."""
    try:
        text = f"device {time(step, device=device).median_us:9.1f}  wall {wall_us(step):9.1f}"
        if device.type == "cuda":
            text += f"  graph {time(step, device=device, graph=True).median_us:9.1f}"
        return text
    except Exception as error:  # a compiler may raise anything
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def wall_us(step: Callable[[], Any], repeats: int = 30) -> float:
    """Median of single steps, each waited for."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    taken = []
    for _ in range(repeats):
        wait()
        begin = perf_counter()
        step()
        wait()
        taken.append((perf_counter() - begin) * 1e6)
    return median(taken)


if __name__ == "__main__":
    main()
