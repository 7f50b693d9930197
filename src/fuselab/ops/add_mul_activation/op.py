"""The contract of ``fuselab::add_mul_activation``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import DtypeError, ShapeError
from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs, Rewrite
from fuselab.ops.activations import ACTIVATIONS
from fuselab.ops.activations import activation as activation_named
from fuselab.ops.activations.layout import promoted
from fuselab.ops.add_mul_activation import launch
from fuselab.ops.add_mul_activation.reference import gradient, reference
from fuselab.runtime.cpp_source import CppSource

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def validate(
    input: Tensor, update: Tensor, bias: Tensor | None, scale: float, activation: str
) -> None:
    activation_named(activation)
    for name, tensor in (("input", input), ("update", update), ("bias", bias)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise DtypeError(
                f"add_mul_activation: '{name}' is {tensor.dtype}; expected float32, float16, "
                "bfloat16 or float64."
            )
    if input.shape != update.shape:
        raise ShapeError(
            f"add_mul_activation: 'update' has shape {tuple(update.shape)} and 'input' "
            f"{tuple(input.shape)}; they must be equal (expand the smaller one)."
        )
    if bias is not None and (input.dim() == 0 or bias.shape != input.shape[-1:]):
        raise ShapeError(
            f"add_mul_activation: 'bias' has shape {tuple(bias.shape)}; expected "
            f"{tuple(input.shape[-1:]) or 'None'}, the last dimension of 'input' "
            f"{tuple(input.shape)}."
        )


def fake(
    input: Tensor, update: Tensor, bias: Tensor | None, scale: float, activation: str
) -> Tensor:
    return launch.empty_output(input, update, bias)


def save(
    output: Tensor,
    input: Tensor,
    update: Tensor,
    bias: Tensor | None,
    scale: float,
    activation: str,
) -> tuple[Any, ...]:
    """The output where the derivative is a function of it, the operands where it is not."""
    derivative_of = activation_named(activation).derivative_of
    from_operands = derivative_of == "preactivation"
    return (
        output if derivative_of == "output" else None,
        input if from_operands else None,
        update if from_operands else None,
        bias if from_operands else None,
        scale,
        activation,
        input.dtype,
        update.dtype,
        None if bias is None else bias.dtype,
    )


def _saved(
    output: Tensor | None,
    input: Tensor | None,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float,
    activation: str,
    input_dtype: torch.dtype,
    update_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> launch.Saved:
    return launch.Saved(
        activation, scale, output, input, update, bias, input_dtype, update_dtype, bias_dtype
    )


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    return _saved(*saved).empty_gradients(needs, grad_output)


def _forward_cpp(
    input: Tensor, update: Tensor, bias: Tensor | None, scale: float, activation: str
) -> Tensor:
    return launch.forward_cpp(CPP, input, update, bias, scale, activation)


def _backward_cpp(
    needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    return launch.backward_cpp(CPP, needs, grad_output, _saved(*saved))


def _forward_triton(
    input: Tensor, update: Tensor, bias: Tensor | None, scale: float, activation: str
) -> Tensor:
    return launch.forward_triton(input, update, bias, scale, activation)


def _backward_triton(
    needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    return launch.backward_triton(needs, grad_output, _saved(*saved))


def _bytes(tensor: Tensor | None) -> int:
    """Bytes behind a tensor: an expanded dimension is read once."""
    if tensor is None or tensor.numel() == 0:
        return 0
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride != 0 else 1
    return elements * tensor.element_size()


def _unit(dtype: torch.dtype) -> str:
    return "fp64" if dtype == torch.float64 else "fp32"


def cost(
    input: Tensor, update: Tensor, bias: Tensor | None, scale: float, activation: str
) -> Cost:
    """Input, update and bias read once, the output written once."""
    dtype = promoted(input, update, bias)
    flops = 2 + (bias is not None) + activation_named(activation).flops
    return Cost(
        _bytes(input) + _bytes(update) + _bytes(bias),
        input.numel() * dtype.itemsize,
        input.numel() * flops,
        _unit(dtype),
    )


def cost_backward(
    input: Tensor, update: Tensor, bias: Tensor | None, scale: float, activation: str
) -> Cost:
    """Upstream gradient and saved tensors read once, every gradient written once."""
    dtype = promoted(input, update, bias)
    derivative_of = activation_named(activation).derivative_of
    read = input.numel() * dtype.itemsize
    if derivative_of == "output":
        read *= 2
    elif derivative_of == "preactivation":
        read += _bytes(input) + _bytes(update) + _bytes(bias)
    written = input.numel() * (input.element_size() + update.element_size())
    flops = 2 + activation_named(activation).flops
    if bias is not None:
        written += bias.numel() * bias.element_size()
        flops += 1
    return Cost(read, written, input.numel() * flops, _unit(dtype))


def _case_inputs(rows: int, columns: int):
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        shape = (rows, columns)
        input, update, bias = (
            torch.randn(s, generator=generator).to(device, dtype) for s in (shape, shape, (columns,))
        )
        return Inputs((input, update, bias, 0.5, "relu"))

    return make


OP = FusedOp(
    name="fuselab::add_mul_activation",
    reference=reference,
    implementations={"triton": Implementation("cuda", _forward_triton, _backward_triton), "cpp": Implementation("cpu", _forward_cpp, _backward_cpp)},
    cost=cost,
    cost_backward=cost_backward,
    cases=[Case("4x4", _case_inputs(4, 4))],
    gradient=Gradient(save, gradient, fake_gradient),
    validate=validate,
    fake=fake,
)
