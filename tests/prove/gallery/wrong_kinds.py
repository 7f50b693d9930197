"""The gallery's faults for tensors of one kind, and for what was remembered of one call alone."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp
from gallery import honest, wrong
from gallery.honest import empty_output, make_op
from gallery.wrong import Exhibit

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


def wrong_where(name: str, device: str, fails: Callable[[Tensor, Tensor, float], bool]) -> FusedOp:
    """Return the honest operator, whose results are off by 1 where ``fails`` says so."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output.add_(1) if fails(input, bias, scale) else output

    return make_op(name, device, forward)


@caught_by("kinds of tensor")
def knows_leaves_alone(device: str) -> FusedOp:
    """Takes another path for what an earlier layer computed, which no test of one layer has."""
    return wrong_where("knows_leaves_alone", device, lambda input, bias, scale: not input.is_leaf)


@caught_by("kinds of tensor")
def parameter_taken_for_a_constant(device: str) -> FusedOp:
    return wrong_where(
        "parameter_taken_for_a_constant",
        device,
        lambda input, bias, scale: isinstance(bias, torch.nn.Parameter),
    )


@caught_by("kinds of tensor")
def base_of_a_view_read(device: str) -> FusedOp:
    """Reads the tensor that a view was taken from, which has the same first elements."""

    def ends_elsewhere(input: Tensor, bias: Tensor, scale: float) -> bool:
        return input._base is not None and input._base.numel() > input.numel()

    return wrong_where("base_of_a_view_read", device, ends_elsewhere)


@caught_by("kinds of tensor")
def aligned_loads_of_32_bytes(device: str) -> FusedOp:
    """Takes every address that 16 divides for one that 32 divides."""
    return wrong_where(
        "aligned_loads_of_32_bytes",
        device,
        lambda input, bias, scale: input.data_ptr() % 32 == 16 and input.storage_offset() == 4,
    )


@caught_by("kinds of tensor")
def knows_new_tensors_alone(device: str) -> FusedOp:
    """Uses the version counter as the number of a step."""
    return wrong_where(
        "knows_new_tensors_alone",
        device,
        lambda input, bias, scale: not bias.is_inference() and bias._version > 9,
    )


@caught_by("kinds of tensor", cpu_only="another library's memory is the CPU's")
def memory_of_pytorch_alone(device: str) -> FusedOp:
    return wrong_where(
        "memory_of_pytorch_alone",
        device,
        lambda input, bias, scale: not input.untyped_storage().resizable(),
    )


@caught_by("kinds of tensor")
def adds_to_the_gradient_of_a_leaf(device: str) -> FusedOp:
    return wrong_where(
        "adds_to_the_gradient_of_a_leaf",
        device,
        lambda input, bias, scale: input.is_leaf and input.grad is not None,
    )


@caught_by("kinds of tensor", cpu_only="autograd has a thread of its own for a GPU")
def backward_in_its_own_thread_alone(device: str) -> FusedOp:
    """Keeps what the backward needs by the thread that the forward ran in."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        found = honest.backward(needs, grad_output, *saved)
        if threading.current_thread() is threading.main_thread():
            return found
        return tuple(None if one is None else torch.zeros_like(one) for one in found)

    return make_op("backward_in_its_own_thread_alone", device, backward=backward)


@caught_by("global state")
def first_call_is_wrong(device: str) -> FusedOp:
    """Returns a workspace that its first call has not filled yet."""
    calls: list[int] = []

    def is_first(input: Tensor, bias: Tensor, scale: float) -> bool:
        calls.append(1)
        return len(calls) == 1

    return wrong_where("first_call_is_wrong", device, is_first)


@caught_by("near values")
def kept_for_the_input_alone(device: str) -> FusedOp:
    """Keeps results by all values of the input, and forgets the bias."""
    held: dict[Any, Tensor] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        values = input.detach().double().cpu().contiguous().numpy().tobytes()
        key = values, input.shape, bias.shape, scale
        if key not in held:
            held[key] = honest.forward(input, bias, scale)
        return held[key].clone()

    return make_op("kept_for_the_input_alone", device, forward)


@caught_by("fresh values")
def kept_for_the_last_tensor(device: str) -> FusedOp:
    """Knows the last call's tensor again by its identity, whatever it holds now."""
    held: dict[Any, tuple[Any, Tensor]] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        key = input.data_ptr(), bias.data_ptr(), input.shape, input.stride(), scale
        known, output = held.get(key, (lambda: None, input))
        if known() is not input:
            output = honest.forward(input, bias, scale)
            held[key] = weakref.ref(input), output
        return output.clone()

    return make_op("kept_for_the_last_tensor", device, forward)


@caught_by("other floats")
def scale_ends_at_ten(device: str) -> FusedOp:
    """Keeps the scale in a table for the numbers that were tried."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return honest.forward(input, bias, max(scale, -10.0))

    return make_op("scale_ends_at_ten", device, forward)


@caught_by("thread counts", cpu_only="its threads are the CPU's")
def wrong_with_two_threads(device: str) -> FusedOp:
    """Splits its work in two, which no machine of one core and none of many does."""
    halves = 4 if torch.get_num_threads() == 2 else 2
    return wrong_where(
        "wrong_with_two_threads",
        device,
        lambda input, bias, scale: torch.get_num_threads() == halves,
    )


@caught_by("slices")
def offset_of_the_first_slice(device: str) -> FusedOp:
    """Keeps the address of an input for its storage, shape and strides, which all slices of a
    tensor share."""
    offsets: dict[Any, int] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        key = input.untyped_storage().data_ptr(), input.shape, input.stride()
        if not input.is_contiguous() or input.untyped_storage().nbytes() < 2 * input.nbytes:
            return honest.forward(input, bias, scale)
        first = offsets.setdefault(key, input.storage_offset())
        held = input.untyped_storage().nbytes() // input.element_size()
        if first + input.numel() > held:  # other memory has come to this address
            first = offsets[key] = input.storage_offset()
        read = input.as_strided(input.shape, input.stride(), first)
        return honest.forward(read, bias, scale)

    return make_op("offset_of_the_first_slice", device, forward)


@caught_by("dtypes in turn")
def dtype_of_the_first_call(device: str) -> FusedOp:
    """Builds a kernel for the number of dimensions, and for the dtype that came first."""
    built: dict[int, torch.dtype] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        double = torch.promote_types(input.dtype, bias.dtype) == torch.float64
        dtype = built.setdefault(input.ndim, torch.float64 if double else torch.float32)
        output = honest.forward(input.to(dtype), bias.to(dtype), scale)
        return empty_output(input, bias).copy_(output)

    return make_op("dtype_of_the_first_call", device, forward)
