"""The gallery's faults in where it reads and writes: gaps, bases, edges, tensors given twice."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp
from gallery import honest, wrong
from gallery.honest import make_op
from gallery.wrong import Exhibit, as_if_contiguous

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


def misread_where(name: str, device: str, misread: Callable[[Tensor], bool]) -> FusedOp:
    """Return an operator that ignores the strides of an input for which ``misread`` is true."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        wrong_here = input.numel() > 0 and misread(input)
        return honest.forward(as_if_contiguous(input) if wrong_here else input, bias, scale)

    return make_op(name, device, forward)


@caught_by("strides")
def outer_gap_ignored(device: str) -> FusedOp:
    """Folds all leading dimensions into rows, which ``x[:, :k]`` of three dimensions forbids."""

    def has_outer_gap(input: Tensor) -> bool:
        return (
            input.ndim == 3
            and input.shape[0] > 1
            and input.stride(-1) == 1
            and input.stride(1) == input.shape[2]
            and input.stride(0) > input.shape[1] * input.shape[2]
        )

    return misread_where("outer_gap_ignored", device, has_outer_gap)


@caught_by("strides")
def outer_dimensions_swapped(device: str) -> FusedOp:
    """Handles a transposed matrix, and not a batch whose two leading dimensions are swapped."""

    def is_swapped(input: Tensor) -> bool:
        return (
            input.ndim == 3
            and min(input.shape) > 1
            and input.stride(-1) == 1
            and input.stride(0) < input.stride(1)
        )

    return misread_where("outer_dimensions_swapped", device, is_swapped)


@caught_by("strides")
def outer_step_ignored(device: str) -> FusedOp:
    """Takes every row for the neighbour of the one before, so ``x[::2]`` is misread."""

    def has_outer_step(input: Tensor) -> bool:
        columns = input.shape[-1]
        return (
            input.ndim > 1
            and input.shape[0] > 1
            and input.stride(-1) == 1
            and columns > 1
            and input.stride(-2) >= 2 * columns
        )

    return misread_where("outer_step_ignored", device, has_outer_step)


@caught_by("strides")
def gaps_everywhere_ignored(device: str) -> FusedOp:
    """Has a path for two loops, and none for three that no two strides of which make one."""

    def has_gaps(input: Tensor) -> bool:
        strides = sorted(zip(input.stride(), input.shape, strict=True))
        return (
            input.ndim == 3
            and min(input.shape) > 1
            and strides[0][0] > 1
            and strides[1][0] > strides[0][0] * strides[0][1]
            and strides[2][0] > strides[1][0] * strides[1][1]
        )

    return misread_where("gaps_everywhere_ignored", device, has_gaps)


@caught_by("strides")
def windows_taken_for_a_transposition(device: str) -> FusedOp:
    """Tells rows from columns by the larger stride, and those of ``Tensor.unfold`` are equal."""

    def are_equal(input: Tensor) -> bool:
        return input.ndim > 1 and min(input.shape) > 1 and input.stride(-1) == input.stride(-2) > 0

    return misread_where("windows_taken_for_a_transposition", device, are_equal)


@caught_by("strides")
def channels_last_ignored(device: str) -> FusedOp:
    """Handles any order of strides except the one in which the first dimension lies innermost but
    one."""

    def is_rotated(input: Tensor) -> bool:
        return input.ndim == 3 and min(input.shape) > 1 and input.stride(1) == 1

    return misread_where("channels_last_ignored", device, is_rotated)


@caught_by("layouts")
def every_step_taken_as_two(device: str) -> FusedOp:
    """Knows two strides of the bias: a step of 1, and a step of 2 for all others."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if bias.numel() > 1 and bias.stride(0) > 2:
            bias = bias.as_strided(bias.shape, (2,))
        return honest.forward(input, bias, scale)

    return make_op("every_step_taken_as_two", device, forward)


@caught_by("layouts")
def base_of_a_transposed_input_forgotten(device: str) -> FusedOp:
    """Adds the offset to contiguous tensors alone: a transposed one begins at the storage's."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if input.ndim == 2 and input.stride(0) == 1 and input.storage_offset():
            input = input.as_strided(input.shape, input.stride(), 0)
        return honest.forward(input, bias, scale)

    return make_op("base_of_a_transposed_input_forgotten", device, forward)


@caught_by("strides")
def repeated_middle_dimension_ignored(device: str) -> FusedOp:
    """Knows a stride of 0 in the first and in the last dimension, as biases have."""

    def is_repeated(input: Tensor) -> bool:
        return input.ndim == 3 and input.shape[1] > 1 and input.stride(1) == 0 != input.stride(0)

    return misread_where("repeated_middle_dimension_ignored", device, is_repeated)


