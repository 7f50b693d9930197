"""Launchers of the large products on Hopper's matrix unit, by the kernel of linear_activation.

They are x Wᵀ + S Bᵀ in the forward, with S = scale x Aᵀ, and dZ W + dS A in the backward. The
update is one more step of 64 in depth: 1/64 of the product at K = 4096, and 1/8 at 512. ``scale``
is multiplied into S before S is rounded, because the kernel has no other place for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.hopper import is_hopper
from fuselab.ops._shared.matrices import as_rows, empty_output
from fuselab.ops.linear_activation import wgmma_launch as wgmma
from fuselab.ops.lora_linear import triton_launch
from fuselab.ops.lora_linear.operands import Layer
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.tensor_map import why_not
from fuselab.runtime.tuning import Config

WGMMA = CudaSource(Path(__file__).with_name("wgmma_kernels.cu"), architectures=("sm_90a",))

# Tiles of 128 x 256, as deep a ring as fits, and weights shared by two blocks: clusters of 2 were
# the fastest on an H200, except for 4096 x 1024 -> 1024 (27.6 us for 27.1).
OP_NAME = "fuselab::lora_linear"
ROWS, TILE = 128, Config(columns=256, stages=4, cluster=2)


def takes(input: Tensor, layer: Layer) -> bool:
    """Return whether ``forward`` runs on wgmma. It does not if TMA cannot read an operand, nor in
    float16, where scale x Aᵀ may overflow although x Aᵀ does not."""
    weight, bias, _, lora_b, _, activation = layer
    return (
        input.dtype == torch.bfloat16
        and lora_b.shape[1] % 8 == 0  # S is row-major
        and input.shape[:-1].numel() * weight.shape[0] > 0
        and wgmma.supports(input, weight, bias, activation) is None
        and why_not(lora_b) is None
    )


def forward(input: Tensor, *arguments: Any) -> Tensor:
    """Compute the output in two launches, for a rank up to 64, with S in the workspace; where
    ``takes`` is False, by Triton's product."""
    layer = Layer(*arguments)
    if not takes(input, layer):
        return triton_launch.forward(input, *layer)
    weight, bias, lora_a, lora_b, scale, activation = layer
    x, output = as_rows(input), empty_output(input, weight)
    pairs = ((x, weight), (triton_launch.project(x, lora_a, scale), lora_b))
    wgmma.multiply(WGMMA, "adapt", pairs, bias, as_rows(output), activation, TILE)
    return output


def pulls(weight: Tensor, lora_a: Tensor) -> bool:
    """Return whether ``pull_through`` takes this layer, of 16 bits and a rank up to 64."""
    return (
        is_hopper(weight.device)
        and lora_a.shape[0] % 8 == 0  # dS is row-major
        and why_not(weight) is None
        and why_not(lora_a) is None
    )


def pull_through(grad: Tensor, weight: Tensor, grad_projection: Tensor, lora_a: Tensor) -> Tensor:
    """Compute grad W + grad_projection A in one launch: (rows, N) and (rows, r) to (rows, K)."""
    output = grad.new_empty((grad.shape[0], weight.shape[1]))
    pairs = ((grad, weight), (grad_projection, lora_a))
    wgmma.multiply(WGMMA, "pull_through", pairs, None, output, "identity", TILE, across=True)
    return output


CUDA_EXPRESSIONS = (
    *(
        wgmma._expression(entry.functor, "__nv_bfloat16", TILE, True, "adapt")
        for entry in ACTIVATIONS.values()
    ),
    wgmma._expression("Relu", "__nv_bfloat16", TILE, False, "adapt"),
    *(
        wgmma._expression("Identity", element, TILE, True, "pull_through")
        for element in ("__half", "__nv_bfloat16")
    ),
)
