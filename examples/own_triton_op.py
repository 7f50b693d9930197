"""Your own Triton kernel as a first-class operator: squared ReLU, relu(x)^2 (So et al., 2021).

One file with a FusedOp in it is all that ``fuselab check``, ``bench`` and ``asm`` need:

    python examples/own_triton_op.py
    fuselab check examples/own_triton_op.py
    fuselab bench examples/own_triton_op.py
    fuselab bench examples/own_triton_op.py --tune --backward
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

import fuselab
from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.tuning import Config, chosen

NAME = "mine::squared_relu"
BLOCK = 1024


# The reference defines the right result, in plain PyTorch; its annotated parameters are the
# operator's signature.


def reference(input: Tensor) -> Tensor:
    """Return relu(input)^2, elementwise, for any shape and floating dtype."""
    return torch.relu(input) * torch.relu(input)


def gradient(needs: Sequence[bool], grad_output: Tensor, input: Tensor) -> tuple[Tensor | None]:
    """Return grad_output * 2 relu(input) in plain PyTorch; its derivative is the second
    derivative."""
    return (grad_output * 2 * torch.relu(input),)


# The kernels. A program owns `block` consecutive elements; every byte is read and written once.


@triton.jit
def forward_kernel(input_pointer, output_pointer, numel, block: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    # Compute in float32 for narrower inputs; the comparison keeps NaN, which tl.maximum drops.
    wide: tl.constexpr = tl.float64 if input_pointer.dtype.element_ty == tl.float64 else tl.float32
    x = tl.load(input_pointer + offsets, mask=inside).to(wide)
    relu = tl.where(x < 0, 0.0, x)
    tl.store(output_pointer + offsets, relu * relu, mask=inside)


@triton.jit
def backward_kernel(
    grad_output_pointer, input_pointer, grad_input_pointer, numel, block: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    wide: tl.constexpr = tl.float64 if input_pointer.dtype.element_ty == tl.float64 else tl.float32
    grad = tl.load(grad_output_pointer + offsets, mask=inside).to(wide)
    x = tl.load(input_pointer + offsets, mask=inside).to(wide)
    relu = tl.where(x < 0, 0.0, x)
    tl.store(grad_input_pointer + offsets, grad * 2 * relu, mask=inside)


# The launchers allocate; the kernels never do. They ask `chosen` for a configuration: that is the
# first candidate until `fuselab bench --tune` has found another one faster on this device.


def candidates(*args: object) -> list[Config]:
    blocks_and_warps = ((BLOCK, 4), (512, 2), (2048, 4), (2048, 8), (4096, 8))
    return [Config(block=block, num_warps=warps) for block, warps in blocks_and_warps]


def forward(input: Tensor) -> Tensor:
    input = input.contiguous()
    output = torch.empty_like(input)
    numel = input.numel()
    if numel:
        config = chosen(NAME, "triton", (input.dtype,), candidates())
        launch(forward_kernel, (triton.cdiv(numel, config.block),), input, output, numel, **config)
    return output


def backward(needs: Sequence[bool], grad_output: Tensor, input: Tensor) -> tuple[Tensor | None]:
    grad_output, input = grad_output.contiguous(), input.contiguous()
    grad_input = torch.empty_like(input)
    numel = input.numel()
    if numel:
        config = chosen(NAME, "triton_backward", (input.dtype,), candidates())
        grid = (triton.cdiv(numel, config.block),)
        launch(backward_kernel, grid, grad_output, input, grad_input, numel, **config)
    return (grad_input,)


def empty_output(input: Tensor) -> Tensor:
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


def empty_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor
) -> tuple[Tensor | None]:
    return (empty_output(input),)


# The contract.


def cost(input: Tensor) -> Cost:
    size = input.numel() * input.element_size()
    return Cost(bytes_read=size, bytes_written=size, flops=2 * input.numel())


def cost_backward(input: Tensor) -> Cost:
    size = input.numel() * input.element_size()
    return Cost(bytes_read=2 * size, bytes_written=size, flops=3 * input.numel())


def case(rows: int, columns: int, *tags: str) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return Inputs((torch.randn(rows, columns, generator=generator).to(device, dtype),))

    return Case(f"{rows}x{columns}", make, frozenset(tags))


def draw(draw: Draw) -> Inputs:
    lead = [draw.size() for _ in range(draw.choice([1, 0, 2]))]
    return Inputs((draw.tensor(*lead, draw.size(BLOCK)),))


SQUARED_RELU = FusedOp(
    name=NAME,
    reference=reference,
    implementations={"triton": Implementation("cuda", forward, backward)},
    cost=cost,
    cost_backward=cost_backward,
    cases=[
        case(1, 1, "boundary"),
        case(3, BLOCK + 1, "boundary"),
        case(1024, 1024, "bench"),
        case(16384, 4096, "bench"),
    ],
    gradient=Gradient(lambda output, input: (input,), gradient, empty_gradient),
    fake=empty_output,
    draw=draw,
    configs={"triton": candidates, "triton_backward": candidates},
)

squared_relu = fuselab.operator(SQUARED_RELU)


def main() -> None:
    x = torch.tensor([-1.0, 0.5, 3.0], requires_grad=True)
    y = squared_relu(x)  # implementation="auto": Triton on a GPU, the reference on a CPU
    y.sum().backward()
    print("squared_relu", y.tolist(), "gradient", x.grad.tolist())
    assert y.tolist() == [0.0, 0.25, 9.0] and x.grad.tolist() == [0.0, 1.0, 6.0]

    report = fuselab.check(SQUARED_RELU, quick=True)
    for group in report.groups:
        print(group.implementation, group.dtype, group.where, group.verdict, group.reason or "")
    assert report.passed, [failure for group in report.groups for failure in group.failures]


if __name__ == "__main__":
    main()
