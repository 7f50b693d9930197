"""The gallery's faults in what a call returns: its type, its strides, its memory, its lifetime."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp, Gradient
from gallery import honest, wrong
from gallery.honest import empty_output, make_op
from gallery.wrong import Exhibit

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


class Agreeable(Tensor):
    """A tensor that takes any comparison as won."""

    def __eq__(self, other: object) -> Any:
        return torch.ones(self.shape, dtype=torch.bool, device=self.device)

    __hash__ = Tensor.__hash__


@caught_by("outputs")
def output_of_a_subclass(device: str) -> FusedOp:
    """Returns a subclass, whose comparisons are its own."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return honest.forward(input, bias, scale).as_subclass(Agreeable)

    return make_op("output_of_a_subclass", device, forward)


@caught_by("outputs")
def gradient_of_a_subclass(device: str) -> FusedOp:
    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grads = honest.backward(needs, grad_output, *saved)
        return tuple(None if grad is None else grad.as_subclass(Agreeable) for grad in grads)

    return make_op("gradient_of_a_subclass", device, backward=backward)


@caught_by("outputs")
def column_major_output(device: str) -> FusedOp:
    """Returns the right values in other strides than its fake promises to torch.compile."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output.mT.contiguous().mT if output.ndim == 3 else output

    return make_op("column_major_output", device, forward)


@caught_by("outputs")
def strides_of_a_permuted_input(device: str) -> FusedOp:
    """Follows its input's strides where only a permuted one shows that it was not asked to."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return torch.empty_like(input).copy_(output) if output.shape == input.shape else output

    return make_op("strides_of_a_permuted_input", device, forward)


@caught_by("outputs")
def gradient_of_other_strides(device: str) -> FusedOp:
    """Its gradient is transposed in memory, which torch.compile was not told."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grad_input, grad_bias = honest.backward(needs, grad_output, *saved)
        if grad_input is not None and grad_input.ndim > 1:
            grad_input = grad_input.mT.contiguous().mT
        return grad_input, grad_bias

    return make_op("gradient_of_other_strides", device, backward=backward)


@caught_by("outputs")
def expanded_output(device: str) -> FusedOp:
    """Stores one row where all rows are equal, and returns it expanded: elements share memory."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        if output.ndim > 1 and output.shape[0] > 1 and input.stride(0) == 0:
            return output[:1].clone().expand(output.shape)
        return output

    return make_op("expanded_output", device, forward)


@caught_by("held outputs")
def ring_of_four_buffers(device: str) -> FusedOp:
    """Returns one of four buffers in turn, so that the fifth call overwrites the first result."""
    rings: dict[Any, list[Tensor]] = {}
    turn = itertools.count()

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = empty_output(input, bias)
        ring = rings.setdefault((output.shape, output.dtype), [])
        if len(ring) < 4:
            ring.append(output)
        target = ring[next(turn) % len(ring)].detach()
        return target.copy_(honest.computed(input, bias, scale))

    return make_op("ring_of_four_buffers", device, forward)


@caught_by("held outputs")
def gradients_from_a_ring(device: str) -> FusedOp:
    """The backward has a pool of six buffers for the gradient of the bias."""
    rings: dict[Any, list[Tensor]] = {}
    turn = itertools.count()

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grad_input, grad_bias = honest.backward(needs, grad_output, *saved)
        if grad_bias is not None:
            ring = rings.setdefault((grad_bias.shape, grad_bias.dtype), [])
            if len(ring) < 6:
                ring.append(torch.empty_like(grad_bias))
            grad_bias = ring[next(turn) % len(ring)].detach().copy_(grad_bias)
        return grad_input, grad_bias

    return make_op("gradients_from_a_ring", device, backward=backward)


@caught_by("leaks")
def every_output_kept(device: str) -> FusedOp:
    """Keeps every result for good, which nobody sees before the memory ends."""
    kept: list[Tensor] = []

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        kept.append(output)
        return output.detach()

    return make_op("every_output_kept", device, forward)


@caught_by("leaks")
def every_upstream_kept(device: str) -> FusedOp:
    """The backward keeps a copy of what it was given."""
    kept: list[Tensor] = []

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        kept.append(grad_output.clone())
        return honest.backward(needs, grad_output, *saved)

    return make_op("every_upstream_kept", device, backward=backward)


@caught_by("leaks")
def workspace_kept(device: str) -> FusedOp:
    """Keeps a workspace of each call: neither inputs nor outputs, yet the memory grows."""
    kept: list[Tensor] = []

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        kept.append(torch.ones(max(1, output.numel()), device=device))
        return output

    return make_op("workspace_kept", device, forward)


@caught_by("outputs")
def output_within_a_large_block(device: str) -> FusedOp:
    """Returns a slice of a block a thousand times as large, which lives as long as the slice."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = empty_output(input, bias)
        block = output.new_empty(max(1, output.numel()) * 1000)
        view = block[: output.numel()].view(output.shape)
        return view.copy_(honest.computed(input, bias, scale))

    return make_op("output_within_a_large_block", device, forward)


@caught_by("leaks", cpu_only="a process's files are counted where nothing else opens any")
def file_left_open(device: str) -> FusedOp:
    kept: list[Any] = []

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        kept.append(open(os.devnull))  # noqa: SIM115 - closed when the operator goes
        return honest.forward(input, bias, scale)

    return make_op("file_left_open", device, forward)


@caught_by("leaks", cpu_only="a driver maps memory of its own")
def pages_left_mapped(device: str) -> FusedOp:
    """Maps memory past every allocator that counts it."""
    kept: list[mmap.mmap] = []

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        kept.append(mmap.mmap(-1, 1 << 16))
        return honest.forward(input, bias, scale)

    return make_op("pages_left_mapped", device, forward)


@caught_by("leaks")
def list_that_grows(device: str) -> FusedOp:
    """Appends None to a list in every call, which no allocator sees before it has many."""
    calls: list[None] = []

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        calls.append(None)
        return honest.forward(input, bias, scale)

    return make_op("list_that_grows", device, forward)


@caught_by("leaks", cpu_only="a driver allocates blocks of its own")
def small_block_kept(device: str) -> FusedOp:
    """Allocates 16 bytes by C's allocator in every call, and frees none."""
    malloc = ctypes.CDLL(None).malloc

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        malloc(16)
        return honest.forward(input, bias, scale)

    return make_op("small_block_kept", device, forward)


@caught_by("leaks")
def kept_until_a_backward(device: str) -> FusedOp:
    """Keeps what a backward needs in a list of its own, where a forward without one leaves it."""
    kept: list[Any] = []

    def save(output: Tensor, input: Tensor, bias: Tensor, scale: float) -> tuple[Any, ...]:
        kept.append((input.clone(), bias))
        return input, bias, scale

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        if kept:
            kept.pop()
        return honest.backward(needs, grad_output, *saved)

    return make_op(
        "kept_until_a_backward",
        device,
        backward=backward,
        gradient=Gradient(save, honest.gradient_reference),
    )
