"""The contract of ``fuselab::padded_generalized_box_iou_loss``: the kernels of
``generalized_box_iou_loss``, which leave padding out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.cost import arithmetic_unit, bytes_behind, bytes_of
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.generalized_box_iou_loss import configs, cpu_launch, cuda_launch, triton_launch
from fuselab.ops.generalized_box_iou_loss.layout import (
    arithmetic,
    empty_gradients,
    empty_loss,
    validate_boxes,
)
from fuselab.ops.generalized_box_iou_loss.op import (
    CPU_PAIRS,
    FLOPS,
    FLOPS_BACKWARD,
    LAYOUTS,
    order,
    random_boxes,
)
from fuselab.ops.padded_generalized_box_iou_loss import reference


def validate(pred: Tensor, target: Tensor) -> None:
    """Raises DtypeError, ShapeError as the reference's docstring says."""
    validate_boxes("padded_generalized_box_iou_loss", pred=pred, target=target)


def fake(pred: Tensor, target: Tensor) -> Tensor:
    return empty_loss(pred, target, "padded")


def save(output: Tensor, pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return pred, target


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, pred: Tensor, target: Tensor
) -> tuple[Tensor | None, ...]:
    return empty_gradients(needs, pred, target)


def prefer(pred: Tensor, target: Tensor) -> Sequence[str]:
    return order(pred)


def prefer_backward(
    needs: Sequence[bool], grad_output: Tensor, pred: Tensor, target: Tensor
) -> Sequence[str]:
    return order(pred)


def cost(pred: Tensor, target: Tensor) -> Cost:
    """Both boxes read once; one number written."""
    dtype = arithmetic(pred, target)
    return Cost(
        bytes_behind(pred, target),
        dtype.itemsize,
        FLOPS * (pred.numel() // 4),
        arithmetic_unit(dtype),
    )


def cost_backward(pred: Tensor, target: Tensor) -> Cost:
    """Both boxes read once, both gradients written once. Nothing passes the number of boxes from
    the forward to the backward, which reads the target once more to count them: 1.25 times this
    floor for both gradients in one dtype."""
    dtype = arithmetic(pred, target)
    return Cost(
        bytes_behind(pred, target) + dtype.itemsize,
        bytes_of(pred, target),
        FLOPS_BACKWARD * (pred.numel() // 4),
        arithmetic_unit(dtype),
    )


def pad(target: Tensor, generator: torch.Generator, share: float = 0.4) -> Tensor:
    """``target`` with zeros in that share of its rows, as a batch of images has them."""
    keep = torch.rand(target.shape[:-1], generator=generator) >= share
    return target * keep.unsqueeze(-1)


def _case(
    shape: Sequence[int],
    share: float = 0.4,
    lay_out: Callable[[Tensor], Tensor] = lambda boxes: boxes,
    pred_dtype: torch.dtype | None = None,
) -> Callable[[torch.device, torch.dtype, torch.Generator], Inputs]:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        pred = random_boxes(shape, generator).to(device, pred_dtype or dtype)
        target = pad(random_boxes(shape, generator), generator, share).to(device, dtype)
        return Inputs((lay_out(pred), lay_out(target)))

    return make


def _cases() -> Iterator[Case]:
    for batch in (32, 1024, 16384, 65536):
        tags = {"bench", "sweep"} | ({"tiny"} if batch == 32 else set())
        tags |= {"huge"} if batch == 65536 else set()
        yield Case(f"{batch}x256", _case((batch, 256)), frozenset(tags))
    boundary = frozenset({"boundary"})
    for batch, count in ((0, 5), (1, 1), (1, 2), (1, 255), (1, 256), (1, 257), (3, 171), (32, 256)):
        yield Case(f"{batch}x{count}", _case((batch, count)), boundary)
    # One more than every block of cuda_kernels.cu counts by itself.
    yield Case("8193", _case((8193,)), boundary)
    yield Case("all padding", _case((4, 9), share=1.0), boundary)
    yield Case("no padding", _case((4, 9), share=0.0), boundary)
    for dtype in FLOATING:
        name = f"pred {str(dtype).removeprefix('torch.')}"
        yield Case(name, _case((5, 60), pred_dtype=dtype), boundary)
    for name, (shape, lay_out) in LAYOUTS.items():
        yield Case(f"layout {name}", _case(shape, 0.4, lay_out), boundary)


def _cpu_cases() -> Iterator[Case]:
    for count in CPU_PAIRS:
        yield Case(f"{count}", _case((count,)), cpu_sizes.ROW)
    for count in (5, 500, 20000):
        yield Case(f"{count}", _case((count,)), cpu_sizes.DTYPES)


def draw(source: Draw) -> Inputs:
    """Any shape and layout; about half of the bottoms are below 0 and so padding."""
    leading = [source.size(256, 512) for _ in range(source.choice((2, 1, 0, 3)))]
    return Inputs((source.tensor(*leading, 4), source.tensor(*leading, 4)))


def _leaving_padding_out(device: Literal["cuda", "cpu"], launcher: ModuleType) -> Implementation:
    forward, backward = (
        partial(step, reduction="padded", eps=reference.EPS)
        for step in (launcher.forward, launcher.backward)
    )
    return Implementation(device, forward, backward)


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
    cases=tuple(_cases()),
    gradient=Gradient(
        save, reference.padded_generalized_box_iou_loss_backward, fake_gradient, prefer_backward
    ),
    draw=draw,
    validate=validate,
    fake=fake,
    prefer=prefer,
    cpu_cases=tuple(_cpu_cases()),
    peers={"masked": reference.masked},
    dtypes=FLOATING,
    configs={
        "cuda": configs.cuda,
        "cuda_backward": configs.cuda_backward,
        "triton": configs.triton,
        "triton_backward": configs.triton_backward,
    },
)
