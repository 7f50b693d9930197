"""The contract of ``ejected::add_rms_norm``, and its launchers."""

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
from fuselab.runtime.signature import accepted, float32_on_gpu, mismatch, outputs_like
from fuselab.runtime.sweep import Sweep, Sweeps, arithmetic_dtype
from fuselab.runtime.triton_sweep import Reducing, TritonSweeps, configs

from . import triton_kernels
from .gradient import gradient
from .reference import reference


def _forward(sweeps: Sweeps, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    batch = x.shape[0]
    length = x.shape[1]
    width = x.shape[2]
    compute = arithmetic_dtype(x, residual, weight)
    hidden, normed = outputs_like(reference, x, residual, weight)
    swept = Sweep(
        rows={"batch": batch, "length": length},
        columns={"width": width},
        read=[
            (x, "batch length width"),
            (residual, "batch length width"),
            (weight, "width"),
        ],
        written=[
            (hidden, "batch length width"),
            (normed, "batch length width"),
        ],
    )
    sweeps.run("add_rms_norm", swept, compute)
    return hidden, normed


def _backward_summing(
    sweeps: Sweeps,
    needs: Sequence[bool],
    grad_output: Sequence[Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    hidden: Tensor,
) -> tuple[Tensor | None, ...]:
    batch = x.shape[0]
    length = x.shape[1]
    width = x.shape[2]
    grad_hidden, grad_normed = grad_output
    compute = arithmetic_dtype(grad_hidden, grad_normed, x, residual, weight)
    grad_x = torch.empty_like(x)
    grad_residual = torch.empty_like(residual) if needs[1] else grad_x
    grad_weight = torch.empty_like(weight)
    swept = Sweep(
        rows={"batch": batch, "length": length},
        columns={"width": width},
        read=[
            (grad_hidden, "batch length width"),
            (grad_normed, "batch length width"),
            (weight, "width"),
            (hidden, "batch length width"),
        ],
        written=[
            (grad_x, "batch length width"),
            (grad_residual, "batch length width"),
            (grad_weight, "width"),
        ],
    )
    sweeps.run("add_rms_norm_backward", swept, compute)
    return (
        grad_x if needs[0] else None,
        grad_residual if needs[1] else None,
        grad_weight if needs[2] else None,
    )


def _backward(
    sweeps: Sweeps,
    needs: Sequence[bool],
    grad_output: Sequence[Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    hidden: Tensor,
) -> tuple[Tensor | None, ...]:
    batch = x.shape[0]
    length = x.shape[1]
    width = x.shape[2]
    grad_hidden, grad_normed = grad_output
    compute = arithmetic_dtype(grad_hidden, grad_normed, x, residual, weight)
    scale = torch.empty((batch, length, 1), dtype=compute, device=grad_hidden.device)
    grad_x = torch.empty_like(x)
    grad_residual = torch.empty_like(residual) if needs[1] else grad_x
    swept = Sweep(
        rows={"batch": batch, "length": length},
        columns={"width": width},
        read=[
            (hidden, "batch length width"),
            (grad_hidden, "batch length width"),
            (grad_normed, "batch length width"),
            (weight, "width"),
        ],
        written=[
            (scale, "batch length 1"),
            (grad_x, "batch length width"),
            (grad_residual, "batch length width"),
        ],
    )
    sweeps.run("add_rms_norm_backward", swept, compute)
    grad_weight = torch.empty_like(weight)
    swept = Sweep(
        rows={"width": width},
        columns={"batch": batch, "length": length},
        read=[
            (grad_normed, "batch length width"),
            (hidden, "batch length width"),
            (scale, "batch length 1"),
        ],
        written=[
            (grad_weight, "width"),
        ],
    )
    sweeps.run("add_rms_norm_backward_grad_weight", swept, compute)
    return (
        grad_x if needs[0] else None,
        grad_residual if needs[1] else None,
        grad_weight if needs[2] else None,
    )


_TRITON = TritonSweeps(
    triton_kernels,
    "ejected::add_rms_norm",
    {
        "add_rms_norm": Reducing(sweeps=1, reductions=1, stores_columns=True),
    },
)
_TRITON_BACKWARD = TritonSweeps(
    triton_kernels,
    "ejected::add_rms_norm",
    {
        "add_rms_norm_backward": Reducing(sweeps=1, reductions=2, stores_columns=True, sums=1),
    },
    backward=True,
)
forward_triton = partial(_forward, _TRITON)
backward_triton = partial(_backward_summing, _TRITON_BACKWARD)
_CUDA = CudaSweeps(
    Path(__file__).with_name("cuda_kernels.cu"),
    reductions={
        "add_rms_norm": 1,
        "add_rms_norm_backward": 2,
        "add_rms_norm_backward_grad_weight": 1,
    },
    splitting=(
        "add_rms_norm_backward_grad_weight",
    ),
)
CUDA_EXPRESSIONS = _CUDA.examples(
    {
        "add_rms_norm": "float float float float float",
        "add_rms_norm_backward": "float float float float float float float",
        "add_rms_norm_backward_grad_weight": "float float float float",
    }
)
forward_cuda = partial(_forward, _CUDA)
backward_cuda = partial(_backward, _CUDA)
_CPP = CppSweeps(Path(__file__).with_name("cpu_kernels.cpp"))
forward_cpp = partial(_forward, _CPP)
backward_cpp = partial(_backward_summing, _CPP)


def save(
    output: tuple[Tensor, Tensor], x: Tensor, residual: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    return (x, residual, weight, output[0])


def fake_gradient(
    needs: Sequence[bool],
    grad_output: Sequence[Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    hidden: Tensor,
) -> tuple[Tensor | None, ...]:
    return (
        torch.empty_like(x) if needs[0] else None,
        torch.empty_like(residual) if needs[1] else None,
        torch.empty_like(weight) if needs[2] else None,
    )


def supports(x: Tensor, residual: Tensor, weight: Tensor) -> str | None:
    """Return None if the kernels take these shapes, else the reason."""
    return mismatch(
        (x, "batch length width"),
        (residual, "batch length width"),
        (weight, "width"),
    )


def _drawn(source: Draw) -> tuple[Tensor, ...]:
    batch = source.size()
    length = source.size()
    width = source.size()
    return (
        source.tensor(batch, length, width),
        source.tensor(batch, length, width),
        source.tensor(width),
    )


def draw(source: Draw) -> Inputs:
    """Draw tensors of any sizes and layouts that the reference accepts."""
    return Inputs(accepted(reference, lambda: _drawn(source)))


def autocast(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
    """Cast as torch.autocast does for rsqrt on a GPU."""
    return float32_on_gpu(args)


_EXAMPLE = Case.normal([(3, 5, 32), (3, 5, 32), (32,)], "bench", "dtypes")


OP = FusedOp(
    name="ejected::add_rms_norm",
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
