"""GIoU: dozens of small operations, and one kernel instead of them.

The generalized intersection over union of two boxes (Rezatofighi et al., arXiv:1902.09630), step by
step: the formula, the mistakes that published versions have, what eager PyTorch spends on it, and
the fused operator with padding.

    python examples/giou.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fuselab
from fuselab.ops import generalized_box_iou_loss, padded_generalized_box_iou_loss
from fuselab.ops.generalized_box_iou_loss.op import OP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET_S = 0.3  # per timing

# ## The formula
#
# Boxes are (x1, y1, x2, y2). With I the area of the intersection, U that of the union and C that of
# the smallest box around both, GIoU = I / U - (C - U) / C, and the loss is 1 - GIoU.


def giou(first: Tensor, second: Tensor, clamped: bool = True) -> Tensor:
    x1, y1, x2, y2 = first.unbind(-1)
    u1, v1, u2, v2 = second.unbind(-1)
    width = torch.minimum(x2, u2) - torch.maximum(x1, u1)
    height = torch.minimum(y2, v2) - torch.maximum(y1, v1)
    if clamped:
        width, height = width.clamp(min=0), height.clamp(min=0)
    intersection = width * height
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - intersection
    hull_width = torch.maximum(x2, u2) - torch.minimum(x1, u1)
    hull_height = torch.maximum(y2, v2) - torch.minimum(y1, v1)
    hull = hull_width * hull_height
    return intersection / union - (hull - union) / hull


# Without the two `clamp`s, disjoint boxes get an overlap: both differences are negative, so their
# product is positive. Overlapping boxes never show this mistake.


def two_pairs() -> None:
    unit = torch.tensor([0.0, 0.0, 1.0, 1.0])
    for name, other in {
        "overlapping": torch.tensor([0.5, 0.5, 1.5, 1.5]),
        "disjoint": torch.tensor([2.0, 2.0, 3.0, 3.0]),
    }.items():
        right, wrong = (giou(unit, other, clamped).item() for clamped in (True, False))
        print(f"{name:12} GIoU {right:6.3f}, without the clamps {wrong:6.3f}")
    assert abs(giou(unit, torch.tensor([2.0, 2.0, 3.0, 3.0])).item() + 7 / 9) < 1e-6


# ## Why not IoU
#
# The IoU of two disjoint boxes is 0 wherever they lie, and so is its gradient, so nothing moves.
# The term with the hull pulls them together. Gradient descent on one box, towards another:


def descent() -> None:
    target = torch.tensor([5.0, 5.0, 7.0, 7.0])
    curves = {}
    for name, loss in {
        "1 - IoU": lambda box: 1 - iou(box, target),
        "1 - GIoU": lambda box: generalized_box_iou_loss(box, target),
    }.items():
        box = torch.tensor([1.0, 2.0, 3.0, 3.0], requires_grad=True)
        optimizer = torch.optim.Adam([box], lr=0.1)
        falling_rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
        curves[name] = []
        for _ in range(300):
            optimizer.zero_grad()
            loss(box).backward()
            optimizer.step()
            falling_rate.step()
            curves[name].append(1 - iou(box.detach(), target).item())
        corners = [round(corner, 2) for corner in box.tolist()]
        print(f"{name:9} after 300 steps: box {corners}, IoU {1 - curves[name][-1]:.2f}")
    plot(curves)


def iou(box: Tensor, target: Tensor) -> Tensor:
    size = torch.minimum(box[2:], target[2:]) - torch.maximum(box[:2], target[:2])
    intersection = size.clamp(min=0).prod()
    areas = (box[2:] - box[:2]).prod() + (target[2:] - target[:2]).prod()
    return intersection / (areas - intersection)


def plot(curves: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3), layout="constrained")
    for name, values in curves.items():
        axis.plot(values, label=f"descent on {name}")
    axis.set(xlabel="step", ylabel="1 - IoU", ylim=(0, 1.05))
    axis.legend()
    figure.savefig("giou_descent.png", dpi=90)
    print("wrote giou_descent.png")


# ## What eager spends
#
# Every line of the formula is a launch that reads its operands from memory and writes its result
# there, and autograd launches about as many again. This counts them:


class Counter(TorchDispatchMode):
    """Counts operations that compute; views and allocations launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        self.count += not (function.is_view or name.startswith(("empty", "new_empty", "detach")))
        return function(*args, **(kwargs or {}))


