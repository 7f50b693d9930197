"""The contract of ``fuselab::linear_activation``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ArgumentError
from fuselab.op import Cost, FusedOp, Gradient, Rewrite
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.activations import spellings
from fuselab.ops._shared.cost import bytes_behind, bytes_of, product_unit
from fuselab.ops._shared.dtypes import FLOATING, cast_operands, check_floating, check_same_dtype
from fuselab.ops._shared.launched import launched
from fuselab.ops._shared.layer_rewrites import layer_rewrites
from fuselab.ops._shared.matrices import check_linear_shapes, empty_output
from fuselab.ops._shared.saved import save_layer
from fuselab.ops.linear_activation import (
    cases,
    cublaslt_launch,
    cuda_launch,
    triton_launch,
    wgmma_launch,
)
from fuselab.ops.linear_activation.configs import SHALLOW_DEPTH
from fuselab.ops.linear_activation.cublaslt_launch import EPILOGUES
from fuselab.ops.linear_activation.reference import gradient, reference


def validate(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    activation_named(activation)
    check_floating("linear_activation", input=input)
    check_same_dtype("linear_activation", input=input, weight=weight, bias=bias)
    check_linear_shapes("linear_activation", input, weight, bias)


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    _, input, weight, *_ = saved
    return (
        input.new_empty(input.shape) if needs[0] else None,
        weight.new_empty(weight.shape) if needs[1] else None,
        weight.new_empty(weight.shape[:1]) if needs[2] else None,
    )


def cost(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Cost:
    """Return the least traffic, operands read once and the output written once, and the product's
    arithmetic.

    A shallow product is limited by writing its output: 65536x13->512 in bfloat16 moves 69 MB,
    nearly all of it output, which takes 16 us on an H200. A deep one is limited by arithmetic.
    65536x512->256 needs about as long for either, 24 and 22 us. ``wgmma`` takes 36 to 38 us for it
    and a copy of the same bytes 30.7 us, so the kernel runs at about 81 % of the copy's rate.
    Experiments ruled out reads from L2, the rates of memory and matrix units, and the epilogue as
    the reason for the difference; it has not been found.
    """
    rows, columns = input.shape[:-1].numel(), weight.shape[0]
    return Cost(
        bytes_behind(input, weight, bias),
        rows * columns * input.element_size(),
        2 * rows * columns * input.shape[-1],
        product_unit(input.dtype),
    )


def cost_backward(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Cost:
    """Return the least traffic: upstream gradient, saved tensors and operands read once, gradients
    written once. There are two products, three if the pre-activation is computed again."""
    rows, columns = input.shape[:-1].numel(), weight.shape[0]
    derivative_of = activation_named(activation).derivative_of
    upstream = rows * columns * input.element_size()
    products = 3 if derivative_of == "preactivation" else 2
    return Cost(
        upstream * (2 if derivative_of == "output" else 1) + bytes_behind(input, weight),
        bytes_of(input, weight, bias),
        2 * products * rows * columns * input.shape[-1],
        product_unit(input.dtype),
    )


_LIBRARY_DEPTH = 2048  # from this depth on cuBLASLt's products are as fast as ours or faster
# Of so few rows wgmma's tiles leave most multiprocessors idle, and cuBLASLt splits the depth:
# 8x2048->3544 with gelu takes 13.0 us for 17.2 (bfloat16, H200), and at a depth of 1024 as long.
_FEW_ROWS = 128
# Up to this width Triton's shallow kernel wins: 1004157x16->8 with tanh takes 34.5 us for 67.3, and
# ->32 45.8 for 67.8 (float16, H200); 262144x13->64 with relu takes either 18 us.
_FEW_COLUMNS = 32


def prefer(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Sequence[str]:
    """Return the implementations in the order in which ``auto`` tries them.

    On a GPU and for K up to 32: Triton in float32, for up to 32 columns, and at K = 32, where the
    CUDA kernel has bank conflicts, else CUDA C++. For larger K: wgmma, then cuBLASLt where wgmma
    cannot run; cuBLASLt first from K = 2048 on for up to 128 rows and for the activations that it
    has; the reference if K is above 400 and gelu, gelu_tanh or silu need a gradient. On a CPU the
    reference, because the product is nearly all of the time.

    If gelu, gelu_tanh or silu need a gradient, the backward computes the product again. By
    arithmetic (700 TFLOP/s, 4.2 TB/s, not timed) that takes longer than eager's two more passes
    over the output from a depth of about 400 on, so the reference is used there.
    """
    if not input.is_cuda:
        return ("reference",)
    depth = input.shape[-1]
    if depth <= SHALLOW_DEPTH:
        is_narrow = weight.shape[0] <= _FEW_COLUMNS
        triton_first = input.dtype == torch.float32 or depth == 32 or is_narrow
        return ("triton", "cuda", "cublaslt") if triton_first else ("cuda", "triton", "cublaslt")
    wants_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (input, weight, bias)
    )
    recomputes = activation_named(activation).derivative_of == "preactivation"
    if wants_gradient and depth > 400 and recomputes:
        return ("reference",)
    in_epilogue = activation == "identity" or (bias is not None and activation in EPILOGUES)
    has_few_rows = input.shape[:-1].numel() <= _FEW_ROWS
    if (in_epilogue or has_few_rows) and depth >= _LIBRARY_DEPTH:
        return ("cublaslt",)
    return ("wgmma", "cublaslt")


def prefer_backward(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor | None, input: Tensor, *saved: Any
) -> Sequence[str]:
    """Return Triton first up to a depth of 32, because CUDA's backward has one launch more
    (65536x13 -> 512 with the forward on an H200: 194 us for 234). Deeper products are the
    library's, after one pass of our activation's gradient."""
    if not input.is_cuda:
        return ("reference",)
    return ("triton", "cuda") if input.shape[-1] <= SHALLOW_DEPTH else ("cublaslt",)


def addmm_activation(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "relu"
) -> Tensor:
    """Compute the layer by cuBLASLt's epilogue, for relu or gelu_tanh; the benchmark's peer."""
    if bias is None or activation not in EPILOGUES:
        raise ArgumentError("torch._addmm_activation needs a bias, and relu or gelu_tanh.")
    rows = input.flatten(0, -2) if input.dim() > 1 else input[None]
    output = torch._addmm_activation(bias, rows, weight.t(), use_gelu=EPILOGUES[activation])
    return output.view(*input.shape[:-1], weight.shape[0])


def _rewrites() -> Iterator[Rewrite]:
    """Yield a rewrite for every spelling of every activation after a linear layer. Identity has
    none: it is one call already."""
    for spelling, name in spellings():
        yield from layer_rewrites(spelling, name)


OP = FusedOp(
    name="fuselab::linear_activation",
    reference=reference,
    implementations={
        "triton": launched("cuda", triton_launch),
        "cuda": launched("cuda", cuda_launch),
        "wgmma": launched("cuda", wgmma_launch),
        "cublaslt": launched("cuda", cublaslt_launch),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(save_layer, gradient, fake_gradient, prefer_backward),
    draw=cases.draw,
    validate=validate,
    fake=empty_output,
    prefer=prefer,
    rewrites=tuple(_rewrites()),
    peers={"addmm_activation": addmm_activation},
    autocast=cast_operands,
    dtypes=FLOATING,
    configs={
        "triton": triton_launch.configs,
        "triton_backward": triton_launch.configs_backward,
        "cuda": cuda_launch.configs,
        "wgmma": wgmma_launch.configs,
    },
)
