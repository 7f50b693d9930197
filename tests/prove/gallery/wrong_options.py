"""The gallery's faults in options that the operator's draw leaves at one value: optional arguments,
bools, dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Draw, FusedOp, Implementation, Inputs, refuse_mixed_dtypes
from gallery import wrong
from gallery.honest import wide
from gallery.wrong import Exhibit

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


def reference(
    input: Tensor, bias: Tensor | None = None, flipped: bool = False, dim: int = -1, shift: int = 0
) -> Tensor:
    output = torch.softmax(-input if flipped else input, dim).roll(shift, dim)
    return output if bias is None else output + bias


def forward(input: Tensor, bias: Tensor | None, flipped: bool, dim: int, shift: int) -> Tensor:
    """Compute the softmax in float32 where the input has 16 bits."""
    x = wide(input)
    output = torch.softmax(-x if flipped else x, dim).roll(shift, dim)
    return (output if bias is None else output + bias).to(input.dtype).contiguous()


def draw_one_value(draw: Draw) -> Inputs:
    """Draw no option but the bias, which is always there."""
    shape = draw.shape(64)
    return Inputs((draw.tensor(*shape), draw.tensor(*shape)), {"dim": 0})


def make_op(
    name: str, forward: Callable[..., Any] = forward, device: str = "cpu", **changes: Any
) -> FusedOp:
    """The honest operator, or one with another forward, under ``gallery::name``."""
    kind: Any = "cuda" if device == "cuda" else "cpu"
    fields: dict[str, Any] = {
        "draw": draw_one_value,
        "cases": (Case.normal([(4, 8), (4, 8)], "boundary"),),
        "validate": refuse_mixed_dtypes,
        "contiguous": True,
    }
    return FusedOp(
        f"gallery::{name}",
        reference,
        {"plain": Implementation(kind, forward)},
        **(fields | changes),
    )


@caught_by("other options")
def zeros_without_a_bias(device: str) -> FusedOp:
    """Is right wherever the optional argument is given: the default call gives zeros."""

    def without(input: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        return torch.zeros_like(input) if bias is None else forward(input, bias, *options)

    return make_op("zeros_without_a_bias", without, device)


@caught_by("other options")
def bias_left_out(device: str) -> FusedOp:
    """Ignores the optional argument, which its draw never gives."""

    def without(input: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        return forward(input, None, *options)

    def draw(draw: Draw) -> Inputs:
        return Inputs((draw.tensor(*draw.shape(64)),))

    cases = (Case.normal([(4, 8)], "boundary"),)
    return make_op("bias_left_out", without, device, draw=draw, cases=cases)


@caught_by("other options")
def never_flipped(device: str) -> FusedOp:
    def unflipped(input: Tensor, bias: Tensor | None, flipped: bool, *options: Any) -> Tensor:
        return forward(input, bias, False, *options)

    return make_op("never_flipped", unflipped, device)


@caught_by("other options")
def negative_dimension_misread(device: str) -> FusedOp:
    """Takes every negative dimension but the last for the first one."""

    def misread(input: Tensor, bias: Tensor | None, flipped: bool, dim: int, shift: int) -> Tensor:
        return forward(input, bias, flipped, dim if dim >= -1 else 0, shift)

    def draw(draw: Draw) -> Inputs:
        shape = draw.size(), draw.size(), draw.size()
        return Inputs((draw.tensor(*shape), draw.tensor(*shape)), {"dim": 1})

    return make_op("negative_dimension_misread", misread, device, draw=draw)
