"""GIoU loss alone, with the gradient of the predicted boxes, and with both: us per step.

    python benchmarks/boxes_step.py [--device cuda] [--boxes 256] [--batch B ...]
        [--loss none|mean|padded ...] [--gradients 0|1|2 ...] [--provider NAME ...]

``device`` is the device's time of the loss and ``torch.autograd.grad`` with cold caches. ``graph``
is that of their replay from a CUDA graph, if it can be captured (an index by a boolean mask
cannot). ``wall`` is host and device, one step at a time, as a training loop takes it: ``.grad`` set
to None, the loss, ``backward`` into ``.grad``, a synchronisation; no model and no optimizer. The
row ``torch.relu`` has that operator on the boxes instead of the loss; it shows what autograd and
the synchronisation take on this host, as busy as it is. The upstream gradient is dense and differs
from box to box; with ``mean`` and ``padded`` it is one number. 40 % of a padded target's rows are
padding.
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
from fuselab.op import FusedOp
from fuselab.ops import generalized_box_iou_loss, padded_generalized_box_iou_loss
from fuselab.ops.generalized_box_iou_loss.op import OP
from fuselab.ops.generalized_box_iou_loss.reference import clamped
from fuselab.ops.padded_generalized_box_iou_loss.cases import pad
from fuselab.ops.padded_generalized_box_iou_loss.op import OP as PADDED
from fuselab.ops.padded_generalized_box_iou_loss.reference import masked
from fuselab.runtime import autograd_node

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES = ("none", "mean", "padded")
STEPS = ("forward", "forward + gradient of boxes1", "forward + both gradients")
SYNCHRONISING = ("torchvision", "masked")
BUDGET_S = 0.2  # seconds for one figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--boxes", type=int, default=256, help="boxes per image")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 65536])
    parser.add_argument("--loss", choices=LOSSES, nargs="+", default=list(LOSSES))
    parser.add_argument("--gradients", type=int, choices=range(3), nargs="+", default=[0, 1, 2])
    parser.add_argument("--provider", nargs="+", help="all, where none is named")
    options = parser.parse_args()
    autograd_node.start()
    device = torch.device(options.device)
    for batch in options.batch:
        for kind in options.loss:
            tensors = drawn(kind, batch, options.boxes, device)
            for gradients in options.gradients:
                print(f"{batch} x {options.boxes} boxes, float32, {kind}, {STEPS[gradients]}, us:")
                print(f"  {'torch.relu':20} {'wall':>22} {host_floor_us(gradients, tensors):9.1f}")
                for name, loss in losses(kind, device.type).items():
                    if options.provider is None or name in options.provider:
                        # otherwise it would count as a recompilation of the previous step
                        torch.compiler.reset()
                        print(f"  {name:20} {times(loss, gradients, tensors, name)}", flush=True)


def losses(kind: str, device_type: str) -> dict[str, Loss]:
    """Return the losses by name: peers, then ours."""
    if kind == "padded":
        own: FusedOp = PADDED
        public: Any = padded_generalized_box_iou_loss
        found: dict[str, Loss] = {"eager": PADDED.reference, "masked": masked}
        compiled = {"compile": PADDED.reference}
    else:
        own, public = OP, partial(generalized_box_iou_loss, reduction=kind)
        reference, spelt = partial(OP.reference, reduction=kind), partial(clamped, reduction=kind)
        found = {"eager": reference, "clamped": spelt, **torchvision(kind)}
        compiled = {"compile": reference, "compile(clamped)": spelt}
    if device_type == "cuda":
        found |= {
            name: torch.compile(loss, dynamic=False, fullgraph=True)
            for name, loss in compiled.items()
        }
    for name, implementation in own.implementations.items():
        if implementation.device == device_type:
            found[name] = partial(public, implementation=name)
    return {**found, "auto": public}


def torchvision(reduction: str) -> dict[str, Loss]:
    try:
        return {"torchvision": partial(OP.libraries["torchvision"](), reduction=reduction)}
    except ImportError:
        return {}


def drawn(kind: str, batch: int, boxes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw predicted and target boxes, and the upstream gradient."""
    generator = torch.Generator().manual_seed(0)

    def drawn_boxes() -> Tensor:
        corner, size = torch.rand(2, batch, boxes, 2, generator=generator)
        return torch.cat([corner, corner + size], -1)

    predicted, target = drawn_boxes(), drawn_boxes()
    if kind == "padded":
        target = pad(target, generator)
    upstream = torch.rand((batch, boxes) if kind == "none" else (), generator=generator)
    return predicted.to(device), target.to(device), upstream.to(device)


def step_of(
    loss: Loss, gradients: int, predicted: Tensor, target: Tensor, upstream: Tensor
) -> Callable[[], Any]:
    leaves = [tensor.detach() for tensor in (predicted, target)]
    wanted = [tensor.requires_grad_() for tensor in leaves[:gradients]]
    if not wanted:
        return lambda: loss(*leaves)
    return lambda: torch.autograd.grad(loss(*leaves), wanted, upstream)


def training_step_of(
    loss: Loss, gradients: int, predicted: Tensor, target: Tensor, upstream: Tensor
) -> Callable[[], Any]:
    leaves = [tensor.detach() for tensor in (predicted, target)]
    wanted = [tensor.requires_grad_() for tensor in leaves[:gradients]]

    def step() -> None:
        for leaf in wanted:
            leaf.grad = None
        value = loss(*leaves)
        if wanted:
            value.backward(upstream)

    return step


def host_floor_us(gradients: int, tensors: tuple[Tensor, Tensor, Tensor]) -> float:
    predicted, target, _ = tensors
    small = (predicted[:1], target[:1], torch.ones_like(predicted[:1]))
    return wall_us(training_step_of(lambda boxes, _: boxes.relu(), min(gradients, 1), *small))


def times(loss: Loss, gradients: int, tensors: tuple[Tensor, Tensor, Tensor], name: str) -> str:
    """Return ``device``, ``wall`` and ``graph`` of a step, or the error that prevents them."""
    device = tensors[0].device
    try:
        step = step_of(loss, gradients, *tensors)
        timed = time(step, device=device, budget_s=BUDGET_S)
        wall = wall_us(training_step_of(loss, gradients, *tensors))
        text = f"device {timed.median_us:9.1f}  wall {wall:9.1f}"
        if device.type == "cuda" and name not in SYNCHRONISING:
            timed = time(step, device=device, graph=True, budget_s=BUDGET_S)
            text += f"  graph {timed.median_us:9.1f}"
        return text
    except Exception as error:  # a compiler may raise anything
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def wall_us(step: Callable[[], Any]) -> float:
    """Return the median of single steps, each waited for.

    At least 30 are timed for the whole budget, because the median of only 30 varied by a third from
    run to run.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    taken: list[float] = []
    until = perf_counter() + BUDGET_S
    while len(taken) < 30 or perf_counter() < until:
        wait()
        begin = perf_counter()
        step()
        wait()
        taken.append((perf_counter() - begin) * 1e6)
    return median(taken)


if __name__ == "__main__":
    main()
