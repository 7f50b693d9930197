"""Launching the kernel of Hopper's warpgroup matrix instructions (wgmma), and the gradients beside
it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.dtypes import CUDA_HALF_NAMES
from fuselab.ops._shared.hopper import is_hopper
from fuselab.ops._shared.matrices import as_rows, empty_output
from fuselab.ops.linear_activation import cuda_launch
from fuselab.ops.linear_activation.configs import sizes
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tensor_map import tensor_map, why_not
from fuselab.runtime.tuning import Config, chosen

NAME = "fuselab::linear_activation"
WGMMA = CudaSource(Path(__file__).with_name("wgmma_kernels.cu"), architectures=("sm_90a",))

# As in wgmma_kernels.cu.
_ROWS, _DEPTH, _THREADS = 128, 64, 384
_BOX_COLUMNS = 64  # of a weight that lies as (depth, columns)

# ``columns`` of a tile of 128 rows, ``stages`` of 64 in depth in shared memory, as many as fit: a
# fifth of 256 columns is 48 KB, and 33 are left. 168 registers with every one; gelu alone spills,
# 5 words (NVRTC 13.0). us with 256 columns / 128 / 64 (H200, bfloat16, 2026-11-21): 65536x512->256
# 37.5 / 39.0 / 49.1, 16384x1024->1024 55.1 / 57.9 / 86.8, 4096x4096->4096 188.1 / 198.1 / 337.
_CONFIGS = (
    Config(columns=256, stages=4, cluster=1),
    Config(columns=128, stages=7, cluster=1),
    Config(columns=64, stages=9, cluster=1),
)
# Two blocks that share their weights: 38.4, 56.1 and 187.0 us there. Stores of whole lines of 128
# bytes by way of shared memory, relu in the rounding (392 instructions after a tile's products for
# 915), won nothing: 37.95 us for 37.66, 55.23 for 55.30, 183.5 for 184.0 (2026-11-22).
_PAIR = Config(columns=256, stages=4, cluster=2)


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: the ring, the bias for each of two warp groups, two
    barriers per stage, and up to 1 KB of alignment."""
    ring = config.stages * (_ROWS + config.columns) * _DEPTH * 2
    return int(1024 + ring + 2 * config.columns * 2 + 16 * config.stages)


@lru_cache(maxsize=1024)
def candidates(rows: int, columns: int, multiprocessor_count: int) -> Sequence[Config]:
    """What tuning may choose from; first the widest tile, not wider than it must be, that gives
    every multiprocessor one, else the narrowest."""
    widest = power_of_two(columns, 64, 256)
    fitting = [config for config in (*_CONFIGS, _PAIR) if config.columns <= widest]

    def fills(config: Config) -> bool:
        tiles = ceil_div(rows, _ROWS) * ceil_div(columns, config.columns)
        return tiles >= multiprocessor_count

    first = next(filter(fills, fitting), _CONFIGS[-1])
    return tuple(dict.fromkeys((first, *fitting)))


def configs(input: Tensor, weight: Tensor, *rest: Any) -> Sequence[Config]:
    """``candidates`` for these arguments."""
    rows = input.shape[:-1].numel()
    return candidates(rows, weight.shape[0], multiprocessors(input.device))


@cache
def _clusters_at_a_time(
    source: CudaSource, expression: str, config: Config, device: torch.device
) -> int:
    """How many the device has room for: not all multiprocessors where those of a group of them
    (a GPC) do not divide by the cluster."""
    if config.cluster == 1:
        return multiprocessors(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    size = shared_bytes(config)
    return source.active_clusters(expression, index, _THREADS, size, config.cluster)


def supports(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> str | None:
    if input.dtype not in CUDA_HALF_NAMES:
        return "it takes float16 and bfloat16"
    if input.shape[-1] == 0:
        return "its depth K is 0"
    if not is_hopper(input.device):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    for name, matrix in (("input", as_rows(input)), ("weight", weight)):
        if matrix.numel() and (reason := why_not(matrix)) is not None:
            return f"the copy engine cannot read '{name}': {reason}"
    return None


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    config: Config | None = None,
) -> Tensor:
    """One launch of ``forward``, of as many blocks as run at a time; ``config`` replaces the tuned
    or default one."""
    output = empty_output(input, weight)
    if output.numel() == 0:
        return output
    x = as_rows(input)
    key = (input.dtype, *sizes(x, weight))
    config = config or chosen(NAME, "wgmma", key, configs(input, weight))
    multiply(WGMMA, "forward", ((x, weight),), bias, as_rows(output), activation, config)
    return output


def multiply(
    source: CudaSource,
    kernel: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    bias: Tensor | None,
    output: Tensor,
    activation: str,
    config: Config,
    across: bool = False,
) -> None:
    """act(sum of left rightᵀ over ``pairs`` + bias) into a row-major ``output``, by ``kernel``:
    ``forward`` of one pair, or one of its tiles that takes a second, up to 64 deep. ``across``: the
    kernel's right matrices are transposed, (depth, columns). ``supports`` says which matrices."""
    (rows, columns), depth = output.shape, pairs[0][0].shape[1]
    functor = activation_named(activation).functor
    expression = _expression(
        functor, CUDA_HALF_NAMES[output.dtype], config, columns % 8 == 0, kernel
    )
    tiles = ceil_div(rows, _ROWS * config.cluster) * ceil_div(columns, config.columns)
    at_a_time = _clusters_at_a_time(source, expression, config, output.device)
    clusters = min(tiles, max(1, at_a_time))
    maps = []
    for left, right in pairs:
        maps.append(tensor_map(left, _ROWS, _DEPTH))
        own = config.columns // config.cluster
        maps.append(tensor_map(right, *((_DEPTH, _BOX_COLUMNS) if across else (own, _DEPTH))))
    source.launch(
        expression,
        (clusters * config.cluster, 1, 1),
        (_THREADS, 1, 1),
        (
            *maps,
            *(bias, output, i32(rows), i32(columns), i32(depth)),
            i64(0 if bias is None else bias.stride(0)),
        ),
        shared_bytes(config),
    )


backward = cuda_launch.backward


def _expression(
    functor: str, element: str, config: Config, packed: bool, kernel: str = "forward"
) -> str:
    ring = f"{config.columns}, {config.stages}, {config.cluster}"
    return f"{kernel}<{functor}, {element}, {ring}, {str(packed).lower()}>"


def _representative_expressions() -> tuple[str, ...]:
    """Every activation, and every configuration with both elements and both stores."""
    found = [
        _expression(entry.functor, "__nv_bfloat16", _CONFIGS[0], True)
        for entry in ACTIVATIONS.values()
    ]
    found += [
        _expression("Relu", element, config, packed)
        for element in CUDA_HALF_NAMES.values()
        for config in (*_CONFIGS, _PAIR)
        for packed in (True, False)
    ]
    return tuple(dict.fromkeys(found))


CUDA_EXPRESSIONS = _representative_expressions()