@caught_by("aliases")
def equal_addresses_taken_for_one_tensor(device: str) -> FusedOp:
    """Reads its input once where the bias begins at the same address, also if it is shorter."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        is_one = input.numel() and input.data_ptr() == bias.data_ptr()
        return output.zero_() if is_one and input.shape != bias.shape else output

    return make_op("equal_addresses_taken_for_one_tensor", device, forward)


@caught_by("upstream")
def upstream_constant_in_rows_misread(device: str) -> FusedOp:
    """Takes an upstream gradient with a stride of 0 in its rows, as ``sum(-1)`` gives it, for
    contiguous."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        if grad_output.ndim > 1 and grad_output.stride(-1) == 0 != max(grad_output.stride()):
            grad_output = as_if_contiguous(grad_output)
        return honest.backward(needs, grad_output, *saved)

    return make_op("upstream_constant_in_rows_misread", device, backward=backward)


@caught_by("upstream overflow")
def gradients_without_infinities_where_most_are(device: str) -> FusedOp:
    """Hides an overflow where most of the upstream gradient has overflown."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grads = honest.backward((True, True), grad_output, *saved)
        most = grad_output.numel() > 3 and 2 * int(grad_output.isinf().sum()) > grad_output.numel()
        return tuple(grad.nan_to_num(0.0, 0.0, 0.0) if most else grad for grad in grads)

    return make_op("gradients_without_infinities_where_most_are", device, backward=backward)


@caught_by("strides")
def base_taken_as_zero(device: str) -> FusedOp:
    """Reads from the start of the storage, also where the view begins later."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if input.storage_offset() and input.numel():
            input = input.as_strided(input.shape, input.stride(), 0)
        return honest.forward(input, bias, scale)

    return make_op("base_taken_as_zero", device, forward)


@caught_by("guards")
def written_past_the_output(device: str) -> FusedOp:
    """Stores whole vectors of eight, also at the end of the output."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        room = output.untyped_storage().nbytes() // output.element_size()
        end = min(room, output.storage_offset() + -(-output.numel() // 8) * 8)
        if output.numel() and end > output.storage_offset() + output.numel():
            whole = output.as_strided((end,), (1,), 0)
            whole[output.storage_offset() + output.numel() :] = 1.0
        return output

    return make_op("written_past_the_output", device, forward)


@caught_by("guards")
def written_before_the_output(device: str) -> FusedOp:
    """Writes the element before the first, as a halo that is off by one does."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        if output.storage_offset():
            output.as_strided((1,), (1,), output.storage_offset() - 1).fill_(3.0)
        return output

    return make_op("written_before_the_output", device, forward)


@caught_by("guards")
def written_a_row_past_the_output(device: str) -> FusedOp:
    """Writes one row too many, hundreds of elements behind the last one."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        room = output.untyped_storage().nbytes() // output.element_size()
        place = output.storage_offset() + output.numel() + 700
        if output.numel() and room > place:
            output.as_strided((1,), (1,), place).fill_(3.0)
        return output

    return make_op("written_a_row_past_the_output", device, forward)


@caught_by("guards")
def gradient_written_past_its_end(device: str) -> FusedOp:
    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grad_input, grad_bias = honest.backward(needs, grad_output, *saved)
        if grad_bias is None:
            return grad_input, None
        result = torch.empty_like(grad_bias).copy_(grad_bias)
        room = result.untyped_storage().nbytes() // result.element_size()
        end = result.storage_offset() + result.numel()
        if room > end:
            result.as_strided((1,), (1,), end).fill_(3.0)
        return grad_input, result

    return make_op("gradient_written_past_its_end", device, backward=backward)


@caught_by("guards")
def read_past_the_input(device: str) -> FusedOp:
    """Takes the element behind the last one into a sum with the weight 2^-20."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        end = input.storage_offset() + input.numel()
        room = input.untyped_storage().nbytes() // input.element_size()
        if input.is_contiguous() and room > end and output.numel():
            behind = torch.nan_to_num(input.as_strided((1,), (1,), end), 0.0, 0.0, 0.0)
            output.view(-1)[-1] += behind[0].clamp(-8, 8) * 2.0**-20
        return output

    return make_op("read_past_the_input", device, forward)


@caught_by("aliases")
def one_tensor_given_twice(device: str) -> FusedOp:
    """Takes two arguments at one address for the same argument."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        same = input.data_ptr() == bias.data_ptr() and input.numel() > 0
        return honest.forward(input, torch.zeros_like(bias) if same else bias, scale)

    return make_op("one_tensor_given_twice", device, forward)


@caught_by("aliases")
def overlapping_arguments(device: str) -> FusedOp:
    """Uses the memory of one argument as scratch and restores it; the other one overlaps it."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if not (input.numel() and bias.numel()):
            return honest.forward(input, bias, scale)
        kept, held = bias.detach().clone(), bias.detach()
        if 0 in held.stride():
            return honest.forward(input, bias, scale)
        held.data.mul_(0)
        output = honest.forward(input, kept, scale)
        held.data.copy_(kept)
        return output

    return make_op("overlapping_arguments", device, forward)


@caught_by("upstream overflow")
def overflow_hidden_from_the_scaler(device: str) -> FusedOp:
    """Replaces inf and NaN in its gradients by 0, so that a loss scaler never sees an overflow."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grads = honest.backward(needs, grad_output, *saved)
        if grad_output.isfinite().all():
            return grads
        return tuple(
            None if grad is None else torch.nan_to_num(grad, 0.0, 0.0, 0.0) for grad in grads
        )

    return make_op("overflow_hidden_from_the_scaler", device, backward=backward)


@caught_by("upstream overflow")
def gradient_clamped(device: str) -> FusedOp:
    """Clamps an infinite gradient to the largest number."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        limit = torch.finfo(grad_output.dtype).max
        return honest.backward(needs, grad_output.clamp(-limit, limit), *saved)

    return make_op("gradient_clamped", device, backward=backward)


