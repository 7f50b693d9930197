"""Every program loads a sum, adds to it and stores it: two at once lose an addition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuselab.op import Case, Draw, FusedOp, Implementation, Inputs
from fuselab.runtime.triton_launch import launch


def reference(input: Tensor) -> Tensor:
    """Return the sums of the columns."""
    return input.sum(0)


@triton.jit
def column_sum_kernel(input, output, rows, columns, block: tl.constexpr):
    # A program adds one row to `block` columns.
    column = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.program_id(1)
    inside = column < columns
    value = tl.load(input + row * columns + column, inside & (row < rows), other=0.0)
    before = tl.load(output + column, inside)
    tl.store(output + column, before + value, inside)


def forward(input: Tensor) -> Tensor:
    rows, columns = input.shape
    output = torch.zeros(columns, dtype=input.dtype)
    grid = (triton.cdiv(columns, 32), max(rows, 1))
    launch(column_sum_kernel, grid, input, output, rows, columns, block=32)
    return output


def draw(draw: Draw) -> Inputs:
    return Inputs((draw.tensor(draw.size(8), draw.size(64)),))


OP = FusedOp(
    name="gallery::adds_without_atomics",
    reference=reference,
    implementations={"triton": Implementation("cuda", forward)},
    dtypes=(torch.float32,),
    cases=[Case.normal([(5, 70)], "boundary")],
    draw=draw,
    contiguous=True,
)
