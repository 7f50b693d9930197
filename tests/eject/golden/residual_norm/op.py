"""The contract of ``ejected::residual_norm``, and its launchers."""

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
from fuselab.runtime.sweep import Sweep, Sweeps, arithmetic_dtype
from fuselab.runtime.triton_sweep import Reducing, TritonSweeps, configs

from . import triton_kernels
from .gradient import gradient
from .reference import reference


def _forward(sweeps: Sweeps, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    batch = x.shape[0]
    length = x.shape[1]
    width = x.shape[2]
    compute = arithmetic_dtype(x, residual, weight, bias)
    output = output_like(reference, x, residual, weight, bias)
    swept = Sweep(
        rows={"batch": batch, "length": length},
        columns={"width": width},
        read=[
            (x, "batch length width"),
            (residual, "batch length width"),
            (weight, "width"),
            (bias, "width"),
        ],
        written=[
            (output, "batch length width"),
        ],
    )
    sweeps.run("residual_norm", swept, compute)
    return output


def _backward_summing(
    sweeps: Sweeps,
    needs: Sequence[bool],
    grad_output: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor | None, ...]:
    batch = x.shape[0]
    length = x.shape[1]
    width = x.shape[2]
    compute = arithmetic_dtype(grad_output, x, residual, weight, bias)
    grad_x = torch.empty_like(x)
    grad_residual = torch.empty_like(residual) if needs[1] else grad_x
    grad_weight = torch.empty_like(weight)
    grad_bias = torch.empty_like(bias)
    swept = Sweep(
        rows={"batch": batch, "length": length},
        columns={"width": width},
        read=[
            (x, "batch length width"),
            (residual, "batch length width"),
            (grad_output, "batch length width"),
            (weight, "width"),
            (bias, "width"),
        ],
        written=[
            (grad_x, "batch length width"),
            (grad_residual, "batch length width"),
            (grad_weight, "width"),
            (grad_bias, "width"),
        ],
    )
    sweeps.run("residual_norm_backward", swept, compute)
    return (
        grad_x if needs[0] else None,
        grad_residual if needs[1] else None,
        grad_weight if needs[2] else None,
        grad_bias if needs[3] else None,
    )


def _backward(
    sweeps: Sweeps,
    needs: Sequence[bool],
    grad_output: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor | None, ...]:
    batch = x.shape[0]
    length = x.shape[1]
    width = x.shape[2]
    compute = arithmetic_dtype(grad_output, x, residual, weight, bias)
    normed_mean = torch.empty((batch, length, 1), dtype=compute, device=grad_output.device)
    normed = torch.empty((batch, length, 1), dtype=compute, device=grad_output.device)
    grad_x = torch.empty_like(x)
    grad_residual = torch.empty_like(residual) if needs[1] else grad_x
    swept = Sweep(
        rows={"batch": batch, "length": length},
        columns={"width": width},
        read=[
            (x, "batch length width"),
            (residual, "batch length width"),
            (grad_output, "batch length width"),
            (weight, "width"),
            (bias, "width"),
        ],
        written=[
            (normed_mean, "batch length 1"),
            (normed, "batch length 1"),
            (grad_x, "batch length width"),
            (grad_residual, "batch length width"),
        ],
    )
    sweeps.run("residual_norm_backward", swept, compute)
    grad_weight = torch.empty_like(weight)
    grad_bias = torch.empty_like(bias)
    swept = Sweep(
        rows={"width": width},
        columns={"batch": batch, "length": length},
        read=[
            (grad_output, "batch length width"),
            (x, "batch length width"),
            (residual, "batch length width"),
            (normed_mean, "batch length 1"),
            (normed, "batch length 1"),
            (weight, "width"),
            (bias, "width"),
        ],
        written=[
            (grad_weight, "width"),
            (grad_bias, "width"),
        ],
    )
    sweeps.run("residual_norm_backward_grad_weight", swept, compute)
    return (
        grad_x if needs[0] else None,
        grad_residual if needs[1] else None,
        grad_weight if needs[2] else None,
        grad_bias if needs[3] else None,
    )


_TRITON = TritonSweeps(
    triton_kernels,
    "ejected::residual_norm",
    {
        "residual_norm": Reducing(sweeps=1, reductions=3, stores_columns=True),
    },
)
_TRITON_BACKWARD = TritonSweeps(
    triton_kernels,
    "ejected::residual_norm",
    {
        "residual_norm_backward": Reducing(sweeps=2, reductions=5, stores_columns=True, sums=2),
    },
    backward=True,
)
forward_triton = partial(_forward, _TRITON)
backward_triton = partial(_backward_summing, _TRITON_BACKWARD)
_CUDA = CudaSweeps(
    Path(__file__).with_name("cuda_kernels.cu"),
    reductions={
        "residual_norm": 2,
        "residual_norm_backward": 4,
        "residual_norm_backward_grad_weight": 2,
    },
    splitting=(
        "residual_norm_backward_grad_weight",
    ),
)
CUDA_EXPRESSIONS = _CUDA.examples(
    {
        "residual_norm": "float float float float float",
        "residual_norm_backward": "float float float float float float float float float",
        "residual_norm_backward_grad_weight": "float float float float float float float float float",
    }
)
forward_cuda = partial(_forward, _CUDA)
backward_cuda = partial(_backward, _CUDA)
_CPP = CppSweeps(Path(__file__).with_name("cpu_kernels.cpp"))
forward_cpp = partial(_forward, _CPP)
backward_cpp = partial(_backward_summing, _CPP)


def save(
    output: Tensor, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    return (x, residual, weight, bias)


def fake_gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor | None, ...]:
    return (
        torch.empty_like(x) if needs[0] else None,
        torch.empty_like(residual) if needs[1] else None,
        torch.empty_like(weight) if needs[2] else None,
        torch.empty_like(bias) if needs[3] else None,
    )


def supports(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Return None if the kernels take these shapes, else the reason."""
    return mismatch(
        (x, "batch length width"),
        (residual, "batch length width"),
        (weight, "width"),
        (bias, "width"),
    )


def _drawn(source: Draw) -> tuple[Tensor, ...]:
    batch = source.size()
    length = source.size()
    width = source.size()
    return (
        source.tensor(batch, length, width),
        source.tensor(batch, length, width),
        source.tensor(width),
        source.tensor(width),
    )


def draw(source: Draw) -> Inputs:
    """Draw tensors of any sizes and layouts that the reference accepts."""
    return Inputs(accepted(reference, lambda: _drawn(source)))


def autocast(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
    """Cast as torch.autocast does for layer_norm on a GPU."""
    return float32_on_gpu(args)


_EXAMPLE = Case.normal([(4, 8, 16), (4, 8, 16), (16,), (16,)], "bench", "dtypes")


OP = FusedOp(
    name="ejected::residual_norm",
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
    gradient=Gradient(
        save,
        gradient,
        fake_gradient,
        equal=((1, 0),),
    ),
    cases=(_EXAMPLE,),
    cpu_cases=(
        _EXAMPLE,
    ),
    configs={"triton": configs, "triton_backward": configs},
    supports=supports,
    draw=draw,
    autocast=autocast,
)
