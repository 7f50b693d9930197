"""An operator with three outputs for tests: a residual, its RMS norm, and where it is large."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fuselab
from fuselab.errors import DtypeError, ShapeError
from fuselab.op import Case, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime.cpp_source import CppSource, f64, i64

SOURCE = CppSource(Path(__file__).with_name("add_rms_norm.cpp"))
CPP_NAMES = {torch.float32: "float", torch.float64: "double"}


def reference(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Return input + residual, its RMS norm over the last dimension, and where it is above 1."""
    hidden = input + residual
    normed = hidden * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) + eps) * weight
    return hidden, normed, hidden > 1


def gradient(
    needs: Sequence[bool],
    grad_output: Sequence[Tensor],
    hidden: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor | None, ...]:
    grad_hidden, grad_normed, _ = grad_output
    scale = torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) + eps)
    weighted = grad_normed * weight
    product = (weighted * hidden).mean(-1, keepdim=True)
    total = grad_hidden + scale * weighted - hidden * scale**3 * product
    return (
        total if needs[0] else None,
        total if needs[1] else None,
        (grad_normed * hidden * scale).sum_to_size(weight.shape) if needs[2] else None,
    )


def _eps(eps: float | Tensor) -> tuple[Any, Any]:
    return (eps, f64(0.0)) if isinstance(eps, Tensor) else (None, f64(eps))


def _sizes(hidden: Tensor) -> tuple[Any, Any]:
    width = hidden.shape[-1]
    return i64(hidden.numel() // width if width else 0), i64(width)


def forward(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = (
        torch.empty_like(input),
        torch.empty_like(input),
        torch.empty_like(input, dtype=torch.bool),
    )
    args = (input, residual, weight, *outputs, *_sizes(input), *_eps(eps))
    SOURCE.launch(f"forward<{CPP_NAMES[input.dtype]}>", args)
    return outputs


def backward(
    needs: Sequence[bool],
    grad_output: Sequence[Tensor],
    hidden: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor | None, ...]:
    grads = tuple(
        torch.empty_like(like) if need else None
        for need, like in zip(needs, (hidden, hidden, weight), strict=True)
    )
    args = (*grad_output[:2], hidden, weight, *grads, *_sizes(hidden), *_eps(eps))
    SOURCE.launch(f"backward<{CPP_NAMES[hidden.dtype]}>", args)
    return grads


def supports(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> str | None:
    return None if input.dtype in CPP_NAMES else f"{input.dtype} has no kernel"


def validate(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    if input.shape != residual.shape or weight.shape != input.shape[-1:] or input.ndim == 0:
        raise ShapeError("add_rms_norm: expected input and residual (*, width), weight (width,).")
    if not input.dtype == residual.dtype == weight.dtype:
        raise DtypeError("add_rms_norm: its tensors must have one dtype.")


def draw(draw: Draw) -> Inputs:
    shape = draw.shape()
    return Inputs(
        (draw.tensor(*shape), draw.tensor(*shape), draw.tensor(shape[-1])),
        {"eps": draw.uniform(1e-6, 1e-2)},
    )


OP = FusedOp(
    name="severaltest::add_rms_norm",
    reference=reference,
    implementations={"cpp": Implementation("cpu", forward, backward, supports)},
    gradient=Gradient(
        save=lambda output, input, residual, weight, eps: (output[0], weight, eps),
        reference=gradient,
    ),
    cases=[
        Case.normal([(7, 33), (7, 33), (33,)], "boundary"),
        Case.normal([(64, 256), (64, 256), (256,)], "bench"),
    ],
    dtypes=(torch.float32, torch.float64),
    draw=draw,
    validate=validate,
    contiguous=True,
)

add_rms_norm = fuselab.operator(OP)
