"""Launching the wgmma kernel that keeps its part of the weight in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fuselab.ops.activations import ACTIVATIONS
from fuselab.ops.activations import activation as activation_named
from fuselab.ops.linear_activation import cuda_launch, wgmma_launch
from fuselab.ops.linear_activation.product import as_rows, empty_output
from fuselab.ops.linear_activation.tiles import sizes
from fuselab.ops.linear_activation.wgmma_launch import NAME
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.tensor_map import NO_MAP, tensor_map, why_not
from fuselab.runtime.tuning import Config, chosen

RESIDENT = CudaSource(Path(__file__).with_name("resident_kernels.cu"), architectures=("sm_90a",))

# As in resident_kernels.cu and wgmma_kernels.cu.
_ROWS, _DEPTH, _THREADS = 128, 64, 384
_CHUNK = 64  # rows and columns
_WEIGHT_BYTES = 128 * 1024  # of a block

# ``columns`` that a block owns, ``stages`` of 128 x 64 of input on their way, and the blocks of a
# ``cluster``, which share them. At most 165 registers, no spills (NVRTC 13.0).
_CONFIGS = (
    Config(columns=128, stages=5, cluster=2),
    Config(columns=128, stages=5, cluster=1),
    Config(columns=64, stages=5, cluster=1),
    Config(columns=64, stages=5, cluster=2),
    Config(columns=64, stages=5, cluster=4),
)


def _weight_steps(columns: int) -> int:
    """The weight's depth that fits, in 64s."""
    return _WEIGHT_BYTES // (columns * _DEPTH * 2)


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block: ring, weight, an 8 KB chunk on its way out for each of two
    warp groups, the bias, two barriers per stage, one per 64 of the weight's depth and one per
    warp group, and up to 1 KB of alignment."""
    barriers = 8 * (2 * config.stages + _weight_steps(config.columns) + 2)
    ring, chunks = config.stages * _ROWS * _DEPTH * 2, 2 * _CHUNK * _CHUNK * 2
    return int(1024 + ring + _WEIGHT_BYTES + chunks + config.columns * 2 + barriers)


def candidates(columns: int, depth: int) -> Sequence[Config]:
    """What tuning may choose from, none where no block has room for its weight; first the one that
    reads the input least often."""
    fitting = [
        config
        for config in _CONFIGS
        if depth <= _weight_steps(config.columns) * _DEPTH
        and (config.cluster == 1 or columns > config.columns * config.cluster // 2)
    ]
    return sorted(
        fitting,
        key=lambda config: (
            ceil_div(columns, config.columns * config.cluster),
            config.columns * config.cluster,
            config.cluster,
        ),
    )


def configs(input: Tensor, weight: Tensor, *rest: Any) -> Sequence[Config]:
    """``candidates`` for these arguments."""
    return candidates(*weight.shape)


def supports(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> str | None:
    reason = wgmma_launch.supports(input, weight, bias, activation)
    if reason is None and not configs(input, weight):
        return f"its depth K is {weight.shape[1]}; its weights fit shared memory up to 1024"
    return reason


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    config: Config | None = None,
) -> Tensor:
    """One launch of ``resident``, of as many blocks as run at a time; ``config`` replaces the tuned
    or default one."""
    output = empty_output(input, weight)
    if output.numel() == 0:
        return output
    x, result = as_rows(input), as_rows(output)
    (rows, depth), columns = x.shape, weight.shape[0]
    key = (input.dtype, *sizes(x, weight))
    config = config or chosen(NAME, "resident", key, candidates(columns, depth))
    bulk = why_not(result) is None
    functor = activation_named(activation).functor
    expression = _expression(functor, wgmma_launch.TYPES[input.dtype], config, bulk)
    across = ceil_div(columns, config.columns * config.cluster)
    at_a_time = multiprocessors(input.device)
    if config.cluster > 1:
        at_a_time = RESIDENT.active_clusters(
            expression, input.get_device(), _THREADS, shared_bytes(config), config.cluster
        )
    down = min(ceil_div(rows, _ROWS), max(1, at_a_time // across))
    RESIDENT.launch(
        expression,
        (down * across * config.cluster, 1, 1),
        (_THREADS, 1, 1),
        (
            tensor_map(x, _ROWS // config.cluster, _DEPTH),
            tensor_map(weight, config.columns, _DEPTH),
            tensor_map(result, _CHUNK, _CHUNK) if bulk else NO_MAP,
            *(bias, output, i32(rows), i32(columns), i32(depth), i32(across)),
            i64(0 if bias is None else bias.stride(0)),
        ),
        shared_bytes(config),
    )
    return output


backward = cuda_launch.backward


def _expression(functor: str, element: str, config: Config, bulk: bool) -> str:
    ring = f"{config.columns}, {config.stages}, {config.cluster}, {_weight_steps(config.columns)}"
    return f"resident<{functor}, {element}, {ring}, {str(bulk).lower()}>"


def _representative_expressions() -> tuple[str, ...]:
    """Every activation, every configuration, and both elements with both stores."""
    found = [
        _expression(entry.functor, "__nv_bfloat16", _CONFIGS[0], True)
        for entry in ACTIVATIONS.values()
    ]
    found += [
        _expression("Relu", element, config, bulk)
        for element in wgmma_launch.TYPES.values()
        for config in _CONFIGS
        for bulk in (True, False)
    ]
    return tuple(dict.fromkeys(found))


CUDA_EXPRESSIONS = _representative_expressions()
