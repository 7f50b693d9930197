"""The contract of ``fuselab::add``, and its launchers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ShapeError
from fuselab.op import Cost, FusedOp, Gradient, Implementation
from fuselab.ops._shared.cost import arithmetic_unit, bytes_of
from fuselab.ops._shared.dtypes import FLOATING, check_floating
from fuselab.ops._shared.grid import launch_cuda, launch_triton
from fuselab.ops.add import broadcast_gradient, cases, triton_kernels
from fuselab.ops.add.reference import gradient, reference
from fuselab.runtime.cuda_source import CudaSource

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
# Every dtype, with packs and without, 32-bit and 64-bit offsets, one loop and five.
CUDA_EXPRESSIONS = (
    "add<float, float, float, int32_t, 1, 4, true, true>",
    "add<double, double, double, int32_t, 2, 2, true, false>",
    "add<__half, __half, __half, int64_t, 1, 8, true, true>",
    "add<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, int32_t, 5, 8, false, true>",
    "add<float, __half, __nv_bfloat16, int64_t, 3, 1, false, false>",
)


def validate(input: Tensor, other: Tensor) -> None:
    check_floating("add", input=input, other=other)
    try:
        torch.broadcast_shapes(input.shape, other.shape)
    except RuntimeError:
        raise ShapeError(
            f"add: 'other' has shape {tuple(other.shape)} and 'input' {tuple(input.shape)}; they "
            "must broadcast: counted from the last, sizes are equal or one of them is 1."
        ) from None


def empty_output(input: Tensor, other: Tensor) -> Tensor:
    """Return a new, uninitialised output as the reference describes it; also the contract's
    fake."""
    shape = torch.broadcast_shapes(input.shape, other.shape)
    dtype = torch.result_type(input, other)
    for like in (input, other):
        if like.shape == shape:
            return torch.empty_like(like, dtype=dtype)
    return input.new_empty(shape, dtype=dtype)


def save(output: Tensor, input: Tensor, other: Tensor) -> tuple[Any, ...]:
    """Save no tensor, for a sum's gradient is the upstream one; keep shapes and dtypes."""
    return tuple(input.shape), tuple(other.shape), input.dtype, other.dtype


def forward_triton(input: Tensor, other: Tensor) -> Tensor:
    output = empty_output(input, other)
    launch_triton(triton_kernels, "add", output, input, other)
    return output


def forward_cuda(input: Tensor, other: Tensor) -> Tensor:
    output = empty_output(input, other)
    dtypes = (output.dtype, input.dtype, other.dtype)
    launch_cuda(CUDA, dtypes, "add", output, input, other)
    return output


def cost_backward(input: Tensor, other: Tensor) -> Cost:
    """Return no cost if neither was broadcast, for then both gradients are the upstream one. Else
    the upstream gradient is read once, and each broadcast operand's gradient is written once."""
    dtype = torch.result_type(input, other)
    numel = torch.broadcast_shapes(input.shape, other.shape).numel()
    summed = [tensor for tensor in (input, other) if tensor.numel() != numel]
    written = bytes_of(*summed)
    read = numel * dtype.itemsize if summed else 0
    return Cost(read, written, len(summed) * numel, arithmetic_unit(dtype))


def prefer(input: Tensor, other: Tensor) -> Sequence[str]:
    """Return the reference for equal shapes, where torch.add already runs at memory's limit, and
    the kernels if one is broadcast (65536 x 512 float32 and a row on an H200: 68.5 us for 102)."""
    return ("reference",) if input.shape == other.shape else ("cuda", "triton")


OP = FusedOp(
    name="fuselab::add",
    reference=reference,
    implementations={
        name: Implementation(
            "cuda",
            forward,
            partial(broadcast_gradient.backward, sums),
            supports_backward=broadcast_gradient.refusal,
        )
        for name, forward, sums in (
            ("triton", forward_triton, broadcast_gradient.sums_triton),
            ("cuda", forward_cuda, broadcast_gradient.sums_cuda),
        )
    },
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(
        save,
        gradient,
        prefer=broadcast_gradient.prefer,
        passed=((0, 0), (1, 0)),
    ),
    draw=cases.draw,
    validate=validate,
    fake=empty_output,
    prefer=prefer,
    dtypes=FLOATING,
)
