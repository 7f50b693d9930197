"""Launching the CUDA C++ kernel of all layers, and choosing its tile."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.activations import ACTIVATIONS
from fuselab.ops.activations import activation as activation_named
from fuselab.ops.linear_activation.product import as_rows
from fuselab.runtime.cuda_source import CudaSource, i64
from fuselab.runtime.gpu_limits import multiprocessors, shared_bytes
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.parameters import Struct
from fuselab.runtime.tuning import Config, chosen

NAME = "fuselab::mlp"
CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
TYPES = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
}

_THREADS, MOST_LAYERS = 256, 16  # as in cuda_kernels.cu


def row_strides(depths: Sequence[int]) -> tuple[int, int]:
    """Elements from row to row of the buffers that even and odd layers read."""

    def stride(widest: int) -> int:
        return ceil_div(widest, 64) * 64 + 32

    return stride(max(depths[::2])), stride(max(depths[1::2], default=0))


@lru_cache(maxsize=1024)
def candidates(
    rows: int,
    widths: tuple[int, ...],
    multiprocessor_count: int,
    most_shared_bytes: int,
    has_clusters: bool,
) -> Sequence[Config]:
    """What tuning may choose from: ``rows`` of a cluster of ``cluster`` blocks and the ``columns``
    of a warp's product; the least estimated time first, none where no tile fits.

    The estimate is fitted to DLRM's prediction layers of 128 and 2048 samples on an H200 (``bench
    --tune``, 2026-11-21, cold L2): a launch takes 5 us; then, of 16 rows, a layer 2.25 us and a
    block's share of the weights 40 us per million, of 32 rows half as much again, of 64 rows 2.5
    times that. Of 16 rows an SM holds two blocks, which take a quarter longer together.
    Microseconds estimated (measured) of 128 samples: 16 rows in clusters of 8 13.4 (13.8), of 4
    15.0 (15.5), one block 24.5 (23.5); of 2048: 16 rows in clusters of 2 21.4 (22.3), 32 rows in
    clusters of 2 24.7 (25.3), 16 rows in one block 24.5 (25.9), in clusters of 8 47 (57).
    """
    per_row = 2 * sum(row_strides(widths[:-1]))
    weight_elements = sum(depth * columns for depth, columns in pairwise(widths))

    def estimated_us(config: Config) -> float:
        blocks = ceil_div(rows, config.rows) * config.cluster
        block = 2.25 * (len(widths) - 1) + 40e-6 * weight_elements / config.cluster
        block *= (config.rows + 16) / 32
        if blocks <= multiprocessor_count:
            return 5 + block
        if config.rows > 16 or 2 * config.rows * per_row > most_shared_bytes:
            return 5 + ceil_div(blocks, multiprocessor_count) * block
        return 5 + ceil_div(blocks, 2 * multiprocessor_count) * 1.25 * block

    found = [
        Config(rows=tile, cluster=cluster, columns=8 if cluster >= 4 else 16)
        for cluster in ((1, 2, 4, 8) if has_clusters else (1,))
        for tile in (16, 32, 64)
        if tile * per_row <= most_shared_bytes
    ]
    return tuple(sorted(found, key=lambda config: (estimated_us(config), config.rows)))


@cache
def _has_clusters(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _candidates(input: Tensor, weights: Sequence[Tensor]) -> Sequence[Config]:
    return candidates(
        input.shape[:-1].numel(),
        (weights[0].shape[1], *(weight.shape[0] for weight in weights)),
        multiprocessors(input.device),
        shared_bytes(input.device),
        _has_clusters(input.device),
    )


def configs(input: Tensor, weights: Sequence[Tensor], *rest: Any) -> Sequence[Config]:
    """``candidates`` for these arguments."""
    return _candidates(input, weights)


def supports(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *rest: Any
) -> str | None:
    if not weights or any(weight.dim() != 2 for weight in weights):
        return None  # which `validate` refuses
    if any(weight.dtype not in (torch.float16, torch.bfloat16) for weight in weights):
        return "its weights are of 16 bits"
    if len(weights) > MOST_LAYERS:
        return f"it takes up to {MOST_LAYERS} layers"
    if any(weight.numel() == 0 for weight in weights):
        return "a layer has no weights"
    if any(weight.shape[1] > 1 and weight.stride(1) != 1 for weight in weights):
        return "a row of a weight is not contiguous"
    if any(bias.dim() == 1 and bias.numel() > 1 and bias.stride(0) != 1 for bias in biases):
        return "a bias is not contiguous"
    if not _candidates(input, weights):
        return "16 rows of the widest layers are more than its shared memory"
    return None


def forward(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    output_activation: str,
    dtype: torch.dtype | None,
    config: Config | None = None,
) -> Tensor:
    """One launch; ``config`` replaces the tuned or default tile."""
    own = weights[0].dtype
    shape = (*input.shape[:-1], weights[-1].shape[0])
    output = input.new_empty(shape, dtype=dtype or own)
    if output.numel() == 0:
        return output
    x = as_rows(input)
    depths = [weight.shape[1] for weight in weights]
    key = (own, x.shape[0], *depths, weights[-1].shape[0])
    config = config or chosen(NAME, "cuda", key, _candidates(input, weights))
    expression = _expression(
        activation_named(activation).functor,
        activation_named(output_activation).functor,
        (own, input.dtype, output.dtype),
        config,
    )
    clusters = ceil_div(x.shape[0], config.rows)
    CUDA.launch(
        expression,
        (clusters * config.cluster, 1, 1),
        (_THREADS, 1, 1),
        (x, output, i64(x.shape[0]), *map(i64, x.stride()), _network(weights, biases)),
        config.rows * 2 * sum(row_strides(depths)),
    )
    return output


def _network(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Struct:
    """``Network`` of cuda_kernels.cu."""
    layers = [
        struct.pack(
            "QQqii",
            weight.data_ptr(),
            biases[place].data_ptr() if biases else 0,
            weight.stride(0),
            *(weight.shape[1], weight.shape[0]),
        )
        for place, weight in enumerate(weights)
    ]
    nothing = bytes(len(layers[0]) * (MOST_LAYERS - len(layers)))
    strides = row_strides([weight.shape[1] for weight in weights])
    return Struct(b"".join(layers) + nothing + struct.pack("4i", len(layers), *strides, 0))


def _expression(
    hidden: str,
    last: str,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    config: Config,
) -> str:
    """``dtypes`` of the weights, the input and the output."""
    types = ", ".join(TYPES[dtype] for dtype in dtypes)
    tile = f"{config.rows // 16}, {config.columns // 8}, {config.cluster}"
    return f"forward<{hidden}, {last}, {types}, {tile}>"


def _representative_expressions() -> tuple[str, ...]:
    """Every activation, the least and the most of a tile, and all types."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    small = Config(rows=16, cluster=8, columns=8)
    found = [
        _expression(entry.functor, entry.functor, (brain, brain, brain), small)
        for entry in ACTIVATIONS.values()
    ]
    found += [
        _expression("Relu", "Identity", (brain, brain, brain), config)
        for config in (
            Config(rows=16, cluster=1, columns=16),
            Config(rows=64, cluster=1, columns=16),
            Config(rows=32, cluster=2, columns=16),
            Config(rows=64, cluster=8, columns=8),
        )
    ]
    found += [
        _expression("Relu", "Sigmoid", types, small)
        for types in ((half, single, half), (half, half, single), (brain, single, single))
    ]
    return tuple(dict.fromkeys(found))


CUDA_EXPRESSIONS = _representative_expressions()
