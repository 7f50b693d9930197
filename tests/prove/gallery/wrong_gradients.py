"""The gallery's faults in gradients: first and second derivatives, upstream gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp, Gradient
from gallery import honest, lookup, wrong
from gallery.honest import make_op, wide
from gallery.wrong import Exhibit, as_if_contiguous

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)

# Gradients


@caught_by("gradients", passes_its_cases=True)
def bias_gradient_of_one_row(device: str) -> FusedOp:
    """The gradient of a broadcast bias is a sum over rows; this one is the first row's."""

    def backward(needs: Any, grad_output: Tensor, input: Tensor, bias: Tensor, scale: float) -> Any:
        z = wide(input) * scale + wide(bias)
        sigmoid = torch.sigmoid(z)
        grad = wide(grad_output) * (sigmoid * (1 + z * (1 - sigmoid)))
        first = grad.reshape(-1, bias.shape[0])[:1].sum(0) if bias.numel() else grad.sum()
        grad_bias = first.to(bias.dtype).expand(bias.shape).contiguous() if needs[1] else None
        return (grad * scale).to(input.dtype) if needs[0] else None, grad_bias

    return make_op("bias_gradient_of_one_row", device, backward=backward)


@caught_by("gradient present")
def no_gradient_at_all(device: str) -> FusedOp:
    def gradient(
        needs: Sequence[bool], grad_output: Tensor, input: Tensor, bias: Tensor, scale: float
    ) -> tuple[Tensor | None, Tensor | None]:
        return None, None

    gradient.__annotations__ = dict(honest.gradient_reference.__annotations__)
    gradient.__globals__.update(Sequence=Sequence, Tensor=Tensor)
    declared = Gradient(honest.save, gradient)
    return make_op("no_gradient_at_all", device, backward=None, gradient=declared)


@caught_by("gradient present")
def gradient_said_to_be_none(device: str) -> FusedOp:
    """Declares that no gradient flows to the bias, which has one."""
    declared = Gradient(honest.save, honest.gradient_reference, non_differentiable=("bias",))
    return make_op("gradient_said_to_be_none", device, gradient=declared)


@caught_by("gradients")
def upstream_taken_as_one(device: str) -> FusedOp:
    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        return honest.backward(needs, torch.ones_like(grad_output), *saved)

    return make_op("upstream_taken_as_one", device, backward=backward)


@caught_by("summed")
def upstream_taken_as_contiguous(device: str) -> FusedOp:
    """output.sum().backward() hands over one number with strides of 0."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        return honest.backward(needs, as_if_contiguous(grad_output), *saved)

    return make_op("upstream_taken_as_contiguous", device, backward=backward)


@caught_by("upstream")
def transposed_upstream_misread(device: str) -> FusedOp:
    """Handles an expanded upstream gradient, and no transposed one."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        if 0 not in grad_output.stride():
            grad_output = as_if_contiguous(grad_output)
        return honest.backward(needs, grad_output, *saved)

    return make_op("transposed_upstream_misread", device, backward=backward)


