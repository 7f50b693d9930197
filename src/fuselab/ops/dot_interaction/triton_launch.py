"""Launchers of the Triton kernels, and how many samples a program owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuselab.ops._shared.saved import of_saved
from fuselab.ops.dot_interaction import triton_kernels
from fuselab.ops.dot_interaction.layout import backward_of, forward_of
from fuselab.runtime import tuning
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.matmul_precision import input_precision
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.tuning import Config

# Elements of the products that a program of 4 warps has in registers: 4 samples of DLRM's 27
# vectors, 32 per thread. Nothing spills on sm_90.
_TILE = 4096
_MOST_VECTORS = 128
_MOST_WIDTH = 256
_MOST_PADDING = 1024
# Both operands of a product are in shared memory; sm_80 allows a program 163 KB, sm_90 227 KB.
_MOST_SHARED_BYTES = 160 * 1024


def configs(dense: Tensor, embeddings: Tensor, *rest: Any) -> tuple[Config, ...]:
    """Return the samples of a program, at least 1 and fewer as the tile grows, and its warps."""
    vectors, width = _padded(embeddings)
    elements = vectors * max(vectors, width)
    samples = max(1, _TILE // elements)
    # A larger sample too has 32 elements per thread: a kernel with 128 takes 16 s to compile.
    found = [Config(samples=samples, warps=min(4 * max(1, elements // _TILE), 16))]
    for factor in (1, 2, 4):
        for warps in (1, 2, 4, 8):
            config = Config(samples=max(1, samples * 2 // factor), warps=warps)
            if config not in found:
                found.append(config)
    return tuple(found)


def configs_backward(
    needs: Sequence[bool], grad_output: Tensor, dense: Tensor, embeddings: Tensor
) -> tuple[Config, ...]:
    return configs(dense, embeddings)


def _padded(embeddings: Tensor) -> tuple[int, int]:
    """Return the vectors and the width of a tile: powers of two from 16 on."""
    return power_of_two(embeddings.shape[1] + 1, 16), power_of_two(embeddings.shape[2], 16)


def _chosen(step: str, dense: Tensor, embeddings: Tensor) -> Config:
    batch, tables, width = embeddings.shape
    key = (dense.dtype, tables + 1, width, min(power_of_two(batch), 65536))
    return tuning.chosen("fuselab::dot_interaction", step, key, configs(dense, embeddings))


def _constants(embeddings: Tensor, config: Config) -> dict[str, Any]:
    vectors, width = _padded(embeddings)
    return {
        "PRECISION": input_precision(embeddings.dtype),
        "SAMPLES": config.samples,
        "VECTORS": vectors,
        "WIDTH": width,
        "num_warps": config.warps,
    }


@forward_of
def forward(dense: Tensor, embeddings: Tensor, padding: int, output: Tensor) -> None:
    batch, tables, width = embeddings.shape
    config = _chosen("triton", dense, embeddings)
    launch(
        triton_kernels.forward,
        (ceil_div(batch, config.samples),),
        *(dense, embeddings, output, batch, tables + 1, width, output.shape[1]),
        *(dense.stride(0), *embeddings.stride()[:2]),
        **_constants(embeddings, config),
        EDGE=power_of_two(padding, 16) if padding else 0,
    )


@backward_of
def backward(
    grad_output: Tensor, dense: Tensor, embeddings: Tensor, grads: Sequence[Tensor | None]
) -> None:
    batch, tables, width = embeddings.shape
    config = _chosen("triton_backward", dense, embeddings)
    launch(
        triton_kernels.backward,
        (ceil_div(batch, config.samples),),
        *(grad_output, dense, embeddings, *grads, batch, tables + 1, width),
        *(grad_output.stride(0), dense.stride(0), *embeddings.stride()[:2]),
        **_constants(embeddings, config),
    )


def supports(dense: Tensor, embeddings: Tensor, padding: int) -> str | None:
    """Return None if a sample's products fit one tile and shared memory, and its zeros another
    tile; else the reason."""
    if embeddings.dim() != 3:
        return None  # `validate` refuses it
    tables, width = embeddings.shape[1:]
    if tables + 1 > _MOST_VECTORS or width > _MOST_WIDTH:
        return f"it holds at most {_MOST_VECTORS} vectors of at most {_MOST_WIDTH} elements"
    vectors, columns = _padded(embeddings)
    needed = vectors * (max(vectors, columns) + columns) * embeddings.element_size()
    if needed > _MOST_SHARED_BYTES:
        return f"a sample needs {needed} bytes of shared memory; it has {_MOST_SHARED_BYTES}"
    if padding > _MOST_PADDING:
        return f"it adds at most {_MOST_PADDING} columns of zeros"
    return None


supports_backward = of_saved(supports, 0, 0)  # without padding
