"""Right operators as an author would write them after docs/contract.md, each of which differs from
its reference in the order or the bracketing of its arithmetic. None may be refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Draw, FusedOp, Gradient, Implementation, Inputs, refuse_mixed_dtypes

Gradients = tuple[Tensor | None, ...]


def wide(tensor: Tensor) -> Tensor:
    """Return 16-bit floats as float32, which kernels compute in."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def in_float32(dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
    """Return the arguments of a loss as autocast gives them to it on a CPU: in float32."""
    return tuple(wide(value) if isinstance(value, Tensor) else value for value in args)


def declared(
    name: str,
    reference: Callable[..., Any],
    forward: Callable[..., Any],
    shapes: Sequence[Sequence[int]],
    draw: Callable[[Draw], Inputs],
    gradient: Callable[..., Gradients] | None = None,
    save: Callable[..., tuple[Any, ...]] = lambda output, *args: args,
    **more: Any,
) -> FusedOp:
    """Return the operator ``honest::name``; without ``gradient`` it does not differentiate."""

    def backward(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> Gradients:
        assert gradient is not None
        with torch.no_grad():
            return gradient(needs, grad_output, *saved)

    fields: dict[str, Any] = {
        "contiguous": not more.get("mutates"),
        "validate": refuse_mixed_dtypes,
        "cases": (Case.normal(shapes, "boundary"),),
    }
    plain = Implementation("cpu", forward, None if gradient is None else backward)
    return FusedOp(
        f"honest::{name}",
        reference,
        {"plain": plain},
        draw=draw,
        gradient=None if gradient is None else Gradient(save, gradient),
        **(fields | more),
    )


def alike(count: int) -> Callable[[Draw], Inputs]:
    """Return what draws ``count`` tensors of one shape."""

    def draw(draw: Draw) -> Inputs:
        shape = draw.shape(64)
        return Inputs(tuple(draw.tensor(*shape) for _ in range(count)))

    return draw
