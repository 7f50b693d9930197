"""A tiled matrix product with its activation, forward and backward, under autograd.

relu(x Wᵀ + b), a layer of any MLP, as one Triton kernel that also serves the backward: why tiles
are needed, how the activation costs nothing extra, how autograd uses the kernel, and how it is
checked.

    python examples/matmul_activation.py
    fuselab check examples/matmul_activation.py
    fuselab bench examples/matmul_activation.py --backward
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import fuselab
from fuselab.errors import ShapeError
from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime import interpreter
from fuselab.runtime.matmul_precision import input_precision
from fuselab.runtime.triton_launch import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# ## Why tiles
#
# An element of the output needs a row of the input and a row of the weight: 2 K numbers for 2 K
# operations, one operation for every four bytes (float32). No memory is fast enough for that. A
# tile of R x C elements needs R + C rows for R C elements: the larger the tile, the more often each
# number is used after it was loaded.


def what_tiles_read() -> None:
    size = 4096
    operations = 2 * size**3
    print(f"{size} x {size} x {size} in bfloat16, {operations / 1e9:.0f} GFLOP")
    for tile in (1, 16, 64, 128, 256):
        read = 2 * (size // tile) ** 2 * 2 * tile * size
        print(
            f"tiles of {tile:3} x {tile:3} read {read / 1e9:7.2f} GB: "
            f"{operations / read:6.1f} operations per byte"
        )


# [ceiling: bf16]
#
# Not everything that a tile reads comes from memory: most of it comes from the L2 cache, if the
# programs that run at the same time work on the same rows and columns. So the programs walk the
# output in groups of rows of tiles, not row by row.


def what_runs_together() -> None:
    across, together = 32, 128  # tiles in a row; programs that run at a time, one per processor
    for group in (1, 8):
        tiles = [tile_of(program, 32, across, group) for program in range(together)]
        rows, columns = ({tile[side] for tile in tiles} for side in (0, 1))
        print(
            f"groups of {group} rows of tiles: {together} programs read {len(rows)} tile rows and "
            f"{len(columns)} tile columns"
        )


def tile_of(program: int, down: int, across: int, group: int) -> tuple[int, int]:
    """Return the tile's row and column, as the kernel computes them from its program id."""
    first = program // (group * across) * group
    height = min(down - first, group)
    inside = program % (group * across)
    return first + inside % height, inside // height


# ## The kernel
#
# The kernel computes `a b + bias`, with relu at the end, or, for the backward, on a load: where a
# layer's output is not above zero, the gradient that arrives there is dropped as it is loaded.
# Operands are read by their strides, so a transposed one costs nothing, and one kernel computes
# three products:
#
# | | a | b | |
# |---|---|---|---|
# | output | input | weightᵀ | + bias, relu on the way out |
# | gradient of input | grad_output, gated | weight | |
# | gradient of weight | grad_outputᵀ, gated | input | |


@triton.jit
def tile_at(pointer, row, column, row_stride, column_stride, mask):
    offset = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(pointer + offset, mask, 0.0)