def what_eager_runs() -> None:
    generator = torch.Generator().manual_seed(0)
    boxes = [some_boxes(8, generator).requires_grad_() for _ in range(2)]
    with Counter() as forward:
        loss = OP.reference(*boxes, "mean")
    with Counter() as backward:
        loss.backward()
    print(f"eager launches {forward.count} operations forward, {backward.count} backward")
    pairs = 65536 * 256
    cost, gradient = 32 * pairs, 64 * pairs
    print(
        f"{pairs / 1e6:.1f} million pairs, float32: {cost / 1e6:.0f} MB must be read for the loss"
    )
    print(f"and {gradient / 1e6:.0f} MB moved for both gradients, however it is done")


def some_boxes(count: int, generator: torch.Generator) -> Tensor:
    corner, size = torch.rand(2, count, 2, generator=generator)
    return torch.cat([corner, corner + size], -1).to(DEVICE)


# ## In 16 bits
#
# Areas are products: the area of a box of 300 by 300 pixels exceeds float16's largest number. The
# fused operator reads 16-bit boxes and computes in float32, without a copy of them in memory.


def in_float16() -> None:
    first = torch.tensor([[0.0, 0.0, 300.0, 300.0]], device=DEVICE)
    second = first + 30
    print(f"float32: {giou(first, second).item():.3f}")
    print(f"float16, eager: {giou(first.half(), second.half()).item():.3f}")
    fused = 1 - generalized_box_iou_loss(first.half(), second.half()).item()
    print(f"float16, fuselab: {fused:.3f}")


# ## Padding
#
# Images have different numbers of boxes, so a batch is padded. Picking the real rows by a boolean
# mask gives a tensor whose size the host must know, so it waits for the GPU in every step. The
# padded operator leaves rows out as it reads them and counts the rest on the device.


def padded() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted, target = some_boxes(6, generator), some_boxes(6, generator)
    target[3:] = 0
    picked = generalized_box_iou_loss(predicted[:3], target[:3], "mean")
    predicted[5] = float("nan")  # predictions for padding rows do not matter
    whole = padded_generalized_box_iou_loss(predicted, target)
    print(f"three boxes by themselves {picked.item():.4f}, padded to six {whole.item():.4f}")


# ## Times
#
# On the machine that printed this page, a loss and the gradient of the predicted boxes:


def time_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    boxes, target = some_boxes(100_000, generator).requires_grad_(), some_boxes(100_000, generator)
    ways: dict[str, Callable[..., Tensor]] = {
        "eager": OP.reference,
        "torch.compile": torch.compile(OP.reference, dynamic=False),
        "fuselab": generalized_box_iou_loss,
    }
    for name, loss in ways.items():

        def step(loss: Callable[..., Tensor] = loss) -> tuple[Tensor, ...]:
            return torch.autograd.grad(loss(boxes, target, "mean"), boxes)

        timing = fuselab.time(step, device=DEVICE, budget_s=BUDGET_S)
        print(f"{name:14} {timing.median_us:9.1f} us")


# ## On an H200
#
# [figures: generalized_box_iou_loss forward float32]
#
# [figures: generalized_box_iou_loss forward+backward float32]
#
# [plot: generalized_box_iou_loss forward+backward float32]
#
# [figures: padded_generalized_box_iou_loss forward+backward float32]
#
# In a detector's training step, `fuselab train boxes`:
#
# [ranges: train_boxes.json]

STEPS = (two_pairs, descent, what_eager_runs, in_float16, padded, time_steps)


def main() -> None:
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
