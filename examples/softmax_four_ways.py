"""Softmax four ways over widths: naive, torch.compile, Triton, CUDA; and F.softmax.

The same function in the usual spelling, compiled, and as two kernels of our own, which
``fuselab check`` judges; then the times of each as rows grow wider.

    python examples/softmax_four_ways.py
    fuselab check examples/softmax_four_ways.py
    fuselab bench examples/softmax_four_ways.py
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

import fuselab
from fuselab.errors import ShapeError
from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime import interpreter
from fuselab.runtime.cuda_source import CudaSource, i64
from fuselab.runtime.triton_launch import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET_S = 0.3  # per timing

# ## Naive
#
# Five operations, as in the formula. The largest value is subtracted first, because otherwise `exp`
# overflows, and infinity over infinity is NaN.


def naive(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    exponential = torch.exp(x - largest)
    return exponential / exponential.sum(-1, keepdim=True)


def why_the_largest_value_is_subtracted() -> None:
    x = torch.tensor([1000.0, 1001.0])
    print("without:", (x.exp() / x.exp().sum()).tolist())
    print("with:   ", [round(value, 4) for value in naive(x).tolist()])


# Each of the five operations reads its input from memory and writes its output there. Softmax
# itself needs to read the matrix only once and to write it once.


def what_naive_moves() -> None:
    rows, width = 4096, 4096
    matrix, column = rows * width, rows
    moved = {
        "largest = amax(x)": (matrix, column),
        "x - largest": (matrix + column, matrix),
        "exp": (matrix, matrix),
        "sum": (matrix, column),
        "divide": (matrix + column, matrix),
    }
    for operation, (read, written) in moved.items():
        print(f"{operation:18} reads {4 * read / 1e6:6.1f} MB, writes {4 * written / 1e6:6.1f} MB")
    total = sum(read + written for read, written in moved.values())
    print(f"together {4 * total / 1e6:.1f} MB, {total / (2 * matrix):.2f} times what is needed")


# ## torch.compile
#
# `torch.compile(naive)` makes one kernel of the five operations. It reads narrow rows once; wide
# ones do not fit on chip, so its loop reads the row again for the sum and for the result.
#
# ## Triton
#
# A program owns a row and keeps all of it on chip: it is read once and written once. Lanes past the
# end of the row must not count, so they load minus infinity, which changes neither the maximum nor
# the sum. Arithmetic is in float32 for every input dtype.


@triton.jit
def row_kernel(input, output, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(input + row * width + column, mask, float("-inf")).to(tl.float32)
    exponential = tl.exp(x - tl.max(x, 0))
    result = exponential / tl.sum(exponential, 0)
    tl.store(output + row * width + column, result.to(output.dtype.element_ty), mask)


WIDEST = 65536  # elements; a wider block does not fit in the registers


def supports(input: Tensor) -> str | None:
    width = input.shape[-1]
    return f"rows of {width}, and a block ends at {WIDEST}" if width > WIDEST else None


def triton_forward(input: Tensor) -> Tensor:
    input, width = input.contiguous(), input.shape[-1]
    output = torch.empty_like(input)
    block = triton.next_power_of_2(max(width, 1))
    if input.numel():
        grid = (input.numel() // width,)
        launch(row_kernel, grid, input, output, width, BLOCK=block, num_warps=max(4, block // 2048))
    return output


# A zero instead of minus infinity is a famous mistake. Zeros or ordinary values do not show it; a
# row of 3 in a block of 4 with values far below 0 does.


@triton.jit
def row_kernel_with_zeros(input, output, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(input + row * width + column, mask, 0.0)
    exponential = tl.where(mask, tl.exp(x - tl.max(x, 0)), 0.0)
    tl.store(output + row * width + column, exponential / tl.sum(exponential, 0), mask)


def with_zeros(input: Tensor) -> Tensor:
    output = torch.empty_like(input)
    row_kernel_with_zeros[(1,)](input, output, 3, BLOCK=4)
    return output


def the_mask_counts() -> None:
    row = torch.full((1, 3), -200.0, device=DEVICE)
    if DEVICE == "cuda":
        wrong, right = with_zeros(row), triton_forward(row)
    else:  # Triton's interpreter, in a child process
        wrong = interpreter.run(f"{__file__}:with_zeros", row)
        right = interpreter.run(f"{__file__}:triton_forward", row)
    print("zeros past the row:         ", wrong[0].tolist())
    print("minus infinity past the row:", [round(value, 4) for value in right[0].tolist()])


# ## CUDA
#
# A block of 256 threads owns a row and goes over it three times; between the passes the threads
# agree on the largest value and on the sum. [The file](../../examples/softmax_four_ways.cu) has
# forty lines. NVRTC compiles it on the first call, or here, for GPUs that this machine does not
# have.

CUDA = CudaSource(Path(__file__).with_suffix(".cu"))
NAMES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
CUDA_EXPRESSIONS = tuple(f"rows<{name}>" for name in NAMES.values())


def cuda_forward(input: Tensor) -> Tensor:
    input, width = input.contiguous(), input.shape[-1]
    output = torch.empty_like(input)
    if input.numel():
        grid = (input.numel() // width, 1, 1)
        CUDA.launch(f"rows<{NAMES[input.dtype]}>", grid, (256, 1, 1), (input, output, i64(width)))
    return output


def compile_for_other_machines() -> None:
    for arch in ("sm_80", "sm_90", "sm_100"):
        image = CUDA.compile_many(CUDA_EXPRESSIONS, arch)
        kind = "a cubin" if image.startswith(b"\x7fELF") else "PTX"
        print(f"{arch}: {kind} with {', '.join(CUDA_EXPRESSIONS)}")


# ## The contract
#
# The contract puts both kernels under one name, with the reference, the gradient in plain PyTorch,
# the least number of bytes, and sizes to try. `check`, `bench` and `fuse` read nothing else.


def reference(input: Tensor) -> Tensor:
    """Return the softmax over the last dimension, for any shape (..., N) of one dimension or
    more."""
    return torch.softmax(input, -1)


def gradient(needs: Sequence[bool], grad_output: Tensor, output: Tensor) -> tuple[Tensor | None]:
    scaled = grad_output * output
    return (scaled - output * scaled.sum(-1, keepdim=True),)


def validate(input: Tensor) -> None:
    if input.dim() == 0:
        raise ShapeError("softmax: 'input' has no dimension; expected (..., N).")


def empty_output(input: Tensor) -> Tensor:
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


def cost(input: Tensor) -> Cost:
    size = input.numel() * input.element_size()
    return Cost(bytes_read=size, bytes_written=size, flops=5 * input.numel())


def case(rows: int, width: int, *tags: str) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return Inputs((torch.randn(rows, width, generator=generator).to(device, dtype),))

    return Case(f"{rows}x{width}", make, frozenset(tags))


def draw(draw: Draw) -> Inputs:
    lead = [draw.size() for _ in range(draw.choice([1, 0, 2]))]
    return Inputs((draw.tensor(*lead, draw.size(256, 1024)),))


SOFTMAX = FusedOp(
    name="mine::softmax",
    reference=reference,
    implementations={
        "triton": Implementation("cuda", triton_forward, supports=supports),
        "cuda": Implementation("cuda", cuda_forward),
    },
    cost=cost,
    cases=[
        case(1, 1, "boundary"),
        case(2, 256, "boundary"),
        case(3, 257, "boundary"),
        *(case(4096, width, "bench") for width in (1024, 4096, 16384)),
        case(2048, 65536, "bench"),
    ],
    gradient=Gradient(lambda output, input: (output,), gradient),
    validate=validate,
    fake=empty_output,
    draw=draw,
    peers={"naive": naive},
    dtypes=tuple(NAMES),
)

softmax = fuselab.operator(SOFTMAX)


def measure_some_errors() -> None:
    for size in ("1x1", "2x256", "3x257"):
        report = fuselab.check(SOFTMAX, "triton", torch.float32, case=f"cases@{size}")
        (group,) = report.groups
        print(
            f"{size:6} {group.verdict}: off by {group.ours_ulp:.3f} ulp where eager is by "
            f"{group.eager_ulp:.3f}"
        )
        assert report.passed


# These are three trials, with the errors on the machine that printed this page. `fuselab check
# examples/softmax_four_ways.py --quick` makes hundreds, with strides, infinities, gradients and
# threads, in about a minute per dtype where Triton is interpreted. Without a GPU it only reports
# that the CUDA kernels compile, which does not prove them right.
#
# ## Over widths
#
# The same number of elements in wider and wider rows, on the machine that printed this page.


def time_widths() -> None:
    ways = {
        "naive": naive,
        "compile": torch.compile(naive, dynamic=True),
        "F.softmax": lambda x: torch.nn.functional.softmax(x, -1),
        "fuselab": fuselab.ops.softmax,
    }
    if DEVICE == "cuda":
        ways["triton here"], ways["cuda here"] = triton_forward, cuda_forward
    widths = (64, 1024, 16384)
    numel = 1 << 20
    print(f"GB/s {'':7}", *(f"{name:>11}" for name in ways))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for width in widths:
        x = torch.randn(numel // width, width, device=DEVICE)
        for name, function in ways.items():
            timing = fuselab.time(function, x, budget_s=BUDGET_S)
            rates[name].append(2 * prod(x.shape) * x.element_size() / timing.median_us / 1000)
        print(f"width {width:6}", *(f"{found[-1]:11.1f}" for found in rates.values()))
    plot(widths, rates)


def plot(widths: Sequence[int], rates: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for name, found in rates.items():
        axis.plot(widths, found, "o-", label=name)
    axis.set(xscale="log", xlabel="width", ylabel="GB/s", ylim=(0, None), title=f"on {DEVICE}")
    figure.legend(loc="outside right center")
    figure.savefig("softmax_widths.png", dpi=90)
    print("wrote softmax_widths.png")


# ## On an H200
#
# Here `triton` and `cuda` are the kernels of `fuselab.ops.softmax`, which extend those of this
# page: a program owns several narrow rows, and a wide row is spread over a cluster of blocks, so
# that it stays on chip and is read once at any width.
#
# [plot: softmax forward float32]
#
# [figures: softmax forward float32]
#
# In bfloat16 and in the backward the order is the same.
#
# [figures: softmax forward bfloat16]
#
# [figures: softmax backward float32]
#
# ## Which one?
#
# Up to a few thousand columns `torch.compile(naive)` is as fast as any kernel, and costs one line.
# A Triton kernel of ten lines holds a row of a block's size and fails beyond it. CUDA can express
# what the others cannot, a row over several blocks, but you have to write all of it. F.softmax
# needs no code and, on a GPU, reaches half of the memory's rate.

STEPS = (
    why_the_largest_value_is_subtracted,
    what_naive_moves,
    the_mask_counts,
    compile_for_other_machines,
    measure_some_errors,
    time_widths,
)


def main() -> None:
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
