"""Launching the kernel of Hopper's warpgroup matrix instructions (wgmma), and the gradients beside
it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.activations import ACTIVATIONS
from fuselab.ops.activations import activation as activation_named
from fuselab.ops.linear_activation import cuda_launch
from fuselab.ops.linear_activation.product import as_rows, empty_output
from fuselab.ops.linear_activation.tiles import sizes
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tensor_map import NO_MAP, tensor_map, why_not
from fuselab.runtime.tuning import Config, chosen

NAME = "fuselab::linear_activation"
WGMMA = CudaSource(Path(__file__).with_name("wgmma_kernels.cu"), architectures=("sm_90a",))
TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

# As in wgmma_kernels.cu.
_ROWS, _DEPTH, _THREADS = 128, 64, 384
_CHUNK_ROWS, _CHUNK_COLUMNS = 64, 64

# ``columns`` of a tile of 128 rows, ``stages`` of 64 in depth in shared memory (as many as fit),
# and ``cluster`` blocks that share their weights. 168 registers with every one (NVRTC 13.0); 256
# columns spill 4 to 13 words of gelu, gelu_tanh, silu, sigmoid and tanh, none of the others. Two
# blocks gain nothing here (65536x512->256 40.7 us for 40.8, 4096^3 184 for 186; H200, 2026-11-21);
# lora_linear has a tile of such.
_CONFIGS = (
    Config(columns=256, stages=4, cluster=1),
    Config(columns=128, stages=6, cluster=1),
    Config(columns=64, stages=8, cluster=1),
)
# ``direct``: threads write a tile, not the copy engine, and wait for nothing (relu: 187 registers
# of their 232, 16 stores of 16 bytes). ``ahead``: the next tile's input is asked for, into L2.
# Neither is timed yet; with both L2 may be what is left, of which two blocks need a third less.
_MORE_CONFIGS = (
    Config(columns=256, stages=4, cluster=1, direct=1),
    Config(columns=256, stages=4, cluster=1, direct=1, ahead=1),
    Config(columns=256, stages=4, cluster=2, direct=1),
    Config(columns=256, stages=4, cluster=2, direct=1, ahead=1),
    Config(columns=256, stages=4, cluster=1, ahead=1),
    Config(columns=128, stages=7, cluster=1, direct=1),
    Config(columns=64, stages=9, cluster=1, direct=1),
)
_AHEAD_DEPTH = 512  # a tile's input is then up to 128 KB, those of 132 blocks a third of the L2


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: the ring, two 8 KB chunks on their way out (none where it
    writes directly) and the bias for each of two warp groups, two barriers per stage, and up to 1
    KB of alignment."""
    ring = config.stages * (_ROWS + config.columns) * _DEPTH * 2
    chunks = 0 if config.get("direct") else 4 * _CHUNK_ROWS * _CHUNK_COLUMNS * 2
    return int(1024 + ring + chunks + 2 * config.columns * 2 + 16 * config.stages)


@lru_cache(maxsize=1024)
def candidates(rows: int, columns: int, depth: int, multiprocessor_count: int) -> Sequence[Config]:
    """What tuning may choose from; first the widest tile, not wider than it must be, that gives
    every multiprocessor one, else the narrowest."""
    widest = power_of_two(columns, 64, 256)
    fitting = [config for config in _CONFIGS if config.columns <= widest]
    more = [
        config
        for config in _MORE_CONFIGS
        if config.columns <= widest and (depth <= _AHEAD_DEPTH or not config.get("ahead"))
    ]

    def fills(config: Config) -> bool:
        tiles = ceil_div(rows, _ROWS) * ceil_div(columns, config.columns)
        return tiles >= multiprocessor_count

    first = next(filter(fills, fitting), fitting[-1])
    return tuple(dict.fromkeys((first, *fitting, *more)))


def configs(input: Tensor, weight: Tensor, *rest: Any) -> Sequence[Config]:
    """``candidates`` for these arguments."""
    rows = input.shape[:-1].numel()
    return candidates(rows, *weight.shape, multiprocessors(input.device))


@cache
def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


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
    if input.dtype not in TYPES:
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
    bulk = columns % 8 == 0 and why_not(output) is None
    functor = activation_named(activation).functor
    expression = _expression(functor, TYPES[output.dtype], config, bulk, kernel)
    tiles = ceil_div(rows, _ROWS * config.cluster) * ceil_div(columns, config.columns)
    at_a_time = _clusters_at_a_time(source, expression, config, output.device)
    clusters = min(tiles, max(1, at_a_time))
    maps = []
    for left, right in pairs:
        maps.append(tensor_map(left, _ROWS, _DEPTH))
        own = config.columns // config.cluster
        maps.append(tensor_map(right, *((_DEPTH, _CHUNK_COLUMNS) if across else (own, _DEPTH))))
    source.launch(
        expression,
        (clusters * config.cluster, 1, 1),
        (_THREADS, 1, 1),
        (
            *maps,
            tensor_map(output, _CHUNK_ROWS, _CHUNK_COLUMNS)
            if bulk and not config.get("direct")
            else NO_MAP,
            *(bias, output, i32(rows), i32(columns), i32(depth)),
            i64(0 if bias is None else bias.stride(0)),
        ),
        shared_bytes(config),
    )


backward = cuda_launch.backward


def _expression(
    functor: str, element: str, config: Config, bulk: bool, kernel: str = "forward"
) -> str:
    ring = f"{config.columns}, {config.stages}, {config.cluster}"
    flags = (bool(config.get("direct")), bool(config.get("ahead")), bulk)
    return f"{kernel}<{functor}, {element}, {ring}, {', '.join(map(str, flags)).lower()}>"


def _representative_expressions() -> tuple[str, ...]:
    """Every activation, every configuration, and both elements with both stores."""
    widest, direct = _CONFIGS[0], _MORE_CONFIGS[0]
    found = [
        _expression(entry.functor, "__nv_bfloat16", widest, True) for entry in ACTIVATIONS.values()
    ]
    found += [_expression("Relu", "__nv_bfloat16", config, True) for config in _MORE_CONFIGS]
    found += [_expression("Gelu", "__nv_bfloat16", direct, True)]
    found += [_expression("Relu", "__half", direct, False)]
    found += [
        _expression("Relu", element, config, bulk)
        for element in TYPES.values()
        for config in _CONFIGS
        for bulk in (True, False)
    ]
    return tuple(dict.fromkeys(found))


CUDA_EXPRESSIONS = _representative_expressions()
