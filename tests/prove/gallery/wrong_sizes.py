"""The gallery's faults at sizes: a tail that no list of sizes has, and what is large."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp
from gallery import honest, wrong
from gallery.honest import make_op
from gallery.wrong import Exhibit

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


@caught_by("shapes")
def tail_of_six(device: str) -> FusedOp:
    """Handles a tail by fours and then by ones, and forgets the one pair of them: six of eight."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        if output.shape[-1] % 8 == 6:
            output[..., -2:] = 0
        return output

    return make_op("tail_of_six", device, forward)


@caught_by("shapes")
def rows_of_six(device: str) -> FusedOp:
    """Forgets the same pair among the rows."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        if output.ndim > 1 and math.prod(output.shape[:-1]) % 8 == 6:
            output.view(-1, output.shape[-1])[-2:] = 0
        return output

    return make_op("rows_of_six", device, forward)


def wrong_above(name: str, device: str, elements: int) -> FusedOp:
    """Return an operator that computes the first ``elements`` elements only."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        output.view(-1)[elements:] = 0
        return output

    return make_op(name, device, forward)


@caught_by("large")
def wrong_above_65536_elements(device: str) -> FusedOp:
    """Computes an index in 16 bits."""
    return wrong_above("wrong_above_65536_elements", device, 1 << 16)


@caught_by("large")
def wrong_above_a_million_elements(device: str) -> FusedOp:
    return wrong_above("wrong_above_a_million_elements", device, 1 << 20)


@caught_by("large")
def rows_in_one_grid_dimension(device: str) -> FusedOp:
    """Launches one program per row in a dimension of the grid that ends at 65535."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        output.view(-1, output.shape[-1] if output.numel() else 1)[65_535:] = 0
        return output

    return make_op("rows_in_one_grid_dimension", device, forward)


@caught_by("large")
def wide_rows_cut(device: str) -> FusedOp:
    """Keeps a row in 2^17 elements of shared memory."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        output[..., 1 << 17 :] = 0
        return output

    return make_op("wide_rows_cut", device, forward)


@caught_by("large")
def large_bias_gradient_in_halves(device: str) -> FusedOp:
    """Splits the sum over rows above 2^12 rows, and loses the second half's last row."""

    def backward(needs: object, grad_output: Tensor, input: Tensor, *others: object) -> object:
        grads = honest.backward((True, True), grad_output, input, *others)
        rows = grad_output.numel() // max(1, grad_output.shape[-1])
        if rows <= 1 << 12:
            return grads
        without = torch.cat(
            [
                grad_output.reshape(rows, -1)[:-1],
                grad_output.new_zeros(1, 1).expand(1, grad_output.shape[-1]),
            ]
        )
        return honest.backward((True, True), without.view_as(grad_output), input, *others)

    return make_op("large_bias_gradient_in_halves", device, backward=backward)


@caught_by("large")
def input_gradient_ends_at_262144(device: str) -> FusedOp:
    """Computes the first 2^18 elements of a gradient."""

    def backward(*args: object) -> object:
        grads = honest.backward((True, True), *args[1:])
        grads[0].view(-1)[1 << 18 :] = 0
        return grads

    return make_op("input_gradient_ends_at_262144", device, backward=backward)


def last_column_lost(name: str, device: str, rows: int, columns: int) -> FusedOp:
    """Return an operator that forgets the last column where there are more rows and columns."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        width = output.shape[-1]
        if width > columns and output.numel() // width > rows:
            output[..., -1] = 0
        return output

    return make_op(name, device, forward)


@caught_by("large")
def last_column_lost_of_many_rows(device: str) -> FusedOp:
    """Takes another path where there are many rows and they are not narrow."""
    return last_column_lost("last_column_lost_of_many_rows", device, 8192, 100)


@caught_by("large")
def last_column_lost_of_wide_rows(device: str) -> FusedOp:
    return last_column_lost("last_column_lost_of_wide_rows", device, 100, 8192)


@caught_by("very large")
def last_column_lost_of_many_wide_rows(device: str) -> FusedOp:
    """Takes another path where both dimensions are above 4096."""
    return last_column_lost("last_column_lost_of_many_wide_rows", device, 4096, 4096)


@caught_by("large")
def last_tile_lost_where_all_are_full(device: str) -> FusedOp:
    """Takes a path without masks where both dimensions are multiples of a tile, and ends early."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        if output.ndim > 1 and output.numel() and not any(size % 128 for size in output.shape[-2:]):
            output[..., -128:, -128:] = 0
        return output

    return make_op("last_tile_lost_where_all_are_full", device, forward)


@caught_by("very large")
def index_in_float32(device: str) -> FusedOp:
    """Counts elements in float32, which holds no odd number above 2^24."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        index = torch.arange(output.numel(), dtype=torch.float32, device=output.device).long()
        index.clamp_(max=output.numel() - 1)
        return output.view(-1)[index].view(output.shape)

    return make_op("index_in_float32", device, forward)


@caught_by("large mixture")
def strides_forgotten_in_large_inputs(device: str) -> FusedOp:
    """Follows strides in the kernel for small inputs, and not in the one for large inputs."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if input.numel() > 5000 and not input.is_contiguous():
            input = input.new_zeros(input.shape)
        return honest.forward(input, bias, scale)

    return make_op("strides_forgotten_in_large_inputs", device, forward)


