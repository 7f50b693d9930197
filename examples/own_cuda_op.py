"""Your own CUDA C++ kernel as a first-class operator: SwiGLU, silu(gate) * up (Shazeer, 2020).

The kernels are in own_cuda_op.cu, compiled at run time by NVRTC; this file is the contract:

    python examples/own_cuda_op.py
    fuselab check examples/own_cuda_op.py
    fuselab bench examples/own_cuda_op.py
    fuselab asm examples/own_cuda_op.py --arch sm_90

Without a GPU the kernels are compiled, which needs none, and the operator runs its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import fuselab
from fuselab.errors import ShapeError
from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime.cuda_source import CudaSource, i64

SOURCE = CudaSource(Path(__file__).with_name("own_cuda_op.cu"))
THREADS = 256
CUDA_NAMES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float64: "double",
}
# Every instantiation, for commands that compile without a GPU: check and CI.
CUDA_EXPRESSIONS = tuple(
    f"{kernel}<{name}>" for kernel in ("forward", "backward") for name in CUDA_NAMES.values()
)


# The reference defines the right result, in plain PyTorch; its annotated parameters are the
# operator's signature.


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, elementwise, for tensors of one shape and dtype."""
    return torch.nn.functional.silu(gate) * up


def gradient(
    needs: Sequence[bool], grad_output: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return both gradients in plain PyTorch; their own derivatives are the second derivatives."""
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return (
        grad_output * up * slope if needs[0] else None,
        grad_output * (gate * sigmoid) if needs[1] else None,
    )


def validate(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ShapeError(
            f"swiglu: 'up' is {up.dtype} {tuple(up.shape)} and 'gate' {gate.dtype} "
            f"{tuple(gate.shape)}; they must be equal."
        )


# The launchers allocate; the kernels never do.


def empty_output(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def empty_gradients(
    needs: Sequence[bool], grad_output: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    return (
        empty_output(gate, up) if needs[0] else None,
        empty_output(gate, up) if needs[1] else None,
    )


def grid_of(numel: int) -> tuple[int, int, int]:
    return (-(-numel // THREADS), 1, 1)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    output = empty_output(gate, up)
    numel = output.numel()
    if numel:
        SOURCE.launch(
            f"forward<{CUDA_NAMES[gate.dtype]}>",
            grid=grid_of(numel),
            block=(THREADS, 1, 1),
            args=(gate, up, output, i64(numel)),
        )
    return output


def backward(
    needs: Sequence[bool], grad_output: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    grad_output, gate, up = grad_output.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = empty_gradients(needs, grad_output, gate, up)
    numel = gate.numel()
    if numel:
        SOURCE.launch(
            f"backward<{CUDA_NAMES[gate.dtype]}>",
            grid=grid_of(numel),
            block=(THREADS, 1, 1),
            args=(grad_output, gate, up, grad_gate, grad_up, i64(numel)),
        )
    return grad_gate, grad_up


# The contract.


def cost(gate: Tensor, up: Tensor) -> Cost:
    size = gate.numel() * gate.element_size()
    return Cost(bytes_read=2 * size, bytes_written=size, flops=5 * gate.numel())


def cost_backward(gate: Tensor, up: Tensor) -> Cost:
    size = gate.numel() * gate.element_size()
    return Cost(bytes_read=3 * size, bytes_written=2 * size, flops=11 * gate.numel())


def case(rows: int, columns: int, *tags: str) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        gate, up = (torch.randn(rows, columns, generator=generator) for _ in range(2))
        return Inputs((gate.to(device, dtype), up.to(device, dtype)))

    return Case(f"{rows}x{columns}", make, frozenset(tags))


def draw(draw: Draw) -> Inputs:
    shape = [draw.size(THREADS) for _ in range(draw.choice([1, 2, 3]))]
    return Inputs((draw.tensor(*shape), draw.tensor(*shape)))


SWIGLU = FusedOp(
    name="mine::swiglu",
    reference=reference,
    implementations={"cuda": Implementation("cuda", forward, backward)},
    cost=cost,
    cost_backward=cost_backward,
    cases=[
        case(1, 1, "boundary"),
        case(3, THREADS + 1, "boundary"),
        case(1024, 1024, "bench"),
        case(16384, 4096, "bench"),
    ],
    gradient=Gradient(lambda output, gate, up: (gate, up), gradient, empty_gradients),
    validate=validate,
    fake=empty_output,
    draw=draw,
)

swiglu = fuselab.operator(SWIGLU)


def main() -> None:
    gate = torch.tensor([0.0, 1.0, -30.0], requires_grad=True)
    up = torch.tensor([5.0, 2.0, 1.0])
    y = swiglu(gate, up)  # implementation="auto": CUDA on a GPU, the reference on a CPU
    y.sum().backward()
    print("swiglu", y.tolist(), "gradient", gate.grad.tolist())
    assert y[0].item() == 0.0 and abs(y[1].item() - 1.4621172) < 1e-6
    assert gate.grad[0].item() == 2.5

    report = fuselab.check(SWIGLU, quick=True, seed=0)
    for group in report.groups:
        print(group.implementation, group.dtype, group.where, group.verdict, group.reason or "")
    assert report.passed, [failure for group in report.groups for failure in group.failures]


if __name__ == "__main__":
    main()
