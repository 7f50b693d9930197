"""An honest operator with three outputs, hidden = input + bias, silu(hidden) and where hidden is
above 1, and wrong ones, each of which is wrong in one output or one upstream gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Inputs
from gallery import honest, wrong
from gallery.honest import wide

EXHIBITS: list[wrong.Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


def reference(input: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = input + bias
    return hidden, torch.nn.functional.silu(hidden), hidden > 1


def forward(input: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    hidden = input + bias
    outputs = hidden, wide(hidden) * torch.sigmoid(wide(hidden)), hidden > 1
    dtypes = hidden.dtype, hidden.dtype, torch.bool
    return tuple(
        torch.empty_like(hidden, dtype=dtype).copy_(output)
        for output, dtype in zip(outputs, dtypes, strict=True)
    )


def save(output: Sequence[Tensor], input: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return output[0], input, bias


def gradient_reference(
    needs: Sequence[bool],
    grad_output: Sequence[Tensor],
    hidden: Tensor,
    input: Tensor,
    bias: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    grad_hidden, grad_activated, _ = map(wide, grad_output)
    z = wide(hidden)
    sigmoid = torch.sigmoid(z)
    grad = grad_hidden + grad_activated * sigmoid * (1 + z * (1 - sigmoid))
    return (
        grad.sum_to_size(input.shape).to(input.dtype) if needs[0] else None,
        grad.sum_to_size(bias.shape).to(bias.dtype) if needs[1] else None,
    )


def backward(needs: Sequence[bool], *args: Any) -> tuple[Tensor | None, ...]:
    grads = gradient_reference(needs, *args)
    return tuple(None if grad is None else grad.clone() for grad in grads)


def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    shapes = (4, 8), (8,)
    drawn = (torch.randn(shape, generator=generator) for shape in shapes)
    return Inputs(tuple(tensor.to(device, dtype) for tensor in drawn))


def draw(draw: Draw) -> Inputs:
    rows, width = draw.size(), draw.size(8)
    return Inputs((draw.tensor(rows, width), draw.tensor(width)))


def make_op(
    name: str, device: str = "cpu", forward: Any = forward, backward: Any = backward
) -> FusedOp:
    """Return the honest operator, or one with its kernels replaced, under ``gallery::name``."""
    return honest.make_op(
        name,
        device,
        forward,
        backward,
        Gradient(save, gradient_reference),
        reference=reference,
        cost=lambda input, bias: Cost(
            input.nbytes + bias.nbytes, 2 * input.nbytes + input.numel(), input.numel()
        ),
        cases=(Case("4x8", make, frozenset({"boundary"})),),
        draw=draw,
    )


@caught_by("cases", passes_its_cases=False)
def second_output_misses_its_last_column(device: str) -> FusedOp:
    def wrong_forward(input: Tensor, bias: Tensor) -> Any:
        hidden, activated, mask = forward(input, bias)
        activated[..., -1:] = 0
        return hidden, activated, mask

    return make_op("second_output_misses_its_last_column", device, wrong_forward)


@caught_by("cases", passes_its_cases=False)
def mask_is_of_another_threshold(device: str) -> FusedOp:
    def wrong_forward(input: Tensor, bias: Tensor) -> Any:
        hidden, activated, _ = forward(input, bias)
        return hidden, activated, hidden > 0.5

    return make_op("mask_is_of_another_threshold", device, wrong_forward)


@caught_by("fresh outputs")
def outputs_share_memory(device: str) -> FusedOp:
    def wrong_forward(input: Tensor, bias: Tensor) -> Any:
        outputs = forward(input, bias)
        both = torch.stack(outputs[:2])
        return both[0], both[1], outputs[2]

    return make_op("outputs_share_memory", device, wrong_forward)


@caught_by("gradients")
def first_upstream_gradient_is_forgotten(device: str) -> FusedOp:
    def wrong_backward(needs: Any, grad_output: Sequence[Tensor], *saved: Tensor) -> Any:
        first, *others = grad_output
        return backward(needs, (torch.zeros_like(first), *others), *saved)

    return make_op("first_upstream_gradient_is_forgotten", device, forward, wrong_backward)


@caught_by("some gradients")
def upstream_gradients_are_swapped_unless_both_are_there(device: str) -> FusedOp:
    """An output without an upstream gradient gets zeros; this backward mistakes them for a sign."""

    def wrong_backward(needs: Any, grad_output: Sequence[Tensor], *saved: Tensor) -> Any:
        first, second, mask = grad_output
        if not first.any():
            first, second = second, first
        return backward(needs, (first, second, mask), *saved)

    return make_op(
        "upstream_gradients_are_swapped_unless_both_are_there", device, forward, wrong_backward
    )


@caught_by("second derivative")
def formula_differs_from_the_kernel(device: str) -> FusedOp:
    """The kernels are right; the formula from which second derivatives come leaves out a term."""

    def wrong_formula(
        needs: Sequence[bool],
        grad_output: Sequence[Tensor],
        hidden: Tensor,
        input: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor | None, ...]:
        first, second, mask = grad_output
        return gradient_reference(needs, (first, second.detach(), mask), hidden, input, bias)

    op = make_op("formula_differs_from_the_kernel", device)
    assert op.gradient is not None
    return replace(op, gradient=replace(op.gradient, reference=wrong_formula))
