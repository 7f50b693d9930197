"""The launcher of the CUDA C++ kernel that computes all layers, and the choice of its tile."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.dtypes import cuda_types
from fuselab.ops._shared.hopper import has_clusters
from fuselab.ops._shared.matrices import as_rows
from fuselab.runtime.cuda_source import CudaSource, i64
from fuselab.runtime.gpu_limits import multiprocessors, shared_bytes
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.parameters import Struct
from fuselab.runtime.tuning import Config, chosen

NAME = "fuselab::mlp"
CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))

_THREADS, MOST_LAYERS = 256, 16  # these are those of cuda_kernels.cu


def row_strides(depths: Sequence[int]) -> tuple[int, int]:
    """Return the row strides, in elements, of the buffers that even and odd layers read."""

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
    """Return the configurations that tuning may choose from, the default first; none if no tile
    fits. ``rows`` are those of a cluster of ``cluster`` blocks, ``columns`` those of a warp's
    product.

    The default is the largest cluster of 16 rows whose blocks all run at once: one block per
    multiprocessor in clusters of 8 and 4, two in clusters of 2 and 1. Beyond that it is 64 rows,
    which read the weights a quarter as often. On an H200 that rule chose the fastest tile for
    DLRM's layers from 128 to 8192 rows, or one within 1 us of it.
    """
    per_row = 2 * sum(row_strides(widths[:-1]))
    pairs = min(2, most_shared_bytes // (16 * per_row)) * multiprocessor_count

    def order(config: Config) -> int:
        if config.rows == 64:
            return 0
        blocks = ceil_div(rows, 16) * config.cluster
        at_once = blocks <= (multiprocessor_count if config.cluster >= 4 else pairs)
        cluster: int = config.cluster
        return -cluster if at_once else cluster

    found = [
        Config(rows=tile, cluster=cluster, columns=8 if cluster >= 4 else 16)
        for tile, clusters in ((16, (1, 2, 4, 8) if has_clusters else (1,)), (64, (1,)))
        for cluster in clusters
        if tile * per_row <= most_shared_bytes
    ]
    return tuple(sorted(found, key=order))


def configs(input: Tensor, weights: Sequence[Tensor], *rest: Any) -> Sequence[Config]:
    """Return ``candidates`` for these arguments."""
    return candidates(
        input.shape[:-1].numel(),
        (weights[0].shape[1], *(weight.shape[0] for weight in weights)),
        multiprocessors(input.device),
        shared_bytes(input.device),
        input.is_cuda and has_clusters(input.device),
    )


def supports(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *rest: Any
) -> str | None:
    if not weights or any(weight.dim() != 2 for weight in weights):
        return None  # `validate` refuses it
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
    if not configs(input, weights):
        return "16 rows of the widest layers are more than its shared memory"
    return None


def empty_output(input: Tensor, weights: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Return a new, uninitialised output: ``(..., N)`` of the last layer."""
    shape = (*input.shape[:-1], weights[-1].shape[0])
    return input.new_empty(shape, dtype=dtype or weights[0].dtype)


def forward(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    output_activation: str,
    dtype: torch.dtype | None,
    config: Config | None = None,
) -> Tensor:
    """Compute all layers in one launch; ``config`` replaces the tuned or default tile."""
    own = weights[0].dtype
    output = empty_output(input, weights, dtype)
    if output.numel() == 0:
        return output
    x = as_rows(input)
    depths = [weight.shape[1] for weight in weights]
    key = (own, x.shape[0], *depths, weights[-1].shape[0])
    config = config or chosen(NAME, "cuda", key, configs(input, weights))
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
    """Return the struct ``Network`` of cuda_kernels.cu."""
    layers = [struct.pack("QQqii", 0, 0, w.stride(0), w.shape[1], w.shape[0]) for w in weights]
    size = len(layers[0])
    nothing = bytes(size * (MOST_LAYERS - len(layers)))
    strides = row_strides([weight.shape[1] for weight in weights])
    return Struct(
        b"".join(layers) + nothing + struct.pack("4i", len(layers), *strides, 0),
        [
            (size * place + 8 * of, tensor)
            for of, tensors in enumerate((weights, biases))
            for place, tensor in enumerate(tensors)
        ],
    )


def _expression(
    hidden: str,
    last: str,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    config: Config,
) -> str:
    """Return the kernel's expression; ``dtypes`` are those of weights, input and output."""
    types = cuda_types(dtypes)
    tile = f"{config.rows // 16}, {config.columns // 8}, {config.cluster}"
    return f"forward<{hidden}, {last}, {types}, {tile}>"


def _representative_expressions() -> tuple[str, ...]:
    """Return the expressions of every activation, the smallest and largest tiles, and all types."""
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
            Config(rows=16, cluster=2, columns=16),
            Config(rows=16, cluster=4, columns=8),
            Config(rows=64, cluster=1, columns=16),
        )
    ]
    found += [
        _expression("Relu", "Sigmoid", types, small)
        for types in ((half, single, half), (half, half, single), (brain, single, single))
    ]
    return tuple(dict.fromkeys(found))


CUDA_EXPRESSIONS = _representative_expressions()
