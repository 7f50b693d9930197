"""Vector add: programs, offsets, mask, grid.

The smallest Triton kernel, explained part by part: seven elements, added in blocks of four.

    python examples/vector_add.py
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuselab.runtime import interpreter

# ## The kernel
#
# A Triton kernel says what one *program* does. All programs run the same code; only `tl.program_id`
# differs between them. A program handles a block of elements at once: `offset` below is not a
# number but a vector of `BLOCK` numbers, and so are `mask`, both loads and the sum.


@triton.jit
def add_kernel(
    first, second, output,  # pointers to (numel,), contiguous
    numel,
    BLOCK: tl.constexpr,  # known when the kernel is compiled: a power of two
):  # fmt: skip
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < numel
    total = tl.load(first + offset, mask) + tl.load(second + offset, mask)
    tl.store(output + offset, total, mask)


# ## The launcher
#
# The launcher allocates the output, which a kernel never does, and says how many programs there
# are: the *grid*. Seven elements in blocks of four need two programs, `ceil(7 / 4)`.


def add(first: Tensor, second: Tensor, block: int = 4) -> Tensor:
    output = torch.empty_like(first)
    grid = (triton.cdiv(first.numel(), block),)
    add_kernel[grid](first, second, output, first.numel(), BLOCK=block)
    return output


# A machine without a GPU runs the launcher in a child process in which Triton interprets kernels as
# Python, slowly but line by line.

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(launcher: str, *args: Any) -> Any:
    if DEVICE == "cuda":
        return globals()[launcher](*args)
    return interpreter.run(f"{__file__}:{launcher}", *args)


def the_sum() -> None:
    first = torch.arange(7.0, device=DEVICE)
    second = torch.full((7,), 10.0, device=DEVICE)
    total = run("add", first, second)
    print("first ", first.tolist())
    print("second", second.tolist())
    print("sum   ", total.tolist())
    assert torch.equal(total, first + second)


# ## What each program saw
#
# The same offsets and the same mask, stored instead of used, with a row for each program.


@triton.jit
def look_kernel(offsets, masks, numel, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    offset = program * BLOCK + lane
    tl.store(offsets + program * BLOCK + lane, offset)
    tl.store(masks + program * BLOCK + lane, (offset < numel).to(tl.int32))


def look(numel: int, block: int) -> tuple[Tensor, Tensor]:
    programs = triton.cdiv(numel, block)
    offsets, masks = torch.empty(2, programs, block, dtype=torch.int32, device=DEVICE)
    look_kernel[(programs,)](offsets, masks, numel, BLOCK=block)
    return offsets, masks


def offsets_and_masks() -> None:
    for program, (offset, mask) in enumerate(zip(*run("look", 7, 4), strict=True)):
        print(f"program {program}: offsets {offset.tolist()} mask {mask.tolist()}")


# Program 1 has one lane too many: offset 7 is past the end, its mask is 0, and nothing is loaded or
# stored there.
#
# ## Without the mask
#
# The eighth lane does not vanish when the mask is left out. It reads past both inputs and writes
# past the output, into whatever lies there. Here that is the rest of a longer tensor, so that the
# damage can be seen; on a GPU it would be other memory, or a fault.


@triton.jit
def add_without_mask_kernel(first, second, output, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(output + offset, tl.load(first + offset) + tl.load(second + offset))


def add_without_mask(first: Tensor, second: Tensor, output: Tensor, block: int = 4) -> Tensor:
    add_without_mask_kernel[(triton.cdiv(7, block),)](first, second, output, BLOCK=block)
    return output


def past_the_end() -> None:
    first, second = torch.arange(10.0, device=DEVICE), torch.full((10,), 10.0, device=DEVICE)
    output = torch.full((10,), -1.0, device=DEVICE)  # 7 elements, and 3 that are not ours
    output = run("add_without_mask", first, second, output)
    print("ours      ", output[:7].tolist())
    print("not ours  ", output[7:].tolist())
    assert output[7] == 17.0


# ## Choose the block, compute the grid
#
# Any power of two gives the same sum; only the number of programs and the number of idle lanes
# change. A fixed grid with another block forgets elements, so the launcher computes the grid from
# the block. Real kernels use blocks of about 1024, because a program of four lanes leaves 28 of a
# warp's 32 threads without work.


def any_block() -> None:
    first = torch.arange(7.0, device=DEVICE)
    for block in (1, 2, 4, 8, 1024):
        programs = triton.cdiv(7, block)
        total = run("add", first, first, block)
        assert torch.equal(total, 2 * first)
        idle = programs * block - 7
        print(f"blocks of {block:4}: {programs} programs, {idle:4} idle lanes, sum right")


# ## On an H200
#
# An addition of two tensors does one operation for twelve bytes (float32), and a GPU does tens of
# operations in the time of one byte. So a kernel can only avoid reading or writing any byte twice.
# `fuselab.ops.add` is this kernel with a large block, 64-bit offsets and any strides.
#
# [figures: add forward float32]
#
# [plot: add forward float32]
#
# Your own kernel gains nothing on the addition of two whole tensors, because PyTorch's reads and
# writes the same bytes. (Where one is a single row, `one_row`, PyTorch's takes as long as for two
# whole tensors, and torch.compile's and ours do not.) It gains when several operations follow each
# other and the tensors between them need not be written: `relu(input + scale * update + bias)` in
# one kernel.
#
# [figures: add_mul_activation forward float32]
#
# [plot: add_mul_activation forward float32]

STEPS = (the_sum, offsets_and_masks, past_the_end, any_block)


def main() -> None:
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
