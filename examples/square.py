"""Square three ways, and when a custom kernel is not worth writing.

`x * x`, `x ** 2` and `torch.square(x)` under the profiler; a Triton kernel with a row per program
against one with a fixed block; and how much either can gain if there is one operation to fuse.

    python examples/square.py
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fuselab
from fuselab.runtime import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET_S = 0.5  # per timing

# ## Three spellings, how many kernels?
#
# The profiler shows what PyTorch makes of each. `torch.square` and `x ** 2` both call `aten::pow`,
# which multiplies if the exponent is 2; `x * x` calls `aten::mul`. Each is one kernel.

SPELLINGS = {
    "x * x": lambda x: x * x,
    "x ** 2": lambda x: x**2,
    "torch.square(x)": torch.square,
}


def what_each_runs() -> None:
    x = torch.randn(64, 64, device=DEVICE)
    for spelling, function in SPELLINGS.items():
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            function(x)
        called = [event.key for event in trace.key_averages() if event.key.startswith("aten::")]
        outer_first = ("aten::square", "aten::pow", "aten::mul")
        print(f"{spelling:16} {', '.join(name for name in outer_first if name in called)}")


# ## A row per program
#
# The first kernel that most people write gives each row a program, as softmax needs it. The block
# is then the row's width rounded up to a power of two.


@triton.jit
def row_kernel(x, output, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + row * width + column, mask)
    tl.store(output + row * width + column, value * value, mask)


def square_by_rows(x: Tensor) -> Tensor:
    output = torch.empty_like(x)
    rows, width = x.shape
    row_kernel[(rows,)](x, output, width, BLOCK=triton.next_power_of_2(width))
    return output


# ## A fixed block
#
# Squaring does not depend on rows. A contiguous tensor is one vector, which can be cut into blocks
# of a size that suits the machine, whatever the shape.


@triton.jit
def block_kernel(x, output, numel, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < numel
    value = tl.load(x + offset, mask)
    tl.store(output + offset, value * value, mask)


def square_by_blocks(x: Tensor, block: int = 1024) -> Tensor:
    output = torch.empty_like(x)
    block_kernel[(triton.cdiv(x.numel(), block),)](x, output, x.numel(), BLOCK=block)
    return output


def run(launcher: str, *args: Any) -> Any:
    """Run a launcher on the GPU, or else in a child process under Triton's interpreter."""
    if DEVICE == "cuda":
        return globals()[launcher](*args)
    return interpreter.run(f"{__file__}:{launcher}", *args)


def both_are_right() -> None:
    for shape in ((1, 1), (3, 781), (2, 1025)):
        x = torch.randn(shape, device=DEVICE)
        assert torch.equal(run("square_by_rows", x), x * x)
        assert torch.equal(run("square_by_blocks", x), x * x)
        print(f"{shape[0]} x {shape[1]:4}: rows and blocks give x * x, bit for bit")


# The kernels differ in work: in lanes without an element, and in the number of programs. With one
# column past a power of two, half of all lanes are idle. A narrow matrix makes programs too small
# to hide the latency of memory, and a very wide one makes blocks too large for the registers.


def lanes() -> None:
    print("     shape     |       a row per program       |      blocks of 1024")
    print("               | programs    block  idle lanes |  programs  idle lanes")
    for rows, width in ((4096, 16), (4096, 1024), (4096, 1025), (4096, 1823), (64, 262145)):
        block = triton.next_power_of_2(width)
        blocks = triton.cdiv(rows * width, 1024)
        idle = 1 - width / block
        idle_in_blocks = 1 - rows * width / (blocks * 1024)
        print(
            f"{rows:5} x {width:6} | {rows:8} {block:8} {idle:11.1%} | "
            f"{blocks:9} {idle_in_blocks:11.1%}"
        )


# ## When a custom kernel is not worth writing
#
# Count bytes. Squaring reads a tensor and writes one, however it is spelt, so the three spellings,
# torch.compile and any kernel of ours read and write the same bytes. On the machine that printed
# this page:


def time_squaring() -> None:
    x = torch.randn(2048, 2048, device=DEVICE)
    ways = {
        **SPELLINGS,
        "torch.compile": torch.compile(lambda x: x * x, dynamic=False),
        "fuselab.ops.square": fuselab.ops.square,
    }
    for name, function in ways.items():
        timing = fuselab.time(function, x, budget_s=BUDGET_S)
        print(f"{name:20} {timing.median_us:9.1f} us")


# Differences between these come from caches, threads and chance, not from bytes. A chain is
# different: every operation of it writes a tensor that the next one reads back.


def bytes_of_a_chain() -> None:
    print("operations  tensors moved one by one  tensors moved fused  at most")
    for operations in (1, 2, 4, 8):
        apart = 2 * operations
        print(f"{operations:10} {apart:25} {2:20} {apart / 2:6.0f} x")


# So one pointwise operation is not worth a kernel. Nor is one that torch.compile already fuses with
# its neighbours, because your own kernel is opaque to it and cuts the chain. A custom kernel is for
# what the compiler does not find (softmax that reads its row once, GIoU, an interaction whose
# product is never written to memory), and for calls so small that only host time counts.
#
# ## On an H200
#
# [figures: square forward float32]
#
# [plot: square forward float32]
#
# A chain of three operations, `relu(input + scale * update + bias)`: torch.compile and our kernels
# both reach the limit, and both are far faster than eager.
#
# [figures: add_mul_activation forward float32]

STEPS = (what_each_runs, both_are_right, lanes, time_squaring, bytes_of_a_chain)


def main() -> None:
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