@caught_by("some gradients")
def gradients_all_or_none(device: str) -> FusedOp:
    """Takes for granted that the input needs a gradient whenever the bias does."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grads = honest.backward((True, True), grad_output, *saved)
        return grads if needs[0] else (grads[0], torch.zeros_like(saved[1]))

    return make_op("gradients_all_or_none", device, backward=backward)


@caught_by("backward twice")
def gradient_differs_the_second_time(device: str) -> FusedOp:
    """Frees what it needs in the first backward, so that the second one finds something else."""
    seen: set[int] = set()

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        key = saved[0].data_ptr(), grad_output.data_ptr()
        again = hash(key) in seen
        seen.clear()
        seen.add(hash(key))
        grads = honest.backward(needs, grad_output, *saved)
        return tuple(grad if grad is None or not again else grad * (1 + 2**-20) for grad in grads)

    return make_op("gradient_differs_the_second_time", device, backward=backward)


@caught_by("backward twice")
def scale_of_the_last_forward(device: str) -> FusedOp:
    """Leaves a factor of its gradient in the module, where the next forward writes over it: right
    while every backward follows its own forward."""
    left: dict[torch.Size, float] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        left[input.shape] = float(input.double().sum().nan_to_num())
        return honest.forward(input, bias, scale)

    def backward(needs: Any, grad_output: Tensor, input: Tensor, *others: Any) -> Any:
        grads = honest.backward(needs, grad_output, input, *others)
        is_last = left.get(input.shape) == float(input.double().sum().nan_to_num())
        return grads if is_last else tuple(None if grad is None else grad * 2 for grad in grads)

    return make_op("scale_of_the_last_forward", device, forward, backward)


def _hidden(tensor: Tensor) -> Tensor:
    try:
        return tensor.data
    except RuntimeError:  # of a fake tensor
        return tensor


@caught_by("writes before backward")
def saved_without_a_version(device: str) -> FusedOp:
    """Saves ``input.data``: autograd does not notice that the input was written over since."""

    def save(output: Tensor, input: Tensor, bias: Tensor, scale: float) -> tuple[Any, ...]:
        return _hidden(input), bias, scale

    declared = Gradient(save, honest.gradient_reference)
    return make_op("saved_without_a_version", device, gradient=declared)


@caught_by("writes before backward")
def ids_saved_without_a_version(device: str) -> FusedOp:
    """Saves the ids of a lookup as their ``.data``: other rows get the gradient after a write."""

    def save(output: Tensor, tables: Sequence[Tensor], ids: Tensor) -> tuple[Any, ...]:
        return tables, _hidden(ids)

    return lookup.make_op("ids_saved_without_a_version", device, save=save)


@caught_by("autocast")
def coarse_backward_within_autocast(device: str) -> FusedOp:
    """Rounds the upstream gradient to 8 bits after a call within autocast, of which its cast
    tells: forward and backward themselves run with autocast off."""
    within: list[torch.dtype] = []

    def autocast(dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
        within.append(dtype)
        return args

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        if within:
            within.clear()
            grad_output = grad_output.to(torch.bfloat16).to(grad_output.dtype)
        return honest.backward(needs, grad_output, *saved)

    return make_op("coarse_backward_within_autocast", device, backward=backward, autocast=autocast)


def _constant_sigmoid(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient with its own derivative cut: right once, wrong twice, without a word."""
    z = wide(input) * scale + wide(bias)
    sigmoid = torch.sigmoid(z).detach()
    grad = wide(grad_output) * (sigmoid * (1 + z * (1 - sigmoid)))
    grad_input = (grad * scale).sum_to_size(input.shape).to(input.dtype) if needs[0] else None
    grad_bias = grad.sum_to_size(bias.shape).to(bias.dtype) if needs[1] else None
    return grad_input, grad_bias


@caught_by("second derivative")
def silent_wrong_double_backward(device: str) -> FusedOp:
    declared = Gradient(honest.save, _constant_sigmoid)
    return make_op("silent_wrong_double_backward", device, gradient=declared)


@caught_by("gradient penalty")
def wrong_gradient_penalty(device: str) -> FusedOp:
    declared = Gradient(honest.save, _constant_sigmoid)
    return make_op("wrong_gradient_penalty", device, gradient=declared)


@caught_by("gradcheck", dtype=torch.float64)
def fails_gradgradcheck(device: str) -> FusedOp:
    declared = Gradient(honest.save, _constant_sigmoid)
    return make_op("fails_gradgradcheck", device, gradient=declared)


@caught_by("upstream overflow")
def upstream_nan_dropped_in_the_last_row(device: str) -> FusedOp:
    """Takes NaN for 0 in a tail; the other rows still have NaN for a loss scaler to find."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        kept = grad_output.clone(memory_format=torch.contiguous_format)
        if kept.ndim > 1 and kept.numel():
            last = kept.view(-1, kept.shape[-1])[-1]
            last[last.isnan()] = 0
        return honest.backward(needs, kept, *saved)

    return make_op("upstream_nan_dropped_in_the_last_row", device, backward=backward)
