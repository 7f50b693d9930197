"""The contract of ``fuselab::padded_generalized_box_iou_loss``, on the kernels of
``generalized_box_iou_loss``, which can leave padding out."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Literal

from torch import Tensor

from fuselab.op import Cost, FusedOp, Gradient, Implementation
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops._shared.saved import empty_like_saved, save_arguments
from fuselab.ops.generalized_box_iou_loss import configs, cpu_launch, cuda_launch, triton_launch
from fuselab.ops.generalized_box_iou_loss import op as unpadded
from fuselab.ops.generalized_box_iou_loss.layout import empty_loss, validate_boxes
from fuselab.ops.padded_generalized_box_iou_loss import cases, reference


def validate(pred: Tensor, target: Tensor) -> None:
    """Raise DtypeError or ShapeError as the reference's docstring says."""
    validate_boxes("padded_generalized_box_iou_loss", pred=pred, target=target)


def fake(pred: Tensor, target: Tensor) -> Tensor:
    return empty_loss(pred, target, "padded")


def cost(pred: Tensor, target: Tensor) -> Cost:
    """Return the least traffic: both boxes read once, one number written."""
    return unpadded.cost(pred, target, "padded", reference.EPS)


def cost_backward(pred: Tensor, target: Tensor) -> Cost:
    """Return the least traffic: both boxes read once, both gradients written once. The forward does
    not pass the number of boxes on, so the backward reads the target once more to count them: 1.25
    times this traffic if both gradients have one dtype."""
    return unpadded.cost_backward(pred, target, "padded", reference.EPS)


def _leaving_padding_out(device: Literal["cuda", "cpu"], launcher: ModuleType) -> Implementation:
    steps = (launcher.forward, launcher.backward)
    without = (partial(step, reduction="padded", eps=reference.EPS) for step in steps)
    return Implementation(device, *without)


OP = FusedOp(
    name="fuselab::padded_generalized_box_iou_loss",
    reference=reference.padded_generalized_box_iou_loss,
    implementations={
        "triton": _leaving_padding_out("cuda", triton_launch),
        "cuda": _leaving_padding_out("cuda", cuda_launch),
        "cpp": _leaving_padding_out("cpu", cpu_launch),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(
        save_arguments,
        reference.padded_generalized_box_iou_loss_backward,
        empty_like_saved(0, 1),
        lambda needs, grad_output, *saved: unpadded.order(saved[0]),
    ),
    draw=cases.draw,
    validate=validate,
    fake=fake,
    prefer=lambda *args: unpadded.order(args[0]),
    cpu_cases=cases.CPU_CASES,
    peers={"masked": reference.masked},
    dtypes=FLOATING,
    configs=configs.CONFIGS,
)
