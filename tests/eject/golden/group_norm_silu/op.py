"""The contract of ``ejected::group_norm_silu``, and its launchers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime.cpp_sweep import CppSweeps
from fuselab.runtime.cuda_sweep import CudaSweeps
from fuselab.runtime.signature import accepted, float32_on_gpu, mismatch, output_like
from fuselab.runtime.sweep import Sweep, Sweeps, arithmetic_dtype, empty_in_order
from fuselab.runtime.triton_sweep import Reducing, TritonSweeps, configs

from . import triton_kernels
from .gradient import gradient
from .reference import reference


def _forward(sweeps: Sweeps, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    batch = x.shape[0]
    channels = x.shape[1]
    height = x.shape[2]
    width = x.shape[3]
    compute = arithmetic_dtype(x, weight, bias)
    output = output_like(reference, x, weight, bias)
    swept = Sweep(
        rows={"batch": batch, "group": 4},
        columns={"channels_part": channels // 4, "height": height, "width": width},
        read=[
            (x, "batch (group channels_part) height width"),
            (weight, "(group channels_part)"),
            (bias, "(group channels_part)"),
        ],
        written=[
            (output, "batch (group channels_part) height width"),
        ],
    )
    sweeps.run("group_norm_silu", swept, compute)
    return output


def _backward(
    sweeps: Sweeps,
    needs: Sequence[bool],
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor | None, ...]:
    batch = x.shape[0]
    channels = x.shape[1]
    height = x.shape[2]
    width = x.shape[3]
    compute = arithmetic_dtype(grad_output, x, weight, bias)
    group_norm_mean = torch.empty((batch, 4, 1), dtype=compute, device=grad_output.device)
    group_norm_rstd = torch.empty((batch, 4, 1), dtype=compute, device=grad_output.device)
    grad_x = torch.empty_like(x)
    swept = Sweep(
        rows={"batch": batch, "group": 4},
        columns={"channels_part": channels // 4, "height": height, "width": width},
        read=[
            (x, "batch (group channels_part) height width"),
            (grad_output, "batch (group channels_part) height width"),
            (weight, "(group channels_part)"),
            (bias, "(group channels_part)"),
        ],
        written=[
            (group_norm_mean, "batch group 1"),
            (group_norm_rstd, "batch group 1"),
            (grad_x, "batch (group channels_part) height width"),
        ],
    )
    sweeps.run("group_norm_silu_backward", swept, compute)
    grad_weight = torch.empty_like(weight)
    grad_bias = torch.empty_like(bias)
    swept = Sweep(
        rows={"group": 4, "channels_part": channels // 4},
        columns={"batch": batch, "height": height, "width": width},
        read=[
            (grad_output, "batch (group channels_part) height width"),
            (x, "batch (group channels_part) height width"),
            (group_norm_mean, "batch group 1"),
            (group_norm_rstd, "batch group 1"),
            (weight, "(group channels_part)"),
            (bias, "(group channels_part)"),
        ],
        written=[
            (grad_weight, "(group channels_part)"),
            (grad_bias, "(group channels_part)"),
        ],
    )
    sweeps.run("group_norm_silu_backward_grad_weight", swept, compute)
    return (
        grad_x if needs[0] else None,
        grad_weight if needs[1] else None,
        grad_bias if needs[2] else None,
    )


def _backward_cpp(
    sweeps: Sweeps,
    needs: Sequence[bool],
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor | None, ...]:
    batch = x.shape[0]
    channels = x.shape[1]
    height = x.shape[2]
    width = x.shape[3]
    compute = arithmetic_dtype(grad_output, x, weight, bias)
    group_norm_mean = torch.empty((batch, 4, 1), dtype=compute, device=grad_output.device)
    group_norm_rstd = torch.empty((batch, 4, 1), dtype=compute, device=grad_output.device)
    mul_33 = empty_in_order(x, (batch, channels, height, width), compute)
    grad_x = torch.empty_like(x)
    swept = Sweep(
        rows={"batch": batch, "group": 4},
        columns={"channels_part": channels // 4, "height": height, "width": width},
        read=[
            (x, "batch (group channels_part) height width"),
            (grad_output, "batch (group channels_part) height width"),
            (weight, "(group channels_part)"),
            (bias, "(group channels_part)"),
        ],
        written=[
            (group_norm_mean, "batch group 1"),
            (group_norm_rstd, "batch group 1"),
            (mul_33, "batch (group channels_part) height width"),
            (grad_x, "batch (group channels_part) height width"),
        ],
    )
    sweeps.run("group_norm_silu_backward", swept, compute)
    grad_weight = torch.empty_like(weight)
    grad_bias = torch.empty_like(bias)
    swept = Sweep(
        rows={"group": 4, "channels_part": channels // 4},
        columns={"batch": batch, "height": height, "width": width},
        read=[
            (mul_33, "batch (group channels_part) height width"),
            (x, "batch (group channels_part) height width"),
            (group_norm_mean, "batch group 1"),
            (group_norm_rstd, "batch group 1"),
        ],
        written=[
            (grad_weight, "(group channels_part)"),
            (grad_bias, "(group channels_part)"),
        ],
    )
    sweeps.run("group_norm_silu_backward_grad_weight", swept, compute)
    return (
        grad_x if needs[0] else None,
        grad_weight if needs[1] else None,
        grad_bias if needs[2] else None,
    )


_TRITON = TritonSweeps(
    triton_kernels,
    "ejected::group_norm_silu",
    {
        "group_norm_silu": Reducing(sweeps=1, reductions=3, stores_columns=True),
    },
)
_TRITON_BACKWARD = TritonSweeps(
    triton_kernels,
    "ejected::group_norm_silu",
    {
        "group_norm_silu_backward": Reducing(sweeps=2, reductions=5, stores_columns=True),
        "group_norm_silu_backward_grad_weight": Reducing(sweeps=1, reductions=2),
    },
    backward=True,
    held=("group_norm_mean", "group_norm_rstd",),
)
forward_triton = partial(_forward, _TRITON)
backward_triton = partial(_backward, _TRITON_BACKWARD)
_CUDA = CudaSweeps(
    Path(__file__).with_name("cuda_kernels.cu"),
    reductions={
        "group_norm_silu": 2,
        "group_norm_silu_backward": 4,
        "group_norm_silu_backward_grad_weight": 2,
    },
    splitting=(
        "group_norm_silu_backward_grad_weight",
    ),
)
CUDA_EXPRESSIONS = _CUDA.examples(
    {
        "group_norm_silu": "float float float float",
        "group_norm_silu_backward": "float float float float float float float",
        "group_norm_silu_backward_grad_weight": "float float float float float float float float",
    }
)
forward_cuda = partial(_forward, _CUDA)
backward_cuda = partial(_backward, _CUDA)
_CPP = CppSweeps(Path(__file__).with_name("cpu_kernels.cpp"))
forward_cpp = partial(_forward, _CPP)
backward_cpp = partial(_backward_cpp, _CPP)


def save(output: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (x, weight, bias)


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, x: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor | None, ...]:
    return (
        torch.empty_like(x) if needs[0] else None,
        torch.empty_like(weight) if needs[1] else None,
        torch.empty_like(bias) if needs[2] else None,
    )


def supports(x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Return None if the kernels take these shapes, else the reason."""
    return mismatch(
        (x, "batch channels height width"),
        (weight, "channels"),
        (bias, "channels"),
        multiples={"channels": 4},
        least={"width": 1, "height": 1},
    )


