"""The launchers of two_losses, and the operator that PyTorch sees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import triton_kernels
from .gradient import gradient
from .reference import reference
from .runtime.cpp_sweep import CppSweeps
from .runtime.signature import float32_on_gpu, mismatch, outputs_like
from .runtime.operator import Differentiation, Kernels, Operator, public_function
from .runtime.sweep import Sweep, Sweeps, arithmetic_dtype
from .runtime.triton_sweep import Reducing, TritonSweeps


def _forward(sweeps: Sweeps, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    length = prediction.shape[0]
    width = prediction.shape[1]
    compute = arithmetic_dtype(prediction, target)
    output_0, output_1 = outputs_like(reference, prediction, target)
    swept = Sweep(
        rows={},
        columns={"length": length, "width": width},
        read=[
            (prediction, "length width"),
            (target, "length width"),
        ],
        written=[
            (output_0, ""),
        ],
    )
    sweeps.run("two_losses", swept, compute)
    swept = Sweep(
        rows={"length": length},
        columns={"width": width},
        read=[
            (prediction, "length width"),
            (target, "length width"),
        ],
        written=[
            (output_1, "length"),
        ],
    )
    sweeps.run("two_losses_output_1", swept, compute)
    return output_0, output_1


def _backward(
    sweeps: Sweeps,
    needs: Sequence[bool],
    grad_output: Sequence[Tensor],
    prediction: Tensor,
    target: Tensor,
) -> tuple[Tensor | None, ...]:
    length = prediction.shape[0]
    width = prediction.shape[1]
    grad_output_0, grad_output_1 = grad_output
    compute = arithmetic_dtype(grad_output_0, grad_output_1, prediction, target)
    grad_prediction = torch.empty_like(prediction)
    grad_target = torch.empty_like(target)
    swept = Sweep(
        rows={"length": length, "width": width},
        columns={},
        read=[
            (grad_output_1, "length"),
            (grad_output_0, ""),
            (prediction, "length width"),
            (target, "length width"),
        ],
        written=[
            (grad_prediction, "length width"),
            (grad_target, "length width"),
        ],
    )
    sweeps.run("two_losses_backward", swept, compute, (length * width,))
    return (
        grad_prediction if needs[0] else None,
        grad_target if needs[1] else None,
    )


_TRITON = TritonSweeps(
    triton_kernels,
    "ejected::two_losses",
    {
        "two_losses": Reducing(sweeps=1, reductions=1),
        "two_losses_output_1": Reducing(sweeps=1, reductions=1),
    },
)
_TRITON_BACKWARD = TritonSweeps(
    triton_kernels,
    "ejected::two_losses",
    {},
    backward=True,
)
forward_triton = partial(_forward, _TRITON)
backward_triton = partial(_backward, _TRITON_BACKWARD)
_CPP = CppSweeps(Path(__file__).with_name("cpu_kernels.cpp"))
forward_cpp = partial(_forward, _CPP)
backward_cpp = partial(_backward, _CPP)


def save(output: tuple[Tensor, Tensor], prediction: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return (prediction, target)


def fake_gradient(
    needs: Sequence[bool], grad_output: Sequence[Tensor], prediction: Tensor, target: Tensor
) -> tuple[Tensor | None, ...]:
    return (
        torch.empty_like(prediction) if needs[0] else None,
        torch.empty_like(target) if needs[1] else None,
    )


def supports(prediction: Tensor, target: Tensor) -> str | None:
    """Return None if the kernels take these shapes, else the reason."""
    return mismatch(
        (prediction, "length width"),
        (target, "length width"),
    )


def autocast(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
    """Cast as torch.autocast does for sum on a GPU."""
    return float32_on_gpu(args)


operator = public_function(
    Operator(
        name="two_losses",
        module=__name__,
        reference=reference,
        parameters=2,
        outputs=2,
        kernels={
            "triton": Kernels("cuda", forward_triton, backward_triton),
            "cpp": Kernels("cpu", forward_cpp, backward_cpp),
        },
        supports=supports,
        gradient=Differentiation(save, gradient, fake_gradient, saved=2),
        autocast=autocast,
    )
)
