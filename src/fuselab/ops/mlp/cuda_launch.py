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

# As in cuda_kernels.cu; the barriers are its other shared memory.
_THREADS, MOST_LAYERS, _BARRIER_BYTES = 256, 16, 128


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
    """What tuning may choose from: ``rows`` of a cluster of ``cluster`` blocks, the ``columns`` of
    a warp's product, and whether blocks wait for ``counted`` bytes in place of a barrier; the least
    estimated time first, none where no tile fits.

    The estimate, in clocks of an SM, per wave of blocks: its part of the weights through 64 bytes
    per clock, or its products through 1024 multiplications and additions, whichever is longer, and
    1000 per layer. DLRM's prediction layers (0.64 MB) of 128 samples, 16 rows: 64 blocks in
    clusters of 8 take 4250, 8 blocks 13000; of 2048, 128 blocks: 16 rows each 13000, clusters of 2
    with 32 rows 8000 (and half of the traffic of L2, 82 MB by 16 rows). None of it is measured.
    """
    per_row = 2 * sum(row_strides(widths[:-1]))
    weight_elements = sum(depth * columns for depth, columns in pairwise(widths))

    def clocks(config: Config) -> float:
        blocks = ceil_div(rows, config.rows) * config.cluster
        share = weight_elements / config.cluster
        wave = max(2 * share / 64, share * config.rows / 1024) + 1000 * (len(widths) - 1)
        return ceil_div(blocks, multiprocessor_count) * wave

    def may_count(cluster: int, columns: int) -> bool:
        """Every block has a unit in every hidden layer, which the kernel relies on."""
        units = (ceil_div(width, 32) * 32 // columns for width in widths[1:-1])
        return cluster > 1 and all(unit >= cluster for unit in units)

    found = []
    for cluster in (1, 2, 4, 8) if has_clusters else (1,):
        columns = 8 if cluster >= 4 else 16
        for counted in (0, 1) if may_count(cluster, columns) else (0,):
            found += [
                Config(rows=tile, cluster=cluster, columns=columns, counted=counted)
                for tile in (16, 32, 64)
                if tile * per_row + _BARRIER_BYTES <= most_shared_bytes
            ]
    return tuple(sorted(found, key=lambda config: (clocks(config), config.rows, config.counted)))


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
    counted = str(bool(config.counted)).lower()
    return f"forward<{hidden}, {last}, {types}, {tile}, {counted}>"


def _representative_expressions() -> tuple[str, ...]:
    """Every activation, the least and the most of a tile, and all types."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    small = Config(rows=16, cluster=8, columns=8, counted=0)
    found = [
        _expression(entry.functor, entry.functor, (brain, brain, brain), small)
        for entry in ACTIVATIONS.values()
    ]
    found += [
        _expression("Relu", "Identity", (brain, brain, brain), config)
        for config in (
            Config(rows=16, cluster=1, columns=16, counted=0),
            Config(rows=64, cluster=1, columns=16, counted=0),
            Config(rows=32, cluster=2, columns=16, counted=1),
            Config(rows=64, cluster=8, columns=8, counted=1),
        )
    ]
    found += [
        _expression("Relu", "Sigmoid", types, small)
        for types in ((half, single, half), (half, half, single), (brain, single, single))
    ]
    return tuple(dict.fromkeys(found))


CUDA_EXPRESSIONS = _representative_expressions()
