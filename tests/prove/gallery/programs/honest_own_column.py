"""A program owns its columns; the programs behind the first row's store the same sums again."""

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
    # A program adds up `block` columns, whichever row of the grid it is in.
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = column < columns
    total = tl.zeros((block,), tl.float32)
    for row in range(rows):
        total += tl.load(input + row * columns + column, inside, other=0.0)
    tl.store(output + column, total, inside)


def forward(input: Tensor) -> Tensor:
    rows, columns = input.shape
    output = torch.empty(columns, dtype=input.dtype)
    grid = (triton.cdiv(columns, 32), max(rows, 1))
    launch(column_sum_kernel, grid, input, output, rows, columns, block=32)
    return output


def draw(draw: Draw) -> Inputs:
    return Inputs((draw.tensor(draw.size(8), draw.size(64)),))


OP = FusedOp(
    name="gallery::honest_own_column",
    reference=reference,
    implementations={"triton": Implementation("cuda", forward)},
    dtypes=(torch.float32,),
    cases=[Case.normal([(5, 70)], "boundary")],
    draw=draw,
    contiguous=True,
)
