"""Launchers of the kernels with Hopper's warpgroup matrix instructions (wgmma)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.dtypes import CUDA_HALF_NAMES
from fuselab.ops._shared.hopper import clusters_at_a_time, is_hopper
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

# These sizes are those of wgmma_kernels.cu.
_ROWS, _DEPTH, _THREADS = 128, 64, 384
_BOX_COLUMNS = 64  # of a box of a weight that is stored as (depth, columns)

# A tile has 128 rows and ``columns`` columns; ``stages`` steps of 64 in depth are in shared memory,
# as many as fit. All take 168 registers; only gelu spills, 5 words (NVRTC 13.0). The wider the tile
# the faster: 65536x512->256 in bfloat16 takes 37.5, 39.0 and 49.1 us on an H200.
_CONFIGS = (
    Config(columns=256, stages=4, cluster=1),
    Config(columns=128, stages=7, cluster=1),
    Config(columns=64, stages=9, cluster=1),
)
# Two blocks that share their weights. That is slightly slower on small products and slightly faster
# on 4096x4096->4096 (187.0 us for 188.1, H200).
_PAIR = Config(columns=256, stages=4, cluster=2)


def shared_bytes(config: Config) -> int:
    """Return a block's dynamic shared memory in bytes: the ring, the bias for each of two warp
    groups, two barriers per stage, and up to 1 KB for alignment."""
    ring = config.stages * (_ROWS + config.columns) * _DEPTH * 2
    return int(1024 + ring + 2 * config.columns * 2 + 16 * config.stages)


@lru_cache(maxsize=1024)
def candidates(rows: int, columns: int, multiprocessor_count: int) -> Sequence[Config]:
    """Return the configurations that tuning may choose from. The first one has tiles no wider than
    the output needs, whose widths add up to the least on the busiest multiprocessor; of several
    such, the widest."""
    widest = power_of_two(columns, 64, 256)
    fitting = [config for config in (*_CONFIGS, _PAIR) if config.columns <= widest]

    def columns_of_the_busiest(config: Config) -> int:
        tiles = ceil_div(rows, _ROWS) * ceil_div(columns, config.columns)
        return int(ceil_div(tiles, multiprocessor_count) * config.columns)

    first = min(fitting, key=columns_of_the_busiest)
    return tuple(dict.fromkeys((first, *fitting)))


def configs(input: Tensor, weight: Tensor, *rest: Any) -> Sequence[Config]:
    """Return ``candidates`` for these arguments."""
    rows = input.shape[:-1].numel()
    return candidates(rows, weight.shape[0], multiprocessors(input.device))


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
    """Launch ``forward`` once, with as many blocks as run at a time. ``config`` replaces the tuned
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
    """Compute act(sum of left rightᵀ over ``pairs`` + bias) into a row-major ``output``.

    ``kernel`` is ``forward``, for one pair, or a kernel on the same tiles that takes a second pair
    with a depth of up to 64. ``across``: the kernel's right matrices are transposed, (depth,
    columns). ``supports`` says which matrices can be read.
    """
    (rows, columns), depth = output.shape, pairs[0][0].shape[1]
    functor = activation_named(activation).functor
    expression = _expression(
        functor, CUDA_HALF_NAMES[output.dtype], config, columns % 8 == 0, kernel
    )
    tiles = ceil_div(rows, _ROWS * config.cluster) * ceil_div(columns, config.columns)
    block = (_THREADS, shared_bytes(config), config.cluster)
    clusters = min(tiles, max(1, clusters_at_a_time(source, expression, *block, output.device)))
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
    """Return the expressions of every activation, and of every configuration with both elements and
    both kinds of store."""
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