@caught_by("large mixture")
def nan_lost_between_pieces(device: str) -> FusedOp:
    """Takes a row in pieces of 4096, and joins them by a maximum that drops NaN."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output.nan_to_num(nan=0.0) if output.shape[-1] > 4096 else output

    return make_op("nan_lost_between_pieces", device, forward)


@caught_by("dimensions")
def knows_three_dimensions(device: str) -> FusedOp:
    """Takes a tensor of four dimensions for one of three."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        if output.ndim > 3:
            output[1:] = 0
        return output

    return make_op("knows_three_dimensions", device, forward)


@caught_by("dimensions")
def four_dimensions_are_contiguous(device: str) -> FusedOp:
    """Follows strides of three dimensions, and takes four for contiguous."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if input.ndim > 3 and not input.is_contiguous():
            input = torch.zeros_like(input)
        return honest.forward(input, bias, scale)

    return make_op("four_dimensions_are_contiguous", device, forward)


@caught_by("dimensions")
def knows_no_scalar(device: str) -> FusedOp:
    """Launches no program for a tensor without dimensions."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output if output.ndim else output.zero_()

    return make_op("knows_no_scalar", device, forward)


@caught_by("dimensions")
def knows_five_dimensions(device: str) -> FusedOp:
    """Keeps five sizes and strides in its arguments."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output.zero_() if output.ndim > 5 else output

    return make_op("knows_five_dimensions", device, forward)


@caught_by("gradients")
def gradient_of_one_element_is_none(device: str) -> FusedOp:
    """Returns early where the last dimension has one element and there is one row."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grads = honest.backward((True, True), grad_output, *saved)
        is_one = grad_output.ndim > 1 and grad_output.numel() == 1
        return tuple(torch.zeros_like(grad) if is_one else grad for grad in grads)

    return make_op("gradient_of_one_element_is_none", device, backward=backward)


def with_strides_of_16_bits(tensor: Tensor) -> Tensor:
    """Return the tensor as a kernel sees it whose strides are 16-bit integers without a sign."""
    strides = tuple(stride % (1 << 16) for stride in tensor.stride())
    return tensor.as_strided(tensor.shape, strides)


@caught_by("far strides")
def strides_of_16_bits(device: str) -> FusedOp:
    """Keeps strides in 16 bits; no ordinary test has rows of 65,536 elements."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return honest.forward(with_strides_of_16_bits(input), with_strides_of_16_bits(bias), scale)

    return make_op("strides_of_16_bits", device, forward)


@caught_by("far strides")
def upstream_strides_of_16_bits(device: str) -> FusedOp:
    """The same in the backward, of the upstream gradient alone."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        return honest.backward(needs, with_strides_of_16_bits(grad_output), *saved)

    return make_op("upstream_strides_of_16_bits", device, backward=backward)


@caught_by("other floats")
def scale_of_16_bits(device: str) -> FusedOp:
    """Rounds its float to half precision, which holds every number that ``draw`` gives."""

    def forward(input: Tensor, bias: Tensor, scale: float | Tensor) -> Tensor:
        rounded = torch.as_tensor(scale, dtype=torch.float16).item()
        return honest.forward(input, bias, rounded)

    return make_op("scale_of_16_bits", device, forward)


@caught_by("other floats", dtype=torch.float64)
def scale_of_32_bits_for_float64(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float | Tensor) -> Tensor:
        rounded = torch.as_tensor(scale, dtype=torch.float32).item()
        return honest.forward(input, bias, rounded)

    return make_op("scale_of_32_bits_for_float64", device, forward)


@caught_by("other floats")
def nothing_added_for_a_scale_of_zero(device: str) -> FusedOp:
    """Skips all work for a scale of 0, and the bias with it."""

    def forward(input: Tensor, bias: Tensor, scale: float | Tensor) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output.zero_() if isinstance(scale, float) and scale == 0 else output

    return make_op("nothing_added_for_a_scale_of_zero", device, forward)


ONE_SIZE: list[Exhibit] = []  # these show in a full check only


@wrong.caught_by("sizes", ONE_SIZE)
def wrong_for_4099_columns(device: str) -> FusedOp:
    """Has a path for one size, as a table of tuned launches has."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output.zero_() if output.shape[-1] == 4099 else output

    return make_op("wrong_for_4099_columns", device, forward)


@wrong.caught_by("sizes", ONE_SIZE)
def gradient_wrong_for_77_rows(device: str) -> FusedOp:
    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        wrong_here = grad_output.ndim > 1 and len(grad_output) == 77
        grads = honest.backward((True, True), grad_output, *saved)
        return tuple(torch.zeros_like(grad) if wrong_here else grad for grad in grads)

    return make_op("gradient_wrong_for_77_rows", device, backward=backward)
