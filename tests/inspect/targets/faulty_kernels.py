"""Kernels with a fault each, for the debugger to find."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def unmasked_kernel(x, out, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets) + 1)


@triton.jit
def overlapping_kernel(x, out, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, offsets < numel)
    values = tl.where(offsets == 5, 0.0, values)
    tl.store(out + offsets, values, offsets < numel)


@triton.jit
def raising_kernel(x, out, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets)
    tl.store(out + offsets, values + tl.arange(0, 2 * BLOCK))


@triton.jit
def tiled_kernel(x, out, width, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = rows[:, None] * width + columns[None, :]
    tl.store(out + places, 2 * tl.load(x + places))


def unmasked(x: Tensor) -> Tensor:
    out = torch.empty(8)[:7]
    unmasked_kernel[(2,)](x, out, BLOCK=4)
    return out


def overlapping(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    overlapping_kernel[(2,)](x, out, x.numel(), BLOCK=4)
    return out


def raising(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    raising_kernel[(1,)](x, out, BLOCK=4)
    return out


def tiled(x: Tensor) -> Tensor:
    x = torch.arange(16.0).view(4, 4)
    out = torch.zeros_like(x)
    tiled_kernel[(2, 2)](x, out, 4, BLOCK=2)
    return out


def get_inputs() -> list[Tensor]:
    return [torch.arange(8.0)[:7]]
