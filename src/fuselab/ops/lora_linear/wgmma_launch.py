"""The forward on Hopper's matrix unit: S = scale x Aᵀ, then x Wᵀ + S Bᵀ as one product by
linear_activation's kernel, of which S and B are one step of 64 more in depth.

Such a step is 1/64 of the product at K = 4096 and 1/8 at 512. ``scale`` goes into S before that is
rounded: the sum has no other place for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops.activations import ACTIVATIONS
from fuselab.ops.linear_activation import wgmma_launch as wgmma
from fuselab.ops.linear_activation.product import as_rows, empty_output
from fuselab.ops.linear_activation.tiles import sizes
from fuselab.ops.lora_linear import launch, tiles
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.tensor_map import why_not
from fuselab.runtime.tuning import Config, chosen

WGMMA = CudaSource(Path(__file__).with_name("wgmma_kernels.cu"), architectures=("sm_90a",))
MOST_RANK = 64  # of one step


def configs(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    activation: str,
) -> Sequence[Config]:
    """linear_activation's tiles; none where the copy engine cannot read an operand, or for float16,
    in which scale x Aᵀ may leave the range that x Aᵀ is in."""
    rows = input.shape[:-1].numel()
    fits = (
        input.dtype == torch.bfloat16
        and lora_b.shape[1] <= MOST_RANK
        and lora_b.shape[1] % 8 == 0  # S is row-major
        and rows * weight.shape[0] > 0
        and wgmma.supports(input, weight, bias, activation) is None
        and why_not(lora_b) is None
    )
    return wgmma.candidates(rows, weight.shape[0], multiprocessors(input.device)) if fits else ()


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    activation: str,
) -> Tensor:
    """Two launches, S in the workspace; ``launch.fused_forward`` where there is no tile."""
    args = (input, weight, bias, lora_a, lora_b, scale, activation)
    candidates = configs(*args)
    if not candidates:
        return launch.fused_forward(*args)
    x, output = as_rows(input), empty_output(input, weight)
    config = chosen(tiles.OP_NAME, "cuda", (x.dtype, *sizes(x, weight)), candidates)
    pairs = ((x, weight), (launch.project(x, lora_a, scale), lora_b))
    wgmma.multiply(WGMMA, "adapt", pairs, bias, as_rows(output), activation, config)
    return output


CUDA_EXPRESSIONS = tuple(
    wgmma._expression(entry.functor, "__nv_bfloat16", config, bulk, "adapt")
    for entry, config, bulk in zip(
        ACTIVATIONS.values(), wgmma._CONFIGS, 4 * (True, False), strict=False
    )
)