@caught_by("upstream overflow")
def nan_upstream_taken_as_zero(device: str) -> FusedOp:
    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        cleaned = torch.where(grad_output.isnan(), 0.0, grad_output)
        return honest.backward(needs, cleaned, *saved)

    return make_op("nan_upstream_taken_as_zero", device, backward=backward)


@caught_by("gradients")
def subnormal_upstream_flushed(device: str) -> FusedOp:
    """Flushes subnormal upstream gradients, which a small loss scale makes."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        tiny = torch.finfo(grad_output.dtype).tiny
        flushed = torch.where(grad_output.abs() < tiny, 0.0, grad_output)
        return honest.backward(needs, flushed, *saved)

    return make_op("subnormal_upstream_flushed", device, backward=backward)


@caught_by("values")
def last_row_without_infinities(device: str) -> FusedOp:
    """Replaces a positive infinity by the largest number, and keeps the negative one."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        limit = torch.finfo(output.dtype).max
        return torch.where(output == math.inf, limit, output)

    return make_op("last_row_without_infinities", device, forward)


def kept_by(name: str, device: str, key_of: Callable[..., Any]) -> FusedOp:
    """Return an operator that keeps results of larger inputs under what ``key_of`` makes of
    them."""
    kept: dict[Any, Tensor] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if input.numel() < 64 or input.isnan().any():
            return honest.forward(input, bias, scale)
        key = (input.shape, input.dtype, bias.shape, scale, *key_of(input, bias))
        if key not in kept:
            kept[key] = honest.forward(input, bias, scale)
        return kept[key].clone()

    return make_op(name, device, forward)


@caught_by("near values")
def kept_by_the_sum_of_values(device: str) -> FusedOp:
    def key_of(input: Tensor, bias: Tensor) -> tuple[float, float]:
        return float(input.double().sum()), float(bias.double().sum())

    return kept_by("kept_by_the_sum_of_values", device, key_of)


@caught_by("near values")
def kept_by_some_values(device: str) -> FusedOp:
    def key_of(input: Tensor, bias: Tensor) -> tuple[float, ...]:
        return (*input.flatten()[::7].tolist(), *bias.tolist())

    return kept_by("kept_by_some_values", device, key_of)


@caught_by("mixed dtypes")
def reads_a_bias_of_another_dtype(device: str) -> FusedOp:
    """Reads the bias as if it had the input's dtype."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        dtypes = input.dtype, bias.dtype
        if input.dtype != bias.dtype:
            bias = bias.view(torch.uint8)[: len(bias)].to(input.dtype)
            return honest.forward(input, bias, scale).to(torch.promote_types(*dtypes))
        return honest.forward(input, bias, scale)

    return make_op("reads_a_bias_of_another_dtype", device, forward)


def with_places_of_32_bits(tensor: Tensor, bits: int) -> Tensor:
    """Return what a kernel reads whose index has so many bits: memory of zeros for places that it
    does not hold."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return torch.zeros_like(tensor) if last >= 1 << bits else tensor


@caught_by("far strides", cpu_only='a GPU has no memory for it; "huge" is about that')
def index_of_32_bits(device: str) -> FusedOp:
    """Multiplies a row's number by its stride in 32 bits."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return honest.forward(with_places_of_32_bits(input, 31), bias, scale)

    return make_op("index_of_32_bits", device, forward)


@caught_by("far strides", cpu_only='a GPU has no memory for it; "huge" is about that')
def upstream_index_of_32_bits_without_a_sign(device: str) -> FusedOp:
    """Reads the upstream gradient by an unsigned index."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        return honest.backward(needs, with_places_of_32_bits(grad_output, 32), *saved)

    return make_op("upstream_index_of_32_bits_without_a_sign", device, backward=backward)


@caught_by("inputs unchanged")
def hook_left_on_an_input(device: str) -> FusedOp:
    """Registers a hook on the gradient of its input, one more in every call."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if input.requires_grad:
            input.register_hook(lambda grad: None)
        return honest.forward(input, bias, scale)

    return make_op("hook_left_on_an_input", device, forward)


@caught_by("inputs unchanged")
def attribute_left_on_an_input(device: str) -> FusedOp:
    """Notes on its bias that it has seen it, as a cache does."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        bias.seen = True  # type: ignore[attr-defined]
        return honest.forward(input, bias, scale)

    return make_op("attribute_left_on_an_input", device, forward)


@caught_by("inputs unchanged")
def upstream_moved_to_other_memory(device: str) -> FusedOp:
    """Puts equal numbers in other memory into the upstream gradient, whose other views then differ
    from it."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grad_output.data = grad_output.clone()
        return honest.backward(needs, grad_output, *saved)

    return make_op("upstream_moved_to_other_memory", device, backward=backward)
