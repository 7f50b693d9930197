"""The contract of ``fuselab::lora_linear``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ShapeError
from fuselab.op import Cost, FusedOp, Gradient
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.cost import bytes_behind, bytes_of, product_unit
from fuselab.ops._shared.dtypes import FLOATING, cast_operands, check_floating, check_same_dtype
from fuselab.ops._shared.launched import launched
from fuselab.ops._shared.matrices import check_linear_shapes, empty_gradients, empty_output
from fuselab.ops._shared.saved import save_layer
from fuselab.ops.lora_linear import cases, configs, cuda_launch, triton_launch, wgmma_launch
from fuselab.ops.lora_linear.operands import Layer
from fuselab.ops.lora_linear.reference import gradient, in_place, reference
from fuselab.ops.lora_linear.rewrites import rewrites


def validate(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    activation: str,
) -> None:
    """Raise UnknownNameError, DtypeError or ShapeError as the reference's docstring says."""
    activation_named(activation)
    check_floating("lora_linear", input=input)
    check_same_dtype(
        "lora_linear", input=input, weight=weight, bias=bias, lora_a=lora_a, lora_b=lora_b
    )
    check_linear_shapes("lora_linear", input, weight, bias)
    columns, inner = weight.shape
    if lora_a.dim() != 2 or lora_a.shape[1] != inner or lora_a.shape[0] < 1:
        raise ShapeError(
            f"lora_linear: 'lora_a' has shape {tuple(lora_a.shape)}; expected (r, {inner}) with a "
            f"rank r of 1 or more for a 'weight' of shape {tuple(weight.shape)}."
        )
    if lora_b.shape != (columns, lora_a.shape[0]):
        raise ShapeError(
            f"lora_linear: 'lora_b' has shape {tuple(lora_b.shape)}; expected ({columns}, "
            f"{lora_a.shape[0]}): the rows of 'weight' and those of 'lora_a'."
        )


def autocast(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
    """Cast as F.linear under torch.autocast; the scale, which may be a tensor, stays as it is."""
    *tensors, scale, activation = args
    return *cast_operands(autocast_dtype, *tensors), scale, activation


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor | None, input: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    layer = Layer(*saved)
    return empty_gradients(needs, input, None, None, layer.lora_a, layer.lora_b)


def supports(input: Tensor, *rest: Any) -> str | None:
    return "it accumulates in float32" if input.dtype == torch.float64 else None


def supports_backward(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> str | None:
    return supports(grad_output)


# The smallest layers that were measured: 4096 x 1024 -> 1024 has this many products and outputs
# (and inputs); 65536 x 512 -> 512 is the narrowest.
_MEASURED_PRODUCTS, _MEASURED_OUTPUT, _MEASURED_SIDE = 2**32, 2**22, 512


def prefer(input: Tensor, *arguments: Any) -> Sequence[str]:
    """Return the implementations in the order in which ``auto`` tries them. On a GPU our kernels
    are used for 16-bit layers of at least the size of 4096 x 1024 -> 1024, with K and N multiples
    of 16 and a rank up to 32; other layers were not measured and take PyTorch's products. Of ours,
    ``cuda`` is first if K and N are at least 512 and the output is as large as that layer's; it
    takes K and N up to 4096 and ranks up to 16.

    If gelu, gelu_tanh or silu need a gradient, the backward computes the product again. That takes
    longer than our kernel gains, so the reference is used.
    """
    layer = Layer(*arguments)
    wants_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (input, layer.lora_a, layer.lora_b)
    )
    if wants_gradient and activation_named(layer.activation).derivative_of == "preactivation":
        return ("reference",)
    return _order(input, layer.weight, layer.lora_a)


def prefer_backward(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor | None, input: Tensor, *saved: Any
) -> Sequence[str]:
    """Return the same order as ``prefer`` for the layer."""
    weight, _, lora_a, *_ = saved
    return _order(input, weight, lora_a)


def _order(input: Tensor, weight: Tensor, lora_a: Tensor) -> Sequence[str]:
    # This runs before the shapes are validated.
    rows = input.shape[:-1].numel()
    if not (
        input.is_cuda
        and input.element_size() == 2
        and rows * weight.numel() >= _MEASURED_PRODUCTS
        and lora_a.shape[:1].numel() <= configs.FUSED_RANK
        and all(size % 16 == 0 for size in weight.shape)
    ):
        return ("reference",)
    side = min(weight.shape)
    wide = side >= _MEASURED_SIDE and rows * side >= _MEASURED_OUTPUT
    return ("cuda", "triton") if wide else ("triton",)


def cost(input: Tensor, *arguments: Any) -> Cost:
    """Return the least traffic: operands read once, the output written once. S is neither."""
    weight, bias, lora_a, lora_b, _, activation = Layer(*arguments)
    rows, rank = input.shape[:-1].numel(), lora_a.shape[0]
    columns, inner = weight.shape
    operands = (input, weight, bias, lora_a, lora_b)
    products = 2 * rows * (columns * inner + rank * (columns + inner))
    pointwise = rows * columns * (2 + (bias is not None) + activation_named(activation).flops)
    return Cost(
        bytes_behind(*operands),
        rows * columns * input.element_size(),
        products + pointwise,
        product_unit(input.dtype),
    )


def cost_backward(input: Tensor, *arguments: Any) -> Cost:
    """Return the least traffic: upstream gradient, output and operands read once, three gradients
    written once. The products are dY W, dS A, dY B, dYᵀ S, dSᵀ x, and x Aᵀ again."""
    weight, _, lora_a, lora_b, _, activation = Layer(*arguments)
    rows, rank = input.shape[:-1].numel(), lora_a.shape[0]
    columns, inner = weight.shape
    derivative_of = activation_named(activation).derivative_of
    read = rows * columns * input.element_size() * (1 + (derivative_of == "output"))
    read += bytes_behind(input, weight, lora_a, lora_b)
    written = bytes_of(input, lora_a, lora_b)
    products = 2 * rows * (columns * inner + rank * (2 * columns + 3 * inner))
    if derivative_of == "preactivation":
        products += 2 * rows * columns * (inner + rank)
    pointwise = rows * columns * (1 + activation_named(activation).flops)
    return Cost(read, written, products + pointwise, product_unit(input.dtype))


_INSTEAD = "detach it, or spell the layer in plain PyTorch to train it"

OP = FusedOp(
    name=wgmma_launch.OP_NAME,
    reference=reference,
    implementations={
        "triton": launched(
            "cuda", triton_launch, supports=supports, supports_backward=supports_backward
        ),
        # Hopper's matrix unit for the products, and one pass for all other gradients.
        "cuda": launched("cuda", cuda_launch, forward=wgmma_launch.forward),
    },
    configs={"cuda_backward": cuda_launch.configs},
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(
        save_layer,
        gradient,
        fake_gradient,
        prefer=prefer_backward,
        frozen={"weight": _INSTEAD, "bias": _INSTEAD},
    ),
    draw=cases.draw,
    space=cases.space,
    validate=validate,
    fake=empty_output,
    prefer=prefer,
    rewrites=tuple(rewrites()),
    autocast=autocast,
    peers={"in_place": in_place},
    dtypes=FLOATING[:3],  # float64 is the reference's own
)
