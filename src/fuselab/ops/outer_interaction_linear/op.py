"""The contract of ``fuselab::outer_interaction_linear``."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from fuselab.errors import ShapeError
from fuselab.op import Cost, FusedOp, Gradient, Implementation
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.cost import bytes_behind, bytes_of, product_unit
from fuselab.ops._shared.dense_and_embeddings import autocast, check_shapes
from fuselab.ops._shared.dtypes import check_floating, check_same_dtype
from fuselab.ops._shared.launched import launched
from fuselab.ops._shared.matrices import empty_output
from fuselab.ops._shared.saved import empty_like_saved, of_saved
from fuselab.ops.outer_interaction_linear import (
    cases,
    cpu_launch,
    cublas_launch,
    triton_launch,
    wgmma_launch,
)
from fuselab.ops.outer_interaction_linear.reference import gradient, reference
from fuselab.ops.outer_interaction_linear.rewrites import rewrites


def validate(
    dense: Tensor, embeddings: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> None:
    activation_named(activation)
    check_shapes("outer_interaction_linear", dense, embeddings)
    elements = (embeddings.shape[1] + 1) * dense.shape[1]
    if weight.dim() != 2 or weight.shape[1] != elements**2:
        raise ShapeError(
            f"outer_interaction_linear: 'weight' has shape {tuple(weight.shape)}; expected "
            f"(outputs, {elements**2}), the square of a sample's {elements} elements."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"outer_interaction_linear: 'bias' has shape {tuple(bias.shape)}; expected "
            f"({weight.shape[0]},), a number per row of 'weight'."
        )
    operands = {"dense": dense, "embeddings": embeddings, "weight": weight, "bias": bias}
    check_floating("outer_interaction_linear", **operands)
    check_same_dtype("outer_interaction_linear", **operands)


def fake(dense: Tensor, embeddings: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return empty_output(dense, weight)


def save(output: Tensor, *args: Any) -> tuple[Any, ...]:
    """Save the arguments, and the output if the activation's derivative is a function of it."""
    from_output = activation_named(args[-1]).derivative_of == "output"
    return output if from_output else None, *args


def prefer(dense: Tensor, embeddings: Tensor, weight: Tensor, *rest: Any) -> Sequence[str]:
    """Return the implementations in the order in which ``auto`` tries them on a GPU. In 16 bits
    ``wgmma`` and ``triton`` take a third of the reference's time on an H200. float32 takes
    ``cublas`` from as many samples on as make it no slower than the reference, 276 at 26 x 16 ->
    512, and the reference below. On a CPU measured times decide."""
    return _order(dense, embeddings, weight)


def regime(dense: Tensor, *rest: Any) -> str:
    """Return a class of batches. What the C++ kernels save grows with the samples, while the bytes
    that are moved are mostly the weight's."""
    samples = dense.shape[0]
    return "to 24 samples" if samples <= 24 else "to 160" if samples <= 160 else "more"


def prefer_backward(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor | None, *arguments: Any
) -> Sequence[str]:
    return _order(*arguments[:3]) if grad_output.is_cuda else ("cpp",)


def _order(dense: Tensor, embeddings: Tensor, weight: Tensor) -> Sequence[str]:
    if not dense.is_cuda or (dense.dim(), embeddings.dim(), weight.dim()) != (2, 3, 2):
        return ("reference",)
    if dense.element_size() == 2:
        return ("wgmma", "triton", "reference")
    elements = dense.shape[1] + embeddings.shape[1] * embeddings.shape[2]
    pays = cublas_launch.pays(dense.shape[0], elements, weight.shape[0])
    return ("cublas", "reference") if pays else ("reference",)


def cost(
    dense: Tensor, embeddings: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Cost:
    """Return the least traffic, every input read once and the output written once, and the
    arithmetic: K (K + 1) / 2 different products per sample, each multiplied into N sums.

    ``wgmma`` takes 462 us forward and 931 us backward for 2048 x 26 x 16 -> 512 in bfloat16 on an
    H200; at the library's best rate the products would take 254 and 507 us. Folding the weight, 84
    us in each, is not overlapped with them, and 3.5 % of the folded weight is zeros.
    """
    batch, elements = dense.shape[0], dense.shape[1] + embeddings.shape[1] * embeddings.shape[2]
    columns = weight.shape[0]
    return Cost(
        bytes_behind(dense, embeddings, weight, bias),
        batch * columns * dense.element_size(),
        batch * columns * (elements * (elements + 1) + activation_named(activation).flops),
        product_unit(dense.dtype),
    )


def cost_backward(*args: Any) -> Cost:
    """Return the least traffic: upstream gradient and inputs read once, gradients written once. The
    products are twice the forward's: for the weight, and for the inputs."""
    forward, gradients = cost(*args), bytes_of(*args[:4])
    read = forward.bytes_read + forward.bytes_written
    return Cost(read, gradients, 2 * forward.flops, forward.unit)


def plain(
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "identity",
) -> Tensor:
    """Compute the outer product by bmm: another spelling that people use, and the peer."""
    row = torch.cat([dense, embeddings.flatten(1)], dim=1)
    outer = torch.bmm(row.unsqueeze(2), row.unsqueeze(1)).flatten(1)
    return activation_named(activation).function(torch.nn.functional.linear(outer, weight, bias))


def _implementation(
    launcher: ModuleType, device: Literal["cuda", "cpu"] = "cuda"
) -> Implementation:
    """Return a launcher's implementation, whose backward takes whatever its forward does."""
    return launched(device, launcher, supports_backward=of_saved(launcher.supports, 1))


OP = FusedOp(
    name="fuselab::outer_interaction_linear",
    reference=reference,
    implementations={
        "triton": _implementation(triton_launch),
        "wgmma": _implementation(wgmma_launch),
        "cublas": _implementation(cublas_launch),
        "cpp": _implementation(cpu_launch, "cpu"),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(save, gradient, empty_like_saved(1, 2, 3, 4), prefer_backward),
    draw=cases.draw,
    space=cases.space,
    validate=validate,
    fake=fake,
    prefer=prefer,
    cpu_cases=cases.CPU_CASES,
    regime=regime,
    rewrites=tuple(rewrites()),
    autocast=autocast,
    peers={"bmm": plain},
    dtypes=(torch.float32, torch.float16, torch.bfloat16),  # float64 runs "cpp" or the reference
)