def _drawn(source: Draw) -> tuple[Tensor, ...]:
    batch = source.size()
    channels = 4 * source.size()
    height = source.size() + 1
    width = source.size() + 1
    return (
        source.tensor(batch, channels, height, width),
        source.tensor(channels),
        source.tensor(channels),
    )


def draw(source: Draw) -> Inputs:
    """Draw tensors of any sizes and layouts that the reference accepts."""
    return Inputs(accepted(reference, lambda: _drawn(source)))


def autocast(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
    """Cast as torch.autocast does for group_norm on a GPU."""
    return float32_on_gpu(args)


_EXAMPLE = Case.normal([(2, 8, 5, 6), (8,), (8,)], "bench", "dtypes")


OP = FusedOp(
    name="ejected::group_norm_silu",
    reference=reference,
    implementations={
        "triton": Implementation(
            "cuda", forward_triton, backward_triton, supports=supports
        ),
        "cuda": Implementation(
            "cuda", forward_cuda, backward_cuda, supports=supports
        ),
        "cpp": Implementation(
            "cpu", forward_cpp, backward_cpp, supports=supports
        ),
    },
    gradient=Gradient(save, gradient, fake_gradient),
    cases=(_EXAMPLE,),
    cpu_cases=(
        _EXAMPLE,
        Case.normal([(2, 4, 5, 3), (4,), (4,)], "dtypes"),
    ),
    configs={"triton": configs, "triton_backward": configs},
    supports=supports,
    draw=draw,
    autocast=autocast,
)
