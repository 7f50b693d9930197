"""Launchers of the CUDA C++ kernels for small samples, of which a warp owns a few."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import CUDA_NAMES
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.tuning import Config

CUDA = CudaSource(Path(__file__).with_name("warp_kernels.cu"))
_WARPS = 4  # kWarps of warp_kernels.cu
_MOST_VECTORS = 32
_LANE_WIDTH, _LANE_SAMPLES = 16, 4
_MOST_MATRIX_WIDTH = 128
# Two blocks of 100 KB share a multiprocessor of sm_90; sm_80 allows a block 163 KB.
_MOST_SHARED_BYTES = 100 * 1024

CUDA_EXPRESSIONS = (
    *(
        f"{step}_lanes<{vectors}, {unrolled}>"
        for step in ("forward", "backward")
        for vectors, unrolled in ((1, 8), (2, 2), (8, 8), (9, 2), (27, 2), (27, 8), (32, 8))
    ),
    *(
        f"{step}_matrix<{element}, {vectors}, {width}, {samples}>"
        for step in ("forward", "backward")
        for element, vectors, width, samples in (
            ("__nv_bfloat16", 27, 16, 8),
            ("__nv_bfloat16", 27, 16, 2),
            ("__half", 27, 16, 8),
            ("__half", 1, 16, 4),
            ("__half", 9, 32, 4),
            ("__nv_bfloat16", 27, 128, 8),
            ("__nv_bfloat16", 32, 48, 2),
        )
    ),
)


def candidates(embeddings: Tensor, columns: int) -> tuple[Config, ...]:
    """Return the candidates, forward or backward, for rows of ``columns`` columns. There are none
    if samples are not small or not made of whole chunks. The alignment of the operands is tested by
    ``launch``'s caller."""
    _, tables, width = embeddings.shape
    if tables >= _MOST_VECTORS:
        return ()
    found: tuple[Config, ...] = ()
    if embeddings.dtype == torch.float32 and width == _LANE_WIDTH:
        found = tuple(
            Config(kernel="warp", samples=_LANE_SAMPLES, unrolled=unrolled) for unrolled in (8, 2)
        )
    elif embeddings.element_size() == 2 and width % 16 == 0 and width <= _MOST_MATRIX_WIDTH:
        # 2048 samples make two waves of blocks with 2 to a warp, and half a wave with 8.
        order = (2, 4, 8) if embeddings.shape[0] < 8192 else (8, 4, 2)
        found = tuple(Config(kernel="warp", samples=samples) for samples in order)
    return tuple(
        config
        for config in found
        if _shared_bytes(embeddings, columns, config.samples) <= _MOST_SHARED_BYTES
    )


def _shared_bytes(embeddings: Tensor, columns: int, samples: int) -> int:
    """Return a block's bytes: the rows and, in float32, the vectors, padded so that the next
    sample's begin 4 banks on."""
    numbers = columns
    if embeddings.dtype == torch.float32:
        vectors = (embeddings.shape[1] + 1) * _LANE_WIDTH
        numbers += vectors + (36 - vectors % 32) % 32
    return _WARPS * samples * numbers * embeddings.element_size()


def launch(
    step: str,
    tensors: Sequence[Tensor | None],
    embeddings: Tensor,
    strides: Sequence[int],
    columns: int,
    config: Config,
) -> None:
    """Launch ``step``, "forward" or "backward". Rows of both inputs are aligned to chunks of 4
    elements."""
    batch, tables, width = embeddings.shape
    if embeddings.dtype == torch.float32:
        arguments = f"lanes<{tables + 1}, {config.unrolled}>"
    else:
        element = CUDA_NAMES[embeddings.dtype]
        arguments = f"matrix<{element}, {tables + 1}, {width}, {config.samples}>"
    CUDA.launch(
        f"{step}_{arguments}",
        (ceil_div(batch, _WARPS * config.samples), 1, 1),
        (32 * _WARPS, 1, 1),
        (*tensors, i64(batch), *map(i64, strides), i32(columns)),
        shared_bytes=_shared_bytes(embeddings, columns, config.samples),
    )
