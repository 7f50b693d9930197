"""The sizes of input Wᵀ, its arithmetic, and its gradients where those are library products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fuselab.ops.activations import activation as activation_named
from fuselab.ops.add_mul_activation.launch import Gradients, Saved
from fuselab.runtime.matmul_precision import allows_tf32

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Up to this depth a product with many rows is a stream of output, not arithmetic: the shallow
# kernels hold all of a column's weights in registers.
SHALLOW_DEPTH = 32

PullBack = Callable[[Sequence[bool], Tensor, Saved], Gradients]


def unit(dtype: torch.dtype) -> str:
    """The arithmetic of a product in this dtype, as ``Cost.unit``."""
    if dtype == torch.float32:
        return "tf32" if allows_tf32() else "fp32"
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}[dtype]


def as_rows(tensor: Tensor) -> Tensor:
    """``(..., K)`` as a matrix ``(rows, K)``: a view where strides allow, else a copy."""
    rows = tensor.shape[:-1].numel()
    return tensor.reshape(rows, tensor.shape[-1])


def empty_output(input: Tensor, weight: Tensor) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of a matrix, by the operators that it calls: those a launch plan can hold."""
    if bias is None:
        return torch.mm(rows, weight.t())
    return torch.addmm(bias, rows, weight.t())


def gradients(
    pull_back: PullBack,
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias: one pass that forms the pre-activation's and sums the
    bias's, then a product of the library (cuBLAS) for each of the others.

    ``pull_back`` is a backward launcher of ``add_mul_activation`` without its source. Where the
    activation's derivative needs the pre-activation, one more library product gives it.
    """
    needs_total = needs[0] or needs[1]
    total: Tensor | None = grad_output
    grad_bias: Tensor | None = None
    passes = activation != "identity"
    if (passes and any(needs)) or needs[2]:
        from_operands = activation_named(activation).derivative_of == "preactivation"
        saved = Saved(
            activation=activation,
            scale=1.0,
            output=output,
            input=linear(as_rows(input), weight, bias).view_as(grad_output)
            if from_operands
            else None,
            update=None,
            bias=None,
            input_dtype=grad_output.dtype,
            update_dtype=None,
            bias_dtype=grad_output.dtype,
        )
        first, _, grad_bias = pull_back(
            (passes and needs_total, False, needs[2]), grad_output, saved
        )
        total = first if passes else grad_output
    if not needs_total:
        return None, None, grad_bias
    assert total is not None
    rows = as_rows(total)
    return (
        torch.mm(rows, weight).view(input.shape) if needs[0] else None,
        torch.mm(rows.t(), as_rows(input)) if needs[1] else None,
        grad_bias,
    )
