"""The large products on Hopper's matrix unit, by linear_activation's kernel: x Wᵀ + S Bᵀ of the
forward, S = scale x Aᵀ, and dZ W + dS A of the backward, with the update as one step of 64 more in
depth.

Such a step is 1/64 of the product at K = 4096 and 1/8 at 512. ``scale`` goes into S before that is
rounded: the sum has no other place for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.matrices import as_rows, empty_output
from fuselab.ops.linear_activation import wgmma_launch as wgmma
from fuselab.ops.lora_linear import triton_launch
from fuselab.ops.lora_linear.operands import Layer
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.tensor_map import why_not
from fuselab.runtime.tuning import Config

WGMMA = CudaSource(Path(__file__).with_name("wgmma_kernels.cu"), architectures=("sm_90a",))

# 128 x 256, as deep a ring as fits, and weights shared by two blocks. us of the forward with
# clusters of 1 / 2 / 4, all before threads wrote the tile, which made the second 392 (H200,
# bfloat16, 2026-11-21): 8192 x 4096 -> 4096 403 / 395 / 424, 65536 x 512 -> 512 120 / 105 / 109,
# 4096 x 1024 -> 1024 27.1 / 27.6 / 39.3; of 128 columns 423, 111, 27.5 at best.
OP_NAME = "fuselab::lora_linear"
ROWS, TILE = 128, Config(columns=256, stages=4, cluster=2)


def takes(input: Tensor, layer: Layer) -> bool:
    """Whether ``forward`` is of wgmma: not where the copy engine cannot read an operand, nor for
    float16, in which scale x Aᵀ may leave the range that x Aᵀ is in."""
    weight, bias, _, lora_b, _, activation = layer
    return (
        input.dtype == torch.bfloat16
        and lora_b.shape[1] % 8 == 0  # S is row-major
        and input.shape[:-1].numel() * weight.shape[0] > 0
        and wgmma.supports(input, weight, bias, activation) is None
        and why_not(lora_b) is None
    )


def forward(input: Tensor, *arguments: Any) -> Tensor:
    """Two launches, S in the workspace, of a rank up to 64; Triton's product where ``takes`` says
    no."""
    layer = Layer(*arguments)
    if not takes(input, layer):
        return triton_launch.forward(input, *layer)
    weight, bias, lora_a, lora_b, scale, activation = layer
    x, output = as_rows(input), empty_output(input, weight)
    pairs = ((x, weight), (triton_launch.project(x, lora_a, scale), lora_b))
    wgmma.multiply(WGMMA, "adapt", pairs, bias, as_rows(output), activation, TILE)
    return output


def pulls(weight: Tensor, lora_a: Tensor) -> bool:
    """Whether ``pull_through`` takes such a layer, of 16 bits and a rank up to 64."""
    return (
        wgmma.is_hopper(weight.device)
        and lora_a.shape[0] % 8 == 0  # dS is row-major
        and why_not(weight) is None
        and why_not(lora_a) is None
    )


def pull_through(grad: Tensor, weight: Tensor, grad_projection: Tensor, lora_a: Tensor) -> Tensor:
    """grad W + grad_projection A in one launch: (rows, N) and (rows, r) to (rows, K)."""
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
