"""Launching the kernels of Hopper's warpgroup matrix instructions (wgmma), between Triton's, which
fold the weight and finish."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops.cat_interaction.triton_launch import forward as joined
from fuselab.ops.linear_activation.wgmma_launch import is_hopper
from fuselab.ops.outer_interaction_linear import triton_launch
from fuselab.ops.outer_interaction_linear.tensors import empty_gradients, empty_output
from fuselab.ops.outer_interaction_linear.triton_launch import (
    BLOCK,
    contiguous_rows,
    finish_input,
    finish_output,
    folded_pieces,
    pieces,
    preactivation_gradient,
    shares,
    transposed,
    triangle,
)
from fuselab.runtime.cuda_source import CudaSource, i32
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.tensor_map import tensor_map, why_not

WGMMA = CudaSource(Path(__file__).with_name("wgmma_kernels.cu"), architectures=("sm_90a",))
_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

# As in wgmma_kernels.cu.
_ROWS, _COLUMNS, _DEPTH, _THREADS = 128, 256, 64, 384
_WEIGHT_COLUMNS = 128


def _shared_bytes(stages: int, stage_bytes: int) -> int:
    """The ring, a kilobyte of barriers, and up to one of alignment."""
    return 2048 + stages * stage_bytes


_FORWARD_BYTES = _shared_bytes(6, _COLUMNS * _DEPTH * 2)
_WEIGHT_TILE_BYTES = _WEIGHT_COLUMNS * BLOCK * BLOCK * 2
_WEIGHT_BYTES = _shared_bytes(8, (_WEIGHT_COLUMNS + 2 * BLOCK) * _DEPTH * 2) + _WEIGHT_TILE_BYTES
_INPUT_BYTES = _shared_bytes(4, (_ROWS + BLOCK * BLOCK) * _DEPTH * 2)


def supports(
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> str | None:
    if dense.dtype not in _TYPES:
        return "it takes float16 and bfloat16"
    if not is_hopper(dense.device):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if embeddings.dim() != 3:
        return None  # which `validate` refuses
    elements = (embeddings.shape[1] + 1) * embeddings.shape[2]
    if elements % BLOCK:
        return f"a sample has {elements} elements; it takes multiples of {BLOCK}"
    if weight.shape[0] % 8:
        return f"there are {weight.shape[0]} outputs; it takes multiples of 8"
    return triton_launch.supports(dense, embeddings, weight, bias, activation)


def supports_backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> str | None:
    return supports(dense, embeddings, weight, bias, activation)


def forward(
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    scratch: Tensor | None = None,
) -> Tensor:
    """``scratch``, of the weight's dtype, may be written over."""
    output = empty_output(dense, weight)
    if output.numel() == 0:
        return output
    z, weight = joined(dense, embeddings), contiguous_rows(weight)
    (rows, width), columns = z.shape, weight.shape[0]
    tiles = ceil_div(rows, _ROWS) * ceil_div(columns, _COLUMNS)
    # Every share has some of the first piece: it writes what the others add to.
    splits = min(
        shares(tiles, triangle(width // BLOCK), 2, z.device),
        pieces(width, columns, weight.element_size())[0].squares,
    )
    partial = z.new_empty(splits, rows, columns, dtype=torch.float32)
    for piece, folded in folded_pieces(weight, width, scratch):
        WGMMA.launch(
            f"forward<{_TYPES[z.dtype]}>",
            (tiles, splits, 1),
            (_THREADS, 1, 1),
            (
                tensor_map(folded, _COLUMNS, _DEPTH),
                *(z, partial, i32(rows), i32(width), i32(columns), i32(piece.first)),
                *(i32(piece.squares), i32(piece.first > 0)),
            ),
            _FORWARD_BYTES,
        )
    finish_output(partial, z, weight, bias, activation, output)
    return output


def backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor | None, ...]:
    """The folded weight lies in its gradient, which is written last."""
    grad_dense, grad_embeddings, grad_weight, _ = empty_gradients(
        (*needs[:3], False), dense, embeddings, weight, bias
    )
    recompute = functools.partial(forward, dense, embeddings, weight, bias, "identity", grad_weight)
    total, grad_bias = preactivation_gradient(needs, grad_output, output, activation, recompute)
    if total.numel() == 0:
        for empty in (grad_dense, grad_embeddings, grad_weight):
            if empty is not None:
                empty.zero_()
        return grad_dense, grad_embeddings, grad_weight, grad_bias
    if why_not(total) is not None:  # an upstream gradient that begins within 16 bytes
        total = total.clone()
    z = joined(dense, embeddings)
    if grad_dense is not None or grad_embeddings is not None:
        _input_gradient(
            *(z, total, contiguous_rows(weight), grad_weight, dense.shape[1]),
            *(grad_dense, grad_embeddings),
        )
    if grad_weight is not None:
        _weight_gradient(z, total, grad_weight)
    return grad_dense, grad_embeddings, grad_weight, grad_bias


def _weight_gradient(z: Tensor, total: Tensor, grad_weight: Tensor) -> None:
    """One launch, behind a copy of z whose samples are neighbours."""
    (rows, width), columns = z.shape, total.shape[1]
    tiles = ceil_div(columns, _WEIGHT_COLUMNS) * triangle(width // BLOCK)
    WGMMA.launch(
        f"weight_gradient<{_TYPES[z.dtype]}>",
        (min(tiles, multiprocessors(z.device)), 1, 1),
        (_THREADS, 1, 1),
        (
            tensor_map(total, _DEPTH, 64),
            tensor_map(transposed(z), BLOCK, _DEPTH),
            *(grad_weight, i32(rows), i32(width), i32(columns)),
        ),
        _WEIGHT_BYTES,
    )


def _input_gradient(
    z: Tensor,
    total: Tensor,
    weight: Tensor,
    scratch: Tensor | None,
    dense_width: int,
    grad_dense: Tensor | None,
    grad_embeddings: Tensor | None,
) -> None:
    (rows, width), columns = z.shape, total.shape[1]
    tiles = ceil_div(rows, _ROWS)
    splits = shares(tiles, triangle(width // BLOCK), 2, z.device)
    partial = z.new_zeros(splits, rows, width, dtype=torch.float32)
    for piece, folded in folded_pieces(weight, width, scratch):
        WGMMA.launch(
            f"input_gradient<{_TYPES[z.dtype]}>",
            (tiles, splits, 1),
            (_THREADS, 1, 1),
            (
                tensor_map(total, _ROWS, _DEPTH),
                tensor_map(folded, _DEPTH, 64),
                *(z, partial, i32(rows), i32(width), i32(columns)),
                *(i32(piece.first), i32(piece.squares)),
            ),
            _INPUT_BYTES,
        )
    finish_input(partial, z, total, weight, dense_width, grad_dense, grad_embeddings)


CUDA_EXPRESSIONS = tuple(
    f"{kernel}<{element}>"
    for kernel in ("forward", "weight_gradient", "input_gradient")
    for element in _TYPES.values()
)
