"""The honest operator of the gallery: silu(input * scale + bias), in plain PyTorch, on any device.

The wrong ones differ from it in one place each, so that what catches them is that place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs

BLOCK = 8  # what the wrong kernels "tile" by


def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    return torch.nn.functional.silu(input * scale + bias)


def wide(tensor: Tensor) -> Tensor:
    """16-bit floats as float32, which is what a kernel accumulates in."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def empty_output(input: Tensor, bias: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(input.shape, bias.shape)
    dtype = torch.promote_types(input.dtype, bias.dtype)
    return torch.empty(shape, dtype=dtype, device=input.device)


def computed(input: Tensor, bias: Tensor, scale: float | Tensor) -> Tensor:
    """What the kernel writes, before it is rounded to the output's dtype."""
    z = wide(input) * scale + wide(bias)
    return z * torch.sigmoid(z)


def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
    return empty_output(input, bias).copy_(computed(input, bias, scale))


def save(output: Tensor, input: Tensor, bias: Tensor, scale: float) -> tuple[Any, ...]:
    return input, bias, scale


def gradient_reference(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor | None, Tensor | None]:
    z = wide(input) * scale + wide(bias)
    sigmoid = torch.sigmoid(z)
    grad = wide(grad_output) * (sigmoid * (1 + z * (1 - sigmoid)))
    grad_input = (grad * scale).sum_to_size(input.shape).to(input.dtype) if needs[0] else None
    grad_bias = grad.sum_to_size(bias.shape).to(bias.dtype) if needs[1] else None
    return grad_input, grad_bias


def backward(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor | None, ...]:
    with torch.no_grad():
        return gradient_reference(needs, grad_output, input, bias, scale)


def cost(input: Tensor, bias: Tensor, scale: float) -> Cost:
    read = input.numel() * input.element_size() + bias.numel() * bias.element_size()
    return Cost(read, input.numel() * input.element_size(), 6 * input.numel())


def make_case(rows: int, columns: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        input = torch.randn(rows, columns, generator=generator).to(device, dtype)
        bias = torch.randn(columns, generator=generator).to(device, dtype)
        return Inputs((input, bias), {"scale": 0.5})

    return Case(f"{rows}x{columns}", make, frozenset({"boundary"}))


def draw(draw: Draw) -> Inputs:
    columns = draw.size(64)
    lead = [draw.size() for _ in range(draw.choice([1, 0, 2]))]
    scale = draw.choice([1.0, 0.5, -2.0])
    return Inputs((draw.tensor(*lead, columns), draw.tensor(columns), scale))


def make_op(
    name: str,
    device: str = "cpu",
    forward: Callable[..., Any] = forward,
    backward: Callable[..., Any] | None = backward,
    gradient: Gradient | None = Gradient(save, gradient_reference),  # noqa: B008
    **changes: Any,
) -> FusedOp:
    """The honest operator, or one with a part of it replaced, under ``gallery::name``."""
    kind: Literal["cuda", "cpu"] = "cuda" if device == "cuda" else "cpu"
    fields: dict[str, Any] = {
        "name": f"gallery::{name}",
        "reference": reference,
        "implementations": {"plain": Implementation(kind, forward, backward)},
        "cost": cost,
        # Multiples of the block, as a benchmark's sizes are: they alone catch little.
        "cases": (make_case(16, 64), make_case(8, 8)),
        "gradient": gradient,
        "draw": draw,
    }
    if "reference" not in changes:  # its strides follow the input's, and these kernels' do not
        fields["fake"] = lambda input, bias, scale: empty_output(input, bias)
    return FusedOp(**(fields | changes))
