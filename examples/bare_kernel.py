"""A bare Triton kernel, its launcher, and example inputs: all that `asm` and `debug` need.

python examples/bare_kernel.py
fuselab asm examples/bare_kernel.py --arch sm_90
fuselab debug examples/bare_kernel.py --against "x + y"
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuselab.runtime import interpreter


@triton.jit
def add_kernel(x, y, out, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    total = tl.load(x + offsets, inside) + tl.load(y + offsets, inside)
    tl.store(out + offsets, total, inside)


def add(x: Tensor, y: Tensor, block: int = 4) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out


def get_inputs() -> list[Tensor]:
    return [torch.arange(7.0), torch.ones(7)]


if __name__ == "__main__":
    x, y = get_inputs()
    # Without a GPU Triton interprets the kernel, in a child process.
    out = add(x.cuda(), y.cuda()) if torch.cuda.is_available() else None
    out = interpreter.run(f"{__file__}:add", x, y) if out is None else out.cpu()
    print(out.tolist())
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
