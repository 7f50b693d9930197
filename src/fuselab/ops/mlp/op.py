"""The contract of ``fuselab::mlp``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import DtypeError, OperandError, ShapeError
from fuselab.op import Cost, FusedOp, Gradient, Implementation, tensors_in
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.cost import bytes_behind, product_unit
from fuselab.ops._shared.dtypes import FLOATING, cast_operands, check_floating
from fuselab.ops._shared.launched import launched
from fuselab.ops._shared.matrices import empty_gradients
from fuselab.ops._shared.saved import save_arguments
from fuselab.ops.mlp import cases, cuda_launch, layers_launch
from fuselab.ops.mlp.reference import gradient, names_of, reference


def _check_layers(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
    """Raise OperandError or ShapeError for bad counts or shapes."""
    if not weights:
        raise OperandError("mlp: 'weights' is empty; expected one weight or more.")
    if biases and len(biases) != len(weights):
        raise OperandError(
            f"mlp: 'biases' has {len(biases)} tensors; expected one for each of the "
            f"{len(weights)} 'weights', or none at all."
        )
    if input.dim() == 0:
        raise ShapeError("mlp: 'input' has no dimension; expected (..., K).")
    depth, of = input.shape[-1], f"the last dimension of 'input' {tuple(input.shape)}"
    for place, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[1] != depth:
            raise ShapeError(
                f"mlp: 'weights[{place}]' has shape {tuple(weight.shape)}; expected (N, {depth}), "
                f"{of}."
            )
        if biases and biases[place].shape != weight.shape[:1]:
            raise ShapeError(
                f"mlp: 'biases[{place}]' has shape {tuple(biases[place].shape)}; expected "
                f"({weight.shape[0]},), the first dimension of 'weights[{place}]'."
            )
        depth, of = weight.shape[0], f"the first dimension of 'weights[{place}]'"


def validate(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    output_activation: str,
    dtype: torch.dtype | None,
) -> None:
    activation_named(activation)
    activation_named(output_activation)
    _check_layers(input, weights, biases)
    own = weights[0].dtype
    check_floating("mlp", **{"weights[0]": own})
    for name, tensors in (("weights", weights), ("biases", biases)):
        for place, tensor in enumerate(tensors):
            if tensor.dtype != own:
                raise DtypeError(
                    f"mlp: '{name}[{place}]' is {tensor.dtype} and 'weights[0]' {own}; cast one, "
                    "or use torch.autocast."
                )
    if input.dtype != own and not (input.dtype == torch.float32 and own.itemsize == 2):
        raise DtypeError(
            f"mlp: 'input' is {input.dtype} and 'weights[0]' {own}; expected the same, or float32 "
            "beside weights of 16 bits."
        )
    if dtype not in (None, own) and not (dtype == torch.float32 and own.itemsize == 2):
        raise DtypeError(
            f"mlp: 'dtype' is {dtype}; expected None, {own} as the weights, or float32 where they "
            "are of 16 bits."
        )


def fake(input: Tensor, weights: Sequence[Tensor], *rest: Any) -> Tensor:
    return cuda_launch.empty_output(input, weights, rest[-1])


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    return empty_gradients(needs, *tensors_in(saved))


# One launch is faster than the chain up to this many rows of DLRM's layers in bfloat16 on an H200
# (2048 rows: 18.8 us for 19.9); from 4096 rows on a single layer fills the GPU.
MOST_ROWS = 2048
_MOST_WEIGHTS = 1 << 19


def prefer(input: Tensor, weights: Sequence[Tensor], *rest: Any) -> Sequence[str]:
    """Return one launch first for few rows and weights, else the chain; the reference on a CPU.
    Every tile of rows reads all weights, so rows times weights is what one launch reads. The limit
    is 2048 rows of DLRM's layers (0.32 million weights, and half as many again) or fewer rows of
    larger layers; other layers were not timed."""
    if not input.is_cuda:
        return ("reference",)
    rows, elements = input.shape[:-1].numel(), sum(weight.numel() for weight in weights)
    few = rows <= MOST_ROWS and rows * elements <= MOST_ROWS * _MOST_WEIGHTS
    return ("cuda", "layers") if few else ("layers",)


def cost(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *rest: Any) -> Cost:
    """Return the least traffic, input and weights read once and the output written once; hidden
    activations are neither.

    DLRM's prediction layers (368-512-256-1, bfloat16) have 0.64 MB of weights and 0.64 MFLOP per
    sample: 2048 samples are 2.2 MB and 1.3 GFLOP, about 2 us on an H200. What a fused kernel saves
    is the launches, and waiting for memory once per layer.
    """
    activation, output_activation, dtype = rest
    rows, own = input.shape[:-1].numel(), weights[0].dtype
    output_bytes = weights[-1].shape[0] * (dtype or own).itemsize
    names = names_of(weights, activation, output_activation)
    pointwise = sum(
        weight.shape[0] * (activation_named(name).flops + bool(biases))
        for weight, name in zip(weights, names, strict=True)
    )
    products = 2 * sum(weight.numel() for weight in weights)
    return Cost(
        bytes_behind(input, *weights, *biases),
        rows * output_bytes,
        rows * (products + pointwise),
        product_unit(own),
    )


def cost_backward(input: Tensor, weights: Sequence[Tensor], *rest: Any) -> Cost:
    """Return the least traffic: upstream gradient, input and weights read once, every gradient
    written once. The layers are computed once more, and two products for each."""
    forward, operands = cost(input, weights, *rest), bytes_behind(input, *weights)
    written = operands + bytes_behind(*rest[0])
    return Cost(forward.bytes_written + operands, written, 3 * forward.flops, forward.unit)


OP = FusedOp(
    name="fuselab::mlp",
    reference=reference,
    implementations={
        "cuda": launched("cuda", cuda_launch),
        "layers": Implementation("cuda", layers_launch.forward),
        "triton": Implementation(
            "cuda", layers_launch.forward_triton, supports=layers_launch.supports_triton
        ),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    # No hidden activation is kept.
    gradient=Gradient(save_arguments, gradient, fake_gradient),
    draw=cases.draw,
    validate=validate,
    fake=fake,
    prefer=prefer,
    autocast=cast_operands,
    dtypes=FLOATING,
    configs={"cuda": cuda_launch.configs},
)
