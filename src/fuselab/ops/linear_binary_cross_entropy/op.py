"""The contract of ``fuselab::linear_binary_cross_entropy``, on the kernels of ``linear_sigmoid``
with a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.errors import ShapeError, UnknownNameError
from fuselab.op import Cost, FusedOp, Gradient, Implementation, Inputs, Rewrite
from fuselab.ops._shared.cost import arithmetic_unit, bytes_behind
from fuselab.ops._shared.dtypes import FLOATING, cast_floating, cast_operands, check_floating
from fuselab.ops._shared.saved import of_saved, save_arguments
from fuselab.ops.linear_binary_cross_entropy import cases
from fuselab.ops.linear_binary_cross_entropy.reference import gradient, reference
from fuselab.ops.linear_sigmoid import cpu_launch, cuda_launch, layout, triton_launch

_FLOPS_PER_ROW = 12  # exp, log1p and ten other operations


def validate(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str
) -> None:
    layout.validate("linear_binary_cross_entropy", input, weight, bias)
    check_floating("linear_binary_cross_entropy", target=target)
    if target.shape != (*input.shape[:-1], 1):
        raise ShapeError(
            f"linear_binary_cross_entropy: 'target' has shape {tuple(target.shape)}; expected "
            f"{(*input.shape[:-1], 1)}, one value for each row of 'input' {tuple(input.shape)}."
        )
    if reduction not in layout.KINDS:
        raise UnknownNameError("reduction", reduction, layout.KINDS)


def fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str
) -> Tensor:
    return layout.empty_output(input, target, layout.KINDS[reduction])


def autocast(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
    """Cast as torch.autocast does: the linear layer to its dtype, the target, and so the loss, to
    float32."""
    *operands, target, reduction = args
    cast = cast_operands(autocast_dtype, *operands)
    return *cast, cast_floating(target, torch.float32), reduction


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    return (*layout.empty_gradients(needs, input), None)


def supports(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> str | None:
    return layout.refusal(input, target)


def supports_cuda(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> str | None:
    return cuda_launch.supports(input, weight, target)


def _implementation(
    device: Literal["cuda", "cpu"], launcher: ModuleType, supports: Callable[..., str | None]
) -> Implementation:
    """Return the implementation by a launcher of linear_sigmoid, whose backward takes the target
    before the other arguments."""

    def backward(
        needs: Sequence[bool], grad_output: Tensor, *arguments: Any
    ) -> tuple[Tensor | None, ...]:
        *operands, target, reduction = arguments
        return (*launcher.backward(needs, grad_output, target, *operands, reduction), None)

    return Implementation(device, launcher.forward, backward, supports, of_saved(supports))


def cost(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str
) -> Cost:
    """Return the least traffic: input and target read once, the loss written once."""
    rows = input.shape[:-1].numel()
    return Cost(
        bytes_behind(input, weight, bias, target),
        (rows if reduction == "none" else 1) * target.element_size(),
        2 * input.numel() + rows * _FLOPS_PER_ROW,
        arithmetic_unit(torch.promote_types(input.dtype, target.dtype)),
    )


def cost_backward(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str
) -> Cost:
    """Return the least traffic: input and target read once, the input's gradient written once. The
    logit is computed again."""
    forward = cost(input, weight, bias, target, reduction)
    small = weight.numel() + (0 if bias is None else 1)
    return Cost(
        forward.bytes_read + forward.bytes_written,  # the upstream gradient is as large as the loss
        (input.numel() + small) * input.element_size(),
        5 * input.numel() + input.shape[:-1].numel() * _FLOPS_PER_ROW,
        forward.unit,
    )


def regime(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str
) -> str:
    """Return the reduction, with "mixed dtypes" if the target's dtype is not the input's."""
    return reduction if input.dtype == target.dtype else f"{reduction}, mixed dtypes"


def _rewrites() -> Iterator[Rewrite]:
    def spelt(reduction: str) -> Iterator[Rewrite]:
        def loss(logits: Tensor, target: Tensor) -> Tensor:
            return F.binary_cross_entropy_with_logits(logits, target, reduction=reduction)

        yield Rewrite(
            lambda input, weight, bias, target: loss(F.linear(input, weight, bias), target),
            lambda input, weight, bias, target: Inputs((input, weight, bias, target, reduction)),
        )
        yield Rewrite(
            lambda input, weight, target: loss(F.linear(input, weight), target),
            lambda input, weight, target: Inputs((input, weight, None, target, reduction)),
        )

    for reduction in layout.KINDS:
        yield from spelt(reduction)


OP = FusedOp(
    name="fuselab::linear_binary_cross_entropy",
    reference=reference,
    implementations={
        "triton": _implementation("cuda", triton_launch, supports),
        "cuda": _implementation("cuda", cuda_launch, supports_cuda),
        "cpp": _implementation("cpu", cpu_launch, supports),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(
        save_arguments,
        gradient,
        fake_gradient,
        lambda *args: layout.BACKWARD_ORDER,
        frozen={
            "target": "detach it, or spell F.binary_cross_entropy_with_logits of F.linear yourself"
        },
    ),
    draw=cases.draw,
    validate=validate,
    fake=fake,
    prefer=lambda *args: layout.ORDER,
    regime=regime,
    cpu_cases=cases.CPU_CASES,
    rewrites=tuple(_rewrites()),
    autocast=autocast,
    dtypes=FLOATING,
)