@triton.jit
def product_kernel(
    a, gate, b, bias, output,  # (rows, depth), like a or None, (depth, columns), (columns,) or None
    rows, columns, depth,
    a_row, a_column, b_row, b_column,  # strides
    RELU: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    inside = program % (GROUP * across)
    row = (first + inside % height) * ROWS + tl.arange(0, ROWS)
    column = inside // height * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = (row < rows)[:, None], (column < columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        place = start + tl.arange(0, DEPTH)
        inner = place < depth
        left = tile_at(a, row, place, a_row, a_column, has_row & inner[None, :])
        if gate is not None:
            passed = tile_at(gate, row, place, a_row, a_column, has_row & inner[None, :])
            left = tl.where(passed <= 0, 0.0, left)
        right = tile_at(b, place, column, b_row, b_column, inner[:, None] & has_column)
        if left.dtype == tl.float32 and PRECISION == "ieee":
            # The limit splits Triton's long chain of additions, which would lose digits.
            total += tl.dot(left, right, input_precision=PRECISION, max_num_imprecise_acc=DEPTH)
        else:
            total = tl.dot(left, right, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
    if RELU:
        total = tl.where(total < 0, 0.0, total)  # keeps NaN, which tl.maximum drops
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(output + offset, total.to(output.dtype.element_ty), has_row & has_column)


def product(
    a: Tensor,
    b: Tensor,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Launch the product of a (M, K) and b (K, N); ``gate`` has the shape and strides of a."""
    (rows, depth), columns = a.shape, b.shape[1]
    output = a.new_empty(rows, columns)
    if output.numel():
        tile = 64 if min(rows, columns) > 32 else 16
        grid = (triton.cdiv(rows, tile) * triton.cdiv(columns, tile),)
        sizes = (rows, columns, depth, *a.stride(), *b.stride())
        precision = input_precision(a.dtype)
        tiles = {"ROWS": tile, "COLUMNS": tile, "DEPTH": 32, "GROUP": 8}
        args = (product_kernel, grid, a, gate, b, bias, output, *sizes)
        launch(*args, RELU=relu, PRECISION=precision, **tiles, num_warps=4)
    return output


# ## Autograd
#
# The contract has a forward and a backward that only compute; `fuselab.operator` makes of them an
# operator that autograd, torch.compile, autocast and torch.func understand. The gradient is written
# twice: as the kernel's launcher, and in plain PyTorch, which defines the right result and is
# differentiated for a second derivative.


def reference(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return relu(input weightᵀ + bias), (M, N), of input (M, K), weight (N, K), bias (N,)."""
    return torch.relu(F.linear(input, weight, bias))


def forward(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return product(input, weight.t(), bias=bias.contiguous(), relu=True)


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def gradient(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor, input: Tensor, weight: Tensor
) -> Gradients:
    grad = torch.where(output <= 0, 0.0, grad_output)
    return (
        grad @ weight if needs[0] else None,
        grad.t() @ input if needs[1] else None,
        grad.sum(0) if needs[2] else None,
    )


def backward(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor, input: Tensor, weight: Tensor
) -> Gradients:
    grad, output = grad_output.contiguous(), output.contiguous()
    return (
        product(grad, weight, gate=output) if needs[0] else None,
        product(grad.t(), input, gate=output.t()) if needs[1] else None,
        torch.where(output <= 0, 0.0, grad).sum(0) if needs[2] else None,
    )


def save(output: Tensor, input: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return output, input, weight  # relu's derivative is a function of its output


# The remaining functions say which arguments are accepted, the least cost, and what to try.


def validate(input: Tensor, weight: Tensor, bias: Tensor) -> None:
    if input.dim() != 2 or weight.dim() != 2 or input.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"linear_relu: 'input' is {tuple(input.shape)} and 'weight' {tuple(weight.shape)}; "
            "expected (M, K) and (N, K)."
        )
    if bias.shape != weight.shape[:1] or not input.dtype == weight.dtype == bias.dtype:
        raise ShapeError(
            f"linear_relu: 'bias' is {bias.dtype} {tuple(bias.shape)}; expected "
            f"({weight.shape[0]},) in one dtype with 'input' and 'weight'."
        )


def cost(input: Tensor, weight: Tensor, bias: Tensor) -> Cost:
    (rows, depth), columns = input.shape, weight.shape[0]
    size = input.element_size()
    unit = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(input.dtype, "fp32")
    read = (input.numel() + weight.numel() + columns) * size
    return Cost(read, rows * columns * size, 2 * rows * columns * depth, unit)


def cost_backward(input: Tensor, weight: Tensor, bias: Tensor) -> Cost:
    forward = cost(input, weight, bias)
    return Cost(
        forward.bytes_read + 2 * forward.bytes_written,
        forward.bytes_read,
        2 * forward.flops,
        forward.unit,
    )


def case(rows: int, depth: int, columns: int, *tags: str) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        shapes = ((rows, depth), (columns, depth), (columns,))
        drawn = (torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes)
        return Inputs(tuple(tensor.to(device, dtype) for tensor in drawn))

    return Case(f"{rows}x{depth}->{columns}", make, frozenset(tags))


def draw(draw: Draw) -> Inputs:
    rows, depth, columns = draw.size(64), draw.size(32), draw.size(64)
    return Inputs((draw.tensor(rows, depth), draw.tensor(columns, depth), draw.tensor(columns)))


LINEAR_RELU = FusedOp(
    name="mine::linear_relu",
    reference=reference,
    implementations={"triton": Implementation("cuda", forward, backward)},
    cost=cost,
    cost_backward=cost_backward,
    cases=[
        case(1, 1, 1, "boundary"),
        case(65, 33, 17, "boundary"),
        case(4096, 1024, 1024, "bench"),
        case(65536, 512, 256, "bench"),
    ],
    gradient=Gradient(save, gradient),
    validate=validate,
    draw=draw,
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
)

linear_relu = fuselab.operator(LINEAR_RELU)


# ## Against PyTorch
#
# The launchers alone, on sizes that no tile divides; under the interpreter if there is no GPU.


def run(launcher: str, *args: Any) -> Any:
    if DEVICE == "cuda":
        return globals()[launcher](*args)
    return interpreter.run(f"{__file__}:{launcher}", *args)


def the_kernel_and_eager() -> None:
    generator = torch.Generator().manual_seed(0)
    input, weight, bias, grad = (
        torch.randn(shape, generator=generator).to(DEVICE)
        for shape in ((70, 50), (90, 50), (90,), (70, 90))
    )
    leaves = [tensor.clone().requires_grad_() for tensor in (input, weight, bias)]
    expected = reference(*leaves)
    expected.backward(grad)
    output = run("forward", input, weight, bias)
    gradients = run("backward", [True] * 3, grad, output, input, weight)
    torch.testing.assert_close(output, expected.detach())
    for name, leaf, found in zip(("input", "weight", "bias"), leaves, gradients, strict=True):
        torch.testing.assert_close(found, leaf.grad)
        print(f"gradient of {name:6} {tuple(found.shape)!s:8} agrees with autograd's")


# The operator in a model is a function like any other. On a CPU `auto` takes the reference, and the
# training is the same.


def in_a_training_loop() -> None:
    torch.manual_seed(0)
    input, target = torch.randn(64, 8, device=DEVICE), torch.rand(64, 4, device=DEVICE)
    weight = (0.3 * torch.randn(4, 8)).to(DEVICE).requires_grad_()
    bias = torch.zeros(4, device=DEVICE, requires_grad=True)
    for step in range(31):
        loss = F.mse_loss(linear_relu(input, weight, bias), target)
        gradients = torch.autograd.grad(loss, (weight, bias))
        with torch.no_grad():
            for parameter, slope in zip((weight, bias), gradients, strict=True):
                parameter -= 0.5 * slope
        if step % 10 == 0:
            print(f"step {step:2}: loss {loss.item():.3f}")


# ## Proof
#
# These are some trials of `fuselab check` on this file; the command makes hundreds. How far a sum
# is off depends on the machine, because each instruction set adds in its own order.


def measure_some_errors() -> None:
    for size in ("1x1->1", "65x33->17"):
        report = fuselab.check(LINEAR_RELU, "triton", torch.float32, case=f"cases@{size}")
        (group,) = report.groups
        print(
            f"{size:10} {group.verdict}: off by {group.ours_ulp:.3f} ulp where eager is by "
            f"{group.eager_ulp:.3f}"
        )
        assert report.passed


# ## On an H200
#
# `fuselab.ops.linear_activation` has this kernel, with any of eight activations, and two more:
# Hopper's own matrix instructions (wgmma) with tiles fetched by TMA, and cuBLASLt, whose epilogue
# computes relu as well. The time of the product alone is the limit for all of them.
#
# [figures: linear_activation forward bfloat16]
#
# [plot: linear_activation forward bfloat16]
#
# Its tiles were chosen by trying these:
#
# [file: tune_linear_activation.txt]
#
# When is it worth having your own kernel? Seldom for the product: cuBLAS is hard to beat, and
# `torch._addmm_activation` has relu in its epilogue. It is worth it if the library does not have
# the epilogue, if an operand is computed as it is loaded (an outer product, a gather, a low-rank
# adapter), or if K is so small that only the output's bytes count.

STEPS = (
    what_tiles_read,
    what_runs_together,
    the_kernel_and_eager,
    in_a_training_loop,
    measure_some_errors,
)


def main() -> None:
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
