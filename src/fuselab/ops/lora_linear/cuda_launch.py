"""Launchers of the backward's single pass over dY, Y and x: all gradients but the input's.

``triton_launch.backward`` takes six launches for them (S; the pull back with dS and dB; two sums;
dA and its sum) and reads x twice. Here it is two launches and one read: for 8192 x 4096 -> 4096 in
bfloat16 268 MB, 63 us at 4.3 TB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.dtypes import CUDA_HALF_NAMES
from fuselab.ops._shared.hopper import clusters_at_a_time, has_clusters
from fuselab.ops._shared.matrices import as_rows
from fuselab.ops._shared.template_arguments import cuda_float
from fuselab.ops.lora_linear import triton_launch, wgmma_launch
from fuselab.ops.lora_linear.operands import Layer
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tensor_map import why_not
from fuselab.runtime.tuning import Config, chosen

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"), architectures=("sm_90", "sm_100"))

# These sizes are those of cuda_kernels.cu.
_WARPS, _TILE_ROWS, _STRIP_COLUMNS = 8, 16, 64
_THREADS, _BLOCK_COLUMNS = 32 * _WARPS, _WARPS * _STRIP_COLUMNS
_STAGES = 2
_FINISHED = 32  # elements of a block of `finish`
# The parts of dA and dB take 4 accumulator registers for every 16 columns and 8 of the rank.
MOST_RANK = 16
MOST_CLUSTER = 8  # blocks that every GPU with clusters allows
# The kernel of the input's gradient. wgmma is faster for large products; its 128 x 256 tiles are
# too few for small ones (4096 x 1024 -> 1024 on an H200: 46.9 us for 44.9 with Triton's).
_WGMMA, _TRITON = Config(product="wgmma"), Config(product="triton")


def _cluster(columns: int, inner: int) -> int:
    """Return the number of blocks that own a row together."""
    return power_of_two(ceil_div(max(columns, inner), _BLOCK_COLUMNS))


def _block_bytes(cluster: int, rank_blocks: int, activation: str) -> int:
    """Return a block's dynamic shared memory in bytes: the ring, the warps' partial sums, twice
    those of the blocks, S and dS in 16 bits, and two barriers."""
    matrices = 2 if activation == "identity" else 3
    ring = _STAGES * _WARPS * matrices * _TILE_ROWS * _STRIP_COLUMNS * 2
    sums = 2 * _TILE_ROWS * 8 * rank_blocks
    parts = (_WARPS + (2 * cluster if cluster > 1 else 0)) * sums * 4
    return ring + parts + sums * 2 + 16


def configs(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    *rest: Any,
) -> Sequence[Config]:
    """Return the kernels that may compute the input's gradient. wgmma's is first if its tiles are
    enough for every multiprocessor."""
    if not (needs[0] and wgmma_launch.pulls(weight, lora_a)):
        return (_TRITON,)
    down = ceil_div(input.shape[:-1].numel(), wgmma_launch.ROWS)
    count = down * ceil_div(weight.shape[1], wgmma_launch.TILE.columns)
    wide = count >= multiprocessors(input.device)
    return (_WGMMA, _TRITON) if wide else (_TRITON, _WGMMA)


def supports(
    input: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, *rest: Any
) -> str | None:
    """Return None for layers of float16 or bfloat16 with a rank up to 16 and K and N in multiples
    of 8 up to 4096, on a GPU with clusters (compute capability 9.0); else the reason."""
    if input.dtype not in CUDA_HALF_NAMES:
        return "it takes float16 and bfloat16"
    if lora_a.shape[0] > MOST_RANK:
        return f"it takes ranks up to {MOST_RANK}"
    if weight.numel() == 0 or any(size % 8 for size in weight.shape):
        return "it takes K and N in multiples of 8"
    if _cluster(*weight.shape) > MOST_CLUSTER:
        return f"it takes K and N up to {MOST_CLUSTER * _BLOCK_COLUMNS}"
    if not has_clusters(input.device):
        return "it needs a GPU with clusters (compute capability 9.0)"
    return None


def supports_backward(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> str | None:
    output, input, *layer = saved
    if not (needs[3] and needs[4]):
        return "it gives the gradients of 'lora_a' and 'lora_b' together"
    if (reason := supports(input, *layer)) is not None:
        return reason
    for name, tensor in (("grad_output", grad_output), ("input", input), ("output", output)):
        if tensor is not None and (reason := why_not(as_rows(tensor))) is not None:
            return f"it cannot copy '{name}': {reason}"
    return None


def backward(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor | None, input: Tensor, *saved: Any
) -> triton_launch.Gradients:
    """Return the gradients of input, lora_a and lora_b, None for the frozen tensors.

    The workspace is S's gradient, the pre-activation's gradient (and for gelu, gelu_tanh and silu
    the pre-activation), and float32 parts of the gradients of A and B for every cluster that fits
    the GPU.
    """
    layer = Layer(*saved)
    weight, _, lora_a, lora_b, scale, activation = layer
    x, upstream = as_rows(input), as_rows(grad_output)
    if x.shape[0] == 0:
        return triton_launch.without_rows(needs, input, layer)
    (rows, inner), (columns, rank) = x.shape, lora_b.shape
    of_saved = None if output is None else as_rows(output)
    if activation_named(activation).derivative_of == "preactivation":
        of_saved = as_rows(wgmma_launch.forward(input, *layer[:-1], "identity"))
    cluster, rank_blocks = _cluster(columns, inner), ceil_div(rank, 8)
    block_bytes = _block_bytes(cluster, rank_blocks, activation)
    element = CUDA_HALF_NAMES[x.dtype]
    scale_type, scale_argument = cuda_float(scale, torch.float32)
    expression = _expression(activation, element, scale_type, cluster, rank_blocks)
    block = (_THREADS, block_bytes, cluster)
    at_a_time = max(1, clusters_at_a_time(CUDA, expression, *block, x.device))
    clusters = min(ceil_div(rows, _TILE_ROWS), at_a_time)

    writes = needs[0] and of_saved is not None
    pulled = upstream.new_empty((rows, columns)) if writes else None
    grad_projection = x.new_empty((rows, rank))
    parts = x.new_empty((clusters, columns + inner, rank), dtype=torch.float32)
    grad_a, grad_b = lora_a.new_empty(lora_a.shape), lora_b.new_empty(lora_b.shape)
    CUDA.launch(
        expression,
        (clusters * cluster, 1, 1),
        (_THREADS, 1, 1),
        (
            *(upstream, of_saved, x, lora_a, lora_b),
            *(pulled, grad_projection, parts),
            *(i64(rows), i32(columns), i32(inner), i32(rank)),
            *(i64(upstream.stride(0)), i64(0 if of_saved is None else of_saved.stride(0))),
            *map(i64, (x.stride(0), *lora_a.stride(), *lora_b.stride())),
            scale_argument,
        ),
        block_bytes,
    )
    CUDA.launch(
        f"finish<{element}, {scale_type}>",
        (ceil_div((columns + inner) * rank, _FINISHED), 1, 1),
        (_THREADS, 1, 1),
        (
            *(parts, grad_a, grad_b, i32(clusters), i32(columns), i32(inner), i32(rank)),
            scale_argument,
        ),
    )
    grad_input = None
    if needs[0]:
        grad = upstream if pulled is None else pulled
        key = (x.dtype, power_of_two(rows), columns, inner)
        candidates = configs(needs, grad_output, output, input, *layer)
        config = chosen(wgmma_launch.OP_NAME, "cuda_backward", key, candidates)
        operands = (grad, weight, grad_projection, lora_a)
        multiply = triton_launch if config == _TRITON else wgmma_launch
        grad_input = multiply.pull_through(*operands).view(input.shape)
    return grad_input, None, None, grad_a, grad_b


def _expression(activation: str, element: str, scale: str, cluster: int, rank_blocks: int) -> str:
    functor = activation_named(activation).functor
    return f"pull_back_and_reduce<{functor}, {element}, {scale}, {cluster}, {rank_blocks}>"


def _representative_expressions() -> tuple[str, ...]:
    """Return the expressions of every activation, cluster and width of the rank, both elements, and
    the scale by value and by pointer."""
    bfloat, half = CUDA_HALF_NAMES[torch.bfloat16], CUDA_HALF_NAMES[torch.float16]
    sizes = product((1, 2, 4, 8), (1, 2))
    return (
        *(
            _expression(name, bfloat, "float", *size)
            for name, size in zip(ACTIVATIONS, sizes, strict=True)
        ),
        _expression("relu", half, "const float*", 2, 2),
        f"finish<{bfloat}, float>",
        f"finish<{half}, const float*>",
    )


CUDA_EXPRESSIONS = _representative_expressions()
