"""Squared ReLU, relu(x)^2 (So et al., 2021), as a fused operator: copy this file for your own.

Try `fuselab check FILE`, `asm FILE`, `debug FILE` and `bench FILE --tune --backward` with it."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

import fuselab
from fuselab.op import Case, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.tuning import Config, chosen

NAME = "mine::squared_relu"
CONFIGS = [Config(block=block, num_warps=block // 256) for block in (1024, 512, 2048, 4096, 8192)]
CASES = {(1, 1): "boundary", (3, 1025): "boundary", (1024, 1024): "bench", (16384, 4096): "bench"}


def reference(input: Tensor) -> Tensor:
    """Return relu(input)^2, elementwise, for any shape and floating dtype."""
    return torch.relu(input) * torch.relu(input)


def gradient(needs: Sequence[bool], grad_output: Tensor, input: Tensor) -> tuple[Tensor | None]:
    """Return grad_output * 2 relu(input); its own derivative is the second derivative."""
    return (grad_output * 2 * torch.relu(input),)


@triton.jit
def squared_relu_kernel(input, grad_output, result, numel, block: tl.constexpr):
    # A program owns `block` consecutive elements. grad_output is None in the forward.
    wide: tl.constexpr = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    x = tl.load(input + offsets, inside).to(wide)
    relu = tl.where(x < 0, 0.0, x)  # keeps NaN, which tl.maximum drops
    factor = relu if grad_output is None else 2 * tl.load(grad_output + offsets, inside).to(wide)
    tl.store(result + offsets, factor * relu, inside)


def forward(input: Tensor, grad_output: Tensor | None = None) -> Tensor:
    result, numel = torch.empty_like(input), input.numel()
    step = "triton" if grad_output is None else "triton_backward"
    config = chosen(NAME, step, (input.dtype,), CONFIGS)  # the first, until tuned on this device
    grid = (triton.cdiv(numel, config.block),)
    launch(squared_relu_kernel, grid, input, grad_output, result, numel, **config)
    return result


def backward(needs: Sequence[bool], grad_output: Tensor, input: Tensor) -> tuple[Tensor | None]:
    return (forward(input, grad_output),)


OP = FusedOp(
    name=NAME,
    reference=reference,
    implementations={"triton": Implementation("cuda", forward, backward)},
    contiguous=True,  # the launchers get contiguous tensors, whatever the caller has
    cases=[Case.normal([shape], tag) for shape, tag in CASES.items()],
    gradient=Gradient(lambda output, input: (input,), gradient),
    draw=lambda draw: Inputs((draw.tensor(*draw.shape(1024)),)),
    configs=dict.fromkeys(("triton", "triton_backward"), lambda *args: CONFIGS),
)
squared_relu = fuselab.operator(OP)
if __name__ == "__main__":
    print(squared_relu(torch.tensor([-1.0, 0.5, 3.0])).tolist())
    assert fuselab.check(OP, quick=True, seed=0).passed
