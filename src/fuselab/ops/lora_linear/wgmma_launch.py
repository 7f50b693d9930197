"""The large products on Hopper's matrix unit, by linear_activation's kernel: x Wᵀ + S Bᵀ of the
forward, S = scale x Aᵀ, and dZ W + dS A of the backward, with the update as one step of 64 more in
depth.

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


# A cluster shares the boxes of 64 columns that a right operand across is copied in.
PULL_TILES = tuple(
    config
    for config in wgmma._CONFIGS
    if config.columns >= 128 and config.columns % (64 * config.cluster) == 0
)


def pulls(weight: Tensor, lora_a: Tensor) -> bool:
    """Whether ``pull_through`` takes such a layer, of 16 bits and a GPU with clusters."""
    return (
        wgmma.is_hopper(weight.device)
        and lora_a.shape[0] <= MOST_RANK
        and lora_a.shape[0] % 8 == 0  # dS is row-major
        and why_not(weight) is None
        and why_not(lora_a) is None
    )


def pull_through(
    grad: Tensor, weight: Tensor, grad_projection: Tensor, lora_a: Tensor, config: Config
) -> Tensor:
    """grad W + grad_projection A in one launch: (rows, N) and (rows, r) to (rows, K)."""
    output = grad.new_empty((grad.shape[0], weight.shape[1]))
    pairs = ((grad, weight), (grad_projection, lora_a))
    wgmma.multiply(WGMMA, "pull_through", pairs, None, output, "identity", config, across=True)
    return output


CUDA_EXPRESSIONS = (
    *(
        wgmma._expression(entry.functor, "__nv_bfloat16", config, bulk, "adapt")
        for entry, config, bulk in zip(
            ACTIVATIONS.values(), wgmma._CONFIGS, 4 * (True, False), strict=False
        )
    ),
    *(
        wgmma._expression("Identity", element, config, True, "pull_through")
        for element, config in zip(2 * ("__half", "__nv_bfloat16"), PULL_TILES, strict=False)
    ),
)
