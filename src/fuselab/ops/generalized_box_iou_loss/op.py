"""The contract of ``fuselab::generalized_box_iou_loss``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fuselab.op import Cost, FusedOp, Gradient
from fuselab.ops._shared.cost import arithmetic_unit, bytes_behind, bytes_of
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops._shared.launched import launched
from fuselab.ops._shared.saved import empty_like_saved, save_arguments
from fuselab.ops.generalized_box_iou_loss import (
    cases,
    configs,
    cpu_launch,
    cuda_launch,
    reference,
    triton_launch,
)
from fuselab.ops.generalized_box_iou_loss.layout import arithmetic, empty_loss, validate_boxes

# Operations per pair, as cuda_kernels.cu writes them: comparisons and selections too.
FLOPS = 30
FLOPS_BACKWARD = 100


def validate(boxes1: Tensor, boxes2: Tensor, reduction: str, eps: float) -> None:
    """Raise DtypeError, ShapeError or UnknownNameError as the reference's docstring says."""
    validate_boxes("generalized_box_iou_loss", boxes1=boxes1, boxes2=boxes2)
    reference.known_reduction(reduction)


def fake(boxes1: Tensor, boxes2: Tensor, reduction: str, eps: float) -> Tensor:
    return empty_loss(boxes1, boxes2, reduction)


def order(boxes: Tensor) -> Sequence[str]:
    """Return the implementations in the order in which ``auto`` tries them. CUDA and Triton differ
    little; both take a seventeenth of eager's time (145.7, 146.3 and 2469 us for 65536 x 256
    float32 boxes on an H200)."""
    return ("cuda", "triton") if boxes.is_cuda else ("cpp",)


def cost(boxes1: Tensor, boxes2: Tensor, reduction: str, eps: float) -> Cost:
    """Return the least traffic: both boxes read once, the loss written once."""
    dtype = arithmetic(boxes1, boxes2)
    pairs = boxes1.numel() // 4
    written = dtype.itemsize * (pairs if reduction == "none" else 1)
    return Cost(bytes_behind(boxes1, boxes2), written, FLOPS * pairs, arithmetic_unit(dtype))


def cost_backward(boxes1: Tensor, boxes2: Tensor, reduction: str, eps: float) -> Cost:
    """Return the least traffic: boxes and upstream gradient read once, both gradients written
    once."""
    forward = cost(boxes1, boxes2, reduction, eps)
    read = forward.bytes_read + forward.bytes_written  # the upstream gradient is as the loss
    flops = FLOPS_BACKWARD * (boxes1.numel() // 4)
    return Cost(read, bytes_of(boxes1, boxes2), flops, forward.unit)


def regime(boxes1: Tensor, boxes2: Tensor, reduction: str, eps: float) -> str:
    """Return the reduction, with "mixed dtypes" if the boxes' dtypes differ."""
    return reduction if boxes1.dtype == boxes2.dtype else f"{reduction}, mixed dtypes"


def _torchvision() -> Callable[..., Tensor]:
    """Return torchvision's own function. It synchronises, because it indexes by a boolean mask."""
    import torchvision.ops

    function: Callable[..., Tensor] = torchvision.ops.generalized_box_iou_loss
    return function


OP = FusedOp(
    name="fuselab::generalized_box_iou_loss",
    reference=reference.generalized_box_iou_loss,
    implementations={
        "triton": launched("cuda", triton_launch),
        "cuda": launched("cuda", cuda_launch),
        "cpp": launched("cpu", cpu_launch),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    # Reading the boxes again costs no more than reading saved areas would.
    gradient=Gradient(
        save_arguments,
        reference.generalized_box_iou_loss_backward,
        empty_like_saved(0, 1),
        lambda needs, grad_output, *saved: order(saved[0]),
    ),
    draw=cases.draw,
    validate=validate,
    fake=fake,
    prefer=lambda *args: order(args[0]),
    regime=regime,
    cpu_cases=cases.CPU_CASES,
    peers={"clamped": reference.clamped},
    libraries={"torchvision": _torchvision},
    dtypes=FLOATING,
    configs=configs.CONFIGS,
)
