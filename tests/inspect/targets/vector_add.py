"""Vector addition in a bare Triton kernel, as tutorials write it, and two kernels beside it."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_kernel(x, y, out, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    total = tl.load(x + offsets, inside) + tl.load(y + offsets, inside)
    tl.store(out + offsets, total, inside)


@triton.jit
def softmax_kernel(x, out, width, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * width + columns, columns < width, -float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * width + columns, powers / tl.sum(powers, 0), columns < width)


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BLOCK: tl.constexpr, STEP: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.arange(0, STEP)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, STEP):
        left = tl.load(a + rows[:, None] * K + (start + steps)[None, :])
        right = tl.load(b + (start + steps)[:, None] * N + columns[None, :])
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(tl.float16))


def add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out


def get_inputs() -> list[Tensor]:
    return [torch.arange(100_000.0), torch.ones(100_000)]
