"""The contract of ``fuselab::linear_sigmoid``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fuselab.op import Cost, FusedOp, Gradient, Rewrite
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.cost import arithmetic_unit, bytes_behind
from fuselab.ops._shared.dtypes import FLOATING, cast_operands
from fuselab.ops._shared.launched import launched
from fuselab.ops._shared.layer_rewrites import layer_rewrites
from fuselab.ops._shared.saved import of_saved
from fuselab.ops.linear_sigmoid import cases, cpu_launch, cuda_launch, layout, triton_launch
from fuselab.ops.linear_sigmoid.reference import gradient, reference


def validate(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    layout.validate("linear_sigmoid", input, weight, bias)


def fake(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return layout.empty_output(input, None, "sigmoid")


def save(output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    return output, input, weight


def supports(input: Tensor, *rest: Any) -> str | None:
    return layout.refusal(input)


_SUPPORTED = {"supports": supports, "supports_backward": of_saved(supports, 1)}


def cost(input: Tensor, weight: Tensor, bias: Tensor | None) -> Cost:
    """Return the least traffic: the input read once, and a few bytes per row."""
    rows = input.shape[:-1].numel()
    return Cost(
        bytes_behind(input, weight, bias),
        rows * input.element_size(),
        2 * input.numel() + rows * (1 + ACTIVATIONS["sigmoid"].flops),
        arithmetic_unit(input.dtype),
    )


def cost_backward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Cost:
    """Return the least traffic: the input read once, its gradient written once."""
    rows = input.shape[:-1].numel()
    small = weight.numel() + (0 if bias is None else 1)
    return Cost(
        bytes_behind(input, weight) + 2 * rows * input.element_size(),
        (input.numel() + small) * input.element_size(),
        3 * input.numel() + 4 * rows,
        arithmetic_unit(input.dtype),
    )


def _rewrites() -> Iterator[Rewrite]:
    for spelling in ACTIVATIONS["sigmoid"].spellings:
        yield from layer_rewrites(spelling)


OP = FusedOp(
    name="fuselab::linear_sigmoid",
    reference=reference,
    implementations={
        "triton": launched("cuda", triton_launch, **_SUPPORTED),
        "cuda": launched("cuda", cuda_launch),
        "cpp": launched("cpu", cpu_launch, **_SUPPORTED),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(
        save,
        gradient,
        lambda needs, grad_output, *saved: layout.empty_gradients(needs, saved[1]),
        lambda *args: layout.BACKWARD_ORDER,
    ),
    draw=cases.draw,
    validate=validate,
    fake=fake,
    prefer=lambda *args: layout.ORDER,
    cpu_cases=cases.CPU_CASES,
    rewrites=tuple(_rewrites()),
    autocast=cast_operands,  # as F.linear; the sigmoid stays in that dtype
    dtypes=FLOATING,
)
