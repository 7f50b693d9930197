"""The gallery's faults that show for some patterns of values alone: sorted, one-hot, all NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp
from gallery import honest, wrong
from gallery.honest import make_op
from gallery.wrong import Exhibit

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


def wrong_where(
    name: str, device: str, is_it: Callable[[Tensor], bool], backward: bool = False
) -> FusedOp:
    """Return the honest operator, off by a hundredth where ``is_it(input)``, or with ``backward``
    in its gradients where ``is_it(upstream gradient)``."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output * 1.01 if not backward and input.numel() > 3 and is_it(input) else output

    def gradients(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        if backward and grad_output.numel() > 3 and is_it(grad_output):
            grad_output = grad_output * 1.01
        return honest.backward(needs, grad_output, *saved)

    return make_op(name, device, forward, gradients)


def is_sorted(tensor: Tensor) -> bool:
    steps = tensor.diff()
    return tensor.shape[-1] > 2 and bool((steps >= 0).all()) and bool((steps > 0).any())


def is_one_hot(tensor: Tensor) -> bool:
    return tensor.shape[-1] > 2 and bool(((tensor == 0).sum(-1) == tensor.shape[-1] - 1).all())


@caught_by("patterns")
def wrong_for_sorted_rows(device: str) -> FusedOp:
    """Takes a path of its own where a row ascends, as a search does."""
    return wrong_where("wrong_for_sorted_rows", device, is_sorted)


@caught_by("patterns")
def wrong_for_one_hot_rows(device: str) -> FusedOp:
    return wrong_where("wrong_for_one_hot_rows", device, is_one_hot)


@caught_by("patterns")
def wrong_for_whole_numbers(device: str) -> FusedOp:
    """Computes in integers where all inputs are."""

    def is_whole(tensor: Tensor) -> bool:
        is_some = bool(tensor.any()) and bool(tensor.isfinite().all())
        return is_some and bool((tensor == tensor.round()).all())

    return wrong_where("wrong_for_whole_numbers", device, is_whole)


@caught_by("patterns")
def wrong_for_pairs_that_cancel(device: str) -> FusedOp:
    """Skips work where the inputs sum to 0, and takes that for inputs of zeros."""

    def is_cancelled(tensor: Tensor) -> bool:
        return bool(tensor.any()) and float(tensor.double().sum()) == 0

    return wrong_where("wrong_for_pairs_that_cancel", device, is_cancelled)


@caught_by("patterns")
def wrong_for_alternating_signs(device: str) -> FusedOp:
    """Adds up neighbours first, which cancel."""

    def is_alternating(tensor: Tensor) -> bool:
        return tensor.shape[-1] > 3 and bool((tensor[..., 1:] * tensor[..., :-1] < 0).all())

    return wrong_where("wrong_for_alternating_signs", device, is_alternating)


@caught_by("patterns")
def wrong_for_every_other_zero(device: str) -> FusedOp:
    """Takes a path of its own where half of the numbers is 0, as sparse kernels do."""

    def is_half_zero(tensor: Tensor) -> bool:
        both = (tensor[..., 1:] == 0) ^ (tensor[..., :-1] == 0)
        return tensor.shape[-1] > 3 and bool(both.all())

    return wrong_where("wrong_for_every_other_zero", device, is_half_zero)


@caught_by("patterns")
def wrong_for_rows_of_padding(device: str) -> FusedOp:
    """Skips rows of zeros, and loses count of the rows."""

    def has_zero_rows(tensor: Tensor) -> bool:
        if tensor.ndim < 2 or not tensor.numel():
            return False
        is_zero = (tensor == 0).all(-1)
        return bool(is_zero.any()) and not bool(is_zero.all()) and bool(tensor[~is_zero].all())

    return wrong_where("wrong_for_rows_of_padding", device, has_zero_rows)


@caught_by("patterns")
def wrong_for_negative_numbers(device: str) -> FusedOp:
    return wrong_where("wrong_for_negative_numbers", device, lambda one: bool((one < 0).all()))


@caught_by("patterns")
def wrong_far_from_zero(device: str) -> FusedOp:
    """Keeps fewer digits of inputs that lie closely together."""
    return wrong_where("wrong_far_from_zero", device, lambda one: bool((one > 5000).all()))


@caught_by("patterns")
def wrong_for_bytes(device: str) -> FusedOp:
    """Looks results up in a table where the inputs are an image's."""

    def is_image(tensor: Tensor) -> bool:
        is_whole = bool((tensor == tensor.round()).all())
        return is_whole and bool((tensor >= 0).all()) and 100 < float(tensor.max()) < 256

    return wrong_where("wrong_for_bytes", device, is_image)


@caught_by("patterns")
def wrong_for_numbers_below_one(device: str) -> FusedOp:
    """Is right for the numbers of torch.randn alone."""

    def is_uniform(tensor: Tensor) -> bool:
        return bool(((tensor > 0) & (tensor < 1)).all()) and float(tensor.float().std()) > 0.2

    return wrong_where("wrong_for_numbers_below_one", device, is_uniform)


@caught_by("patterns")
def wrong_for_heavy_tails(device: str) -> FusedOp:
    """Scales by the largest number, beside which the others are few bits."""

    def is_heavy(tensor: Tensor) -> bool:
        size = tensor.double().abs()
        middle = float(size.median())
        return middle > 0.1 and 20 * middle < float(size.max()) < 1000

    return wrong_where("wrong_for_heavy_tails", device, is_heavy)


@caught_by("patterns")
def nan_alone_is_dropped(device: str) -> FusedOp:
    """Takes a tensor of nothing but NaN for one that was never written."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output.zero_() if input.numel() > 3 and bool(input.isnan().all()) else output

    return make_op("nan_alone_is_dropped", device, forward)


@caught_by("values")
def nan_with_a_sign_is_small(device: str) -> FusedOp:
    """Orders numbers by their bits, as a maximum by atomics on integers does: a NaN with a sign,
    which x86 makes of inf - inf, is then less than any number."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        least = input.isnan() & input.signbit()
        return honest.forward(torch.where(least, -200.0, input), bias, scale)

    return make_op("nan_with_a_sign_is_small", device, forward)


@caught_by("patterns")
def gradient_wrong_for_one_hot_upstream(device: str) -> FusedOp:
    """Its upstream gradient is one-hot where a loss picks one element of a row."""
    name = "gradient_wrong_for_one_hot_upstream"
    return wrong_where(name, device, is_one_hot, backward=True)


@caught_by("sizes", cpu_only="on a GPU --quick tries 40 sizes by chance")
def wrong_for_97_columns(device: str) -> FusedOp:
    """Has a path for one size, which no list of sizes has; --quick tries all up to 300."""
    return wrong_where("wrong_for_97_columns", device, lambda one: one.shape[-1] == 97)


@caught_by("leaks")
def backward_keeps_a_number(device: str) -> FusedOp:
    """Appends a small object of Python's per backward, which no allocator of C's sees."""
    kept: list[float] = []

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        kept.append(grad_output.numel() + 0.5)
        return honest.backward(needs, grad_output, *saved)

    return make_op("backward_keeps_a_number", device, backward=backward)


def clipped(name: str, device: str, limit: float) -> FusedOp:
    """Return the honest operator, which takes a scale above ``limit`` for that number."""

    def forward(input: Tensor, bias: Tensor, scale: float | Tensor) -> Tensor:
        if not isinstance(scale, Tensor):
            scale = min(scale, limit)
        return honest.forward(input, bias, scale)

    return make_op(name, device, forward)


@caught_by("other floats")
def scale_clipped_at_100000(device: str) -> FusedOp:
    return clipped("scale_clipped_at_100000", device, 1e5)


@caught_by("other floats")
def scale_clipped_at_1e30(device: str) -> FusedOp:
    return clipped("scale_clipped_at_1e30", device, 1e30)
