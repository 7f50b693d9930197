"""The contracts of ``fuselab::bias_activation`` and of its in-place form: ``add_mul_activation``
without an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ShapeError
from fuselab.op import Cost, FusedOp, Gradient, Inputs, Rewrite
from fuselab.ops._shared.activations import spellings
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.add_mul_activation import cuda_launch, layout
from fuselab.ops.add_mul_activation import op as add_mul
from fuselab.ops.add_mul_activation.cases import is_writable
from fuselab.ops.bias_activation import cases
from fuselab.ops.bias_activation.reference import gradient, reference, reference_in_place
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
CUDA_EXPRESSIONS = cuda_launch.cuda_expressions(has_update=False)


def _operands(
    input: Tensor, bias: Tensor, activation: str
) -> tuple[Tensor, None, Tensor, float, str]:
    """Return the arguments of ``add_mul_activation``."""
    return input, None, bias, 1.0, activation


def _validate(op_name: str, input: Tensor, bias: Tensor, activation: str) -> None:
    if input.dim() == 0:
        raise ShapeError(f"{op_name}: 'input' has no dimension; expected one or more.")
    add_mul.check_operands(op_name, *_operands(input, bias, activation))


def fake(input: Tensor, bias: Tensor, activation: str) -> Tensor:
    return layout.empty_output(input, None, bias)


def save(output: Tensor, input: Tensor, bias: Tensor, activation: str) -> tuple[Any, ...]:
    """Save the output if the derivative is a function of it, and the operands if it needs the
    pre-activation."""
    saved = add_mul.save(output, *_operands(input, bias, activation))
    kept_output, kept_input, _, kept_bias, _, _, input_dtype, _, bias_dtype = saved
    return kept_output, kept_input, kept_bias, activation, input_dtype, bias_dtype


def _saved(*saved: Any) -> layout.Saved:
    output, input, bias, activation, input_dtype, bias_dtype = saved
    terms = (output, input, None, bias)
    return layout.Saved(*terms, 1.0, activation, input_dtype, None, bias_dtype)


def _backward_by(
    backward: add_mul.Backward, needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    needs_input, needs_bias = needs
    grads = backward((needs_input, False, needs_bias), grad_output, _saved(*saved))
    return grads[0], grads[2]


def _empty(needs: Sequence[bool], grad: Tensor, kept: layout.Saved) -> layout.Gradients:
    return kept.empty_gradients(needs, grad)


def cost(input: Tensor, bias: Tensor, activation: str) -> Cost:
    """Return the least traffic: input and bias read once, the output written once."""
    return add_mul.cost(*_operands(input, bias, activation))


def cost_backward(input: Tensor, bias: Tensor, activation: str) -> Cost:
    """Return the least traffic: upstream gradient and saved tensors read once, both gradients
    written once."""
    return add_mul.cost_backward(*_operands(input, bias, activation))


def prefer(input: Tensor, bias: Tensor, activation: str) -> Sequence[str]:
    """Return CUDA C++ first for contiguous inputs. Otherwise Triton is first, whose strided kernel
    works in square tiles and so reads a transposed operand by whole lines."""
    return ("cuda", "triton") if input.is_contiguous() else ("triton", "cuda")


def regime(input: Tensor, bias: Tensor, activation: str) -> str:
    """Return ``layout_regime`` of the operands."""
    return add_mul.layout_regime(activation, input, bias)


def prefer_backward(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> Sequence[str]:
    """Return the order of ``add_mul_activation`` (65536 x 512 float32 on an H200: CUDA C++ 107 us,
    Triton 117)."""
    return add_mul.prefer_backward(needs, grad_output, *saved)


def _rewrites() -> Iterator[Rewrite]:
    """Yield a rewrite for every spelling of every activation. Identity has none: it is one kernel
    already."""

    def spelt(act: Callable[[Tensor], Tensor], name: str) -> Iterator[Rewrite]:
        def call(input: Tensor, bias: Tensor) -> Inputs:
            return Inputs((input, bias, name))

        yield Rewrite(lambda input, bias: act(input + bias), call)
        yield Rewrite(lambda input, bias: act(bias + input), call)
        yield Rewrite(lambda input, bias: act(torch.add(input, bias)), call)

    for spelling, name in spellings():
        yield from spelt(spelling, name)


OP = FusedOp(
    name="fuselab::bias_activation",
    reference=reference,
    implementations=add_mul.implementations(CUDA, CPP, _operands, _backward_by),
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(save, gradient, partial(_backward_by, _empty), prefer_backward),
    draw=cases.draw,
    validate=partial(_validate, "bias_activation"),
    fake=fake,
    prefer=prefer,
    rewrites=tuple(_rewrites()),
    dtypes=FLOATING,
    regime=regime,
    cpu_cases=cases.CPU_CASES,
)


IN_PLACE = FusedOp(
    name="fuselab::bias_activation_",
    reference=reference_in_place,
    implementations=add_mul.implementations_in_place(CUDA, CPP, _operands),
    cost=cost,
    cases=tuple(filter(is_writable, cases.CASES)),
    draw=cases.draw,
    validate=partial(_validate, "bias_activation_"),
    prefer=add_mul.prefer_in_place,
    dtypes=FLOATING,
    mutates=("input",),
    regime=regime,
    cpu_cases=cases.CPU_CASES,
)
