"""Add an operator: RMS norm from the formula to the proof, in one file.

RMS norm (Zhang and Sennrich, arXiv:1910.07467) with a learnt weight: the definition, three Triton
kernels for forward and backward, the declaration that makes them an operator, and its proof.

    python examples/add_an_operator.py
    fuselab check examples/add_an_operator.py --quick
    fuselab bench examples/add_an_operator.py --quick
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import fuselab
from fuselab.errors import DtypeError, FuselabError, ShapeError
from fuselab.op import Case, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime import interpreter
from fuselab.runtime.triton_float import float_value
from fuselab.runtime.triton_launch import launch, triton_float

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# ## The definition
#
# An operator begins with its definition in plain PyTorch. Every kernel is measured against it, so
# it is written to be read, not to be fast. Its annotated parameters are the signature of the
# operator. Sums are in float32 for narrower inputs, and in float64 for float64, as in the kernels.


def arithmetic_of(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def reference(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return weight * input / sqrt(mean(input^2) + eps), the mean over the last dimension.

    Args:
        input: (..., width), float32, float16, bfloat16 or float64, any strides.
        weight: (width,), in the input's dtype.
        eps: is added to the mean of squares, so that a row of zeros stays one.

    Returns:
        The shape and dtype of ``input``.

    Raises:
        ShapeError, DtypeError.
    """
    x = input.to(arithmetic_of(input))
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight).to(input.dtype)


# The gradient is defined in the same way, as a function that PyTorch can differentiate once more.
# With s = 1 / sqrt(mean(x²) + eps) and the upstream gradient g, the output is w x s, and
#
#     dx = s (g w - x s² mean(g w x))        dw = sum over the rows of g x s


def gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight, each None where ``needs`` is False."""
    x, grad = input.to(arithmetic_of(input)), grad_output.to(arithmetic_of(input))
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    slope = (grad * weight * x).mean(-1, keepdim=True)
    grad_input = scale * (grad * weight - x * scale.square() * slope)
    grad_weight = (grad * x * scale).sum_to_size(weight.shape)
    return (
        grad_input.to(input.dtype) if needs[0] else None,
        grad_weight.to(weight.dtype) if needs[1] else None,
    )


def the_definition() -> None:
    input, weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([1.0, 10.0])
    output = reference(input, weight)
    torch.testing.assert_close(output, torch.nn.functional.rms_norm(input, (2,), weight, 1e-6))
    for row, normed in zip(input.tolist(), output.tolist(), strict=True):
        print(row, "->", [round(value, 4) for value in normed])


# ## The kernels
#
# A program of the forward owns one row and sweeps it twice, `BLOCK` columns at a time: once for the
# sum of squares, once for the output. A row within one block comes from the cache the second time.
# Every load and store is masked, because a row may end anywhere, and the row's offset is 64-bit.
#
# `eps` has two parameters. `torch.compile` makes one graph for all values of a float, so in there
# the launcher receives a 0-d tensor: `triton_float` gives the kernel a pointer or a number, and
# `float_value` reads whichever it is.


@triton.jit
def forward_kernel(input, weight, output, width, eps_pointer, eps: tl.float64, BLOCK: tl.constexpr):
    wide: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * width
    squares = tl.zeros((BLOCK,), wide)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(input + row + column, column < width, 0.0).to(wide)
        squares += x * x
    scale = 1 / tl.sqrt(tl.sum(squares) / width + float_value(eps_pointer, eps, wide))
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(input + row + column, column < width, 0.0).to(wide)
        w = tl.load(weight + column, column < width, 0.0).to(wide)
        tl.store(output + row + column, x * scale * w, column < width)


# The backward reads what the forward read, and computes the scale again: cheaper than keeping it,
# because the row has to be read in any case. It leaves the scales of all rows behind for the
# gradient of the weight, where a program owns `COLUMNS` columns and adds up all rows in a fixed
# order: no atomic additions, so the result is the same in every run.


@triton.jit
def grad_input_kernel(
    grad_output, input, weight, grad_input, scales, width, eps_pointer, eps: tl.float64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    wide: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * width
    squares = tl.zeros((BLOCK,), wide)
    products = tl.zeros((BLOCK,), wide)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(input + row + column, column < width, 0.0).to(wide)
        g = tl.load(grad_output + row + column, column < width, 0.0).to(wide)
        w = tl.load(weight + column, column < width, 0.0).to(wide)
        squares += x * x
        products += g * w * x
    scale = 1 / tl.sqrt(tl.sum(squares) / width + float_value(eps_pointer, eps, wide))
    slope = tl.sum(products) / width * scale * scale
    tl.store(scales + tl.program_id(0), scale)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(input + row + column, column < width, 0.0).to(wide)
        g = tl.load(grad_output + row + column, column < width, 0.0).to(wide)
        w = tl.load(weight + column, column < width, 0.0).to(wide)
        tl.store(grad_input + row + column, scale * (g * w - x * slope), column < width)


@triton.jit
def grad_weight_kernel(
    grad_output, input, scales, grad_weight, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    wide: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), wide)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        offset = row[:, None] * width + column[None, :]
        x = tl.load(input + offset, inside, 0.0).to(wide)
        g = tl.load(grad_output + offset, inside, 0.0).to(wide)
        total += g * x * tl.load(scales + row, row < rows, 0.0)[:, None]
    tl.store(grad_weight + column, tl.sum(total, 0), column < width)


# ## The launchers
#
# A launcher allocates its outputs and launches; it never synchronises, prints or writes to its
# inputs. An empty grid launches nothing, so an empty input needs no branch: with no rows the sum
# over them stores zeros. The tensors arrive contiguous, because the declaration asks for that.


def rows_and_width(input: Tensor) -> tuple[int, int]:
    width = input.shape[-1]
    return input.numel() // max(width, 1), width


def block_of(width: int) -> int:
    return min(triton.next_power_of_2(max(width, 1)), 4096)


def forward(input: Tensor, weight: Tensor, eps: float | Tensor) -> Tensor:
    output = torch.empty_like(input)
    rows, width = rows_and_width(input)
    operands = (input, weight, output, width, *triton_float(eps))
    launch(forward_kernel, (rows,), *operands, BLOCK=block_of(width))
    return output


def backward(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, weight: Tensor, eps: float | Tensor
) -> tuple[Tensor | None, Tensor | None]:
    grad_input, grad_weight = torch.empty_like(input), torch.empty_like(weight)
    rows, width = rows_and_width(input)
    scales = torch.empty(rows, dtype=arithmetic_of(input), device=input.device)
    operands = (grad_output, input, weight, grad_input, scales, width, *triton_float(eps))
    launch(grad_input_kernel, (rows,), *operands, BLOCK=block_of(width))
    if needs[1]:
        grid = (triton.cdiv(width, 64),)
        summed = (grad_output, input, scales, grad_weight, rows, width)
        launch(grad_weight_kernel, grid, *summed, ROWS=32, COLUMNS=64)
    return grad_input if needs[0] else None, grad_weight if needs[1] else None


# The launchers can be tried alone, without a GPU under Triton's interpreter, in a child process:
# widths of one column, one block, and a column more than a block. This is the moment to find a
# wrong mask, before anything else is in the way.


def run(launcher: str, *args: Any) -> Any:
    if DEVICE == "cuda":
        return globals()[launcher](*args)
    return interpreter.run(f"{__file__}:{launcher}", *args)


def the_kernels_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 1), (2, 4096), (2, 4097), (0, 8)):
        drawn = (torch.randn(size, generator=generator) for size in (shape, shape, shape[1:]))
        grad, input, weight = (tensor.to(DEVICE) for tensor in drawn)
        needs = (True, True)
        torch.testing.assert_close(run("forward", input, weight, 1e-6), reference(input, weight))
        found = run("backward", needs, grad, input, weight, 1e-6)
        torch.testing.assert_close(found, gradient(needs, grad, input, weight, 1e-6))
        blocks = triton.cdiv(shape[1], block_of(shape[1]))
        print(f"{shape[0]} x {shape[1]}: right, forward and backward, {blocks} block(s) per row")


# ## The declaration
#
# A `FusedOp` puts it together, and `fuselab.operator` makes the function that a model calls.
#
# - `validate` refuses what the kernels cannot take, in one sentence that says what to do.
# - `Gradient` says what the backward needs, here every argument, and how it is defined.
# - `contiguous` has the launchers receive contiguous tensors, whatever strides the caller's have.
# - `cases` are sizes to check (`boundary`) and to time (`bench`), `draw` makes inputs of any kind
#   for `check`: random shapes, strides and values, and a float.
#
# What is left out has a default. The `cost` of a call, for one, is that every tensor is read or
# written once, which is right for what memory limits.


def validate(input: Tensor, weight: Tensor, eps: float) -> None:
    if weight.dim() != 1 or weight.shape != input.shape[-1:]:
        raise ShapeError(
            f"rms_norm: 'weight' has the shape {tuple(weight.shape)} and 'input' "
            f"{tuple(input.shape)}; give one weight per element of the last dimension."
        )
    if weight.dtype != input.dtype or not input.is_floating_point():
        raise DtypeError(
            f"rms_norm: 'weight' is {weight.dtype} and 'input' {input.dtype}; cast both to one "
            "floating dtype."
        )


def draw(draw: Draw) -> Inputs:
    shape = draw.shape(4096)
    eps = draw.choice([1e-6, 1e-5])
    return Inputs((draw.tensor(*shape), draw.tensor(shape[-1]), eps))


RMS_NORM = FusedOp(
    name="mine::rms_norm",
    reference=reference,
    implementations={"triton": Implementation("cuda", forward, backward)},
    contiguous=True,
    gradient=Gradient(lambda output, *args: args, gradient),
    validate=validate,
    cases=[
        Case.normal([(1, 1), (1,)], "boundary"),
        Case.normal([(3, 4097), (4097,)], "boundary"),
        Case.normal([(0, 8), (8,)], "boundary"),
        Case.normal([(1024, 1024), (1024,)], "bench"),
        Case.normal([(16384, 4096), (4096,)], "bench"),
    ],
    draw=draw,
)

rms_norm = fuselab.operator(RMS_NORM)


# The function works with autograd and inside `torch.compile`. On a CPU it takes the reference,
# because the kernels run on a GPU.


def in_a_model() -> None:
    torch.manual_seed(0)
    input = torch.randn(6, 4, device=DEVICE).t().requires_grad_()  # (4, 6), not contiguous
    weight = torch.ones(6, device=DEVICE, requires_grad=True)
    output = torch.compile(rms_norm, fullgraph=True)(input, weight, eps=1e-5)
    found = torch.autograd.grad(output.square().sum(), (input, weight))
    expected = torch.nn.functional.rms_norm(input, (6,), weight, 1e-5)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), (input, weight)))
    print("output", tuple(output.shape), "and gradients agree with torch.nn.functional.rms_norm")


def what_it_refuses() -> None:
    for weight in (torch.ones(5, device=DEVICE), torch.ones(6, device=DEVICE).half()):
        try:
            rms_norm(torch.ones(4, 6, device=DEVICE), weight)
        except FuselabError as error:
            print(f"{type(error).__name__}: {error}")


# ## Proof
#
# `fuselab check` compares every implementation with the reference in float64, row by row. The error
# may be at most four times eager's own on that row, and two units in the last place. Here are two
# of its trials. The command makes hundreds, of forward, backward, strides, infinities, memory,
# autocast, `torch.compile` and `torch.func`.


def measure_some_errors() -> None:
    for case in RMS_NORM.cases[:2]:
        report = fuselab.check(RMS_NORM, "triton", torch.float32, case=f"cases@{case.name}")
        (group,) = report.groups
        print(
            f"{case.name:15} {group.verdict}: off by {group.ours_ulp:.3f} ulp where eager is by "
            f"{group.eager_ulp:.3f}"
        )
        assert report.passed


# While you work, check one dtype at a time:
#
#     fuselab check examples/add_an_operator.py --quick --dtype float32
#
# Under the interpreter, that is without a GPU, it takes about a minute. A kernel of many programs
# and long rows may need more than the time of a row of the table, which the verdict then says (`cut
# short`); `--budget` gives more. bfloat16 is `NOT JUDGED` there, because the interpreter truncates
# where a GPU rounds. A failure is shown with the smallest input found and the command that repeats
# it.
#
# ## What it takes
#
# The first version passed its check a quarter of an hour after the empty file. Its lines now,
# docstrings included:

PARTS: dict[str, list[Any]] = {
    "definition": [arithmetic_of, reference, gradient],
    "kernels": [forward_kernel, grad_input_kernel, grad_weight_kernel],
    "launchers": [rows_and_width, block_of, forward, backward],
    "declaration": [validate, draw],
}


def what_it_takes() -> None:
    declared = Path(__file__).read_text(encoding="utf-8").split("\nRMS_NORM = ")[1].split("\n\n")[0]
    total = 0
    for part, functions in PARTS.items():
        sources = [inspect.getsource(getattr(function, "fn", function)) for function in functions]
        sources += [declared] if part == "declaration" else []
        lines = sum(bool(line.strip()) for source in sources for line in source.splitlines())
        total += lines
        print(f"{part:12} {lines:4}")
    print(f"{'together':12} {total:4}")


# From here, `--tune` finds the best block for each width (`examples/own_triton_op.py` shows how a
# launcher asks for it), and `fuselab bench --backward` says how far from the limit of the device
# the kernels are. A package for the library has the same parts in files of their own;
# [CONTRIBUTING](../../CONTRIBUTING.md) says which.

STEPS = (
    the_definition,
    the_kernels_alone,
    in_a_model,
    what_it_refuses,
    measure_some_errors,
    what_it_takes,
)


def main() -> None:
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
