"""Launching the Triton kernels: tiles, and how many programs share a tile's sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuselab.ops.activations import activation as activation_named
from fuselab.ops.add_mul_activation.launch import Saved, backward_triton
from fuselab.ops.outer_interaction_linear import triton_kernels
from fuselab.ops.outer_interaction_linear.tensors import empty_gradients, empty_output, joined
from fuselab.runtime.matmul_precision import allows_tf32
from fuselab.runtime.triton_launch import launch

BLOCK = 16  # of j: what a matrix instruction takes of it, and DLRM's embedding width
FOLD_TILE = 64
_FINISH_ROWS, _FINISH_COLUMNS = 16, 128
_MOST_ELEMENTS = 32768  # of z: pairs and places in a row of the weight count in 32 bits


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of a matrix kernel owns, and its steps: ``rows`` are samples, ``columns``
    outputs, ``pairs_i`` the i's of a step of the forward, ``block`` the side of a square of pairs
    that a program of ``weight_gradient`` owns."""

    rows: int
    columns: int
    warps: int
    stages: int
    pairs_i: int = 4
    block: int = BLOCK


# sm_90's accumulators for 16-bit ("bf16", float16 too): 128 x 256 float32 in 8 warps, 128 registers
# a thread; 131, 90 and 147 KB of shared memory, HGMMA in all three, 4 words spilled in the third.
# Exact float32 has no matrix instruction, and tiles are smaller.
_TILES = {
    "forward": {
        "bf16": Tile(128, 256, 8, 3),
        "tf32": Tile(128, 128, 8, 3, pairs_i=2),
        "fp32": Tile(64, 64, 4, 2, pairs_i=1),
    },
    "weight_gradient": {
        "bf16": Tile(64, 128, 8, 3),
        "tf32": Tile(32, 64, 8, 3),
        "fp32": Tile(16, 64, 8, 2, block=8),
    },
    "input_gradient": {
        "bf16": Tile(128, 64, 8, 3),
        "tf32": Tile(64, 32, 8, 3),
        "fp32": Tile(16, 16, 8, 2),
    },
}


def _arithmetic(dtype: torch.dtype) -> str:
    """A key of ``_TILES``'s tables."""
    if dtype == torch.float32:
        return "tf32" if allows_tf32() else "fp32"
    return "bf16"


def pair_count(width: int) -> int:
    """Numbers in a row of the folded weight: pairs i <= j and the zeros of its order."""
    blocks = -(-width // BLOCK)
    return BLOCK * BLOCK * blocks * (blocks + 1) // 2


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Of the device; under the interpreter two, so that sums are split there too."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _splits(tiles: int, steps: int, least_steps: int, device: torch.device) -> tuple[int, int]:
    """Programs per tile that fill the device's multiprocessors once, and the steps of each."""
    wanted = max(1, min(_multiprocessors(device) // tiles, steps // least_steps))
    split_steps = -(-steps // wanted)
    return -(-steps // split_steps), split_steps


def _contiguous_rows(weight: Tensor) -> Tensor:
    return weight if weight.stride(1) == 1 or weight.shape[1] < 2 else weight.contiguous()


def _folded(weight: Tensor, width: int) -> Tensor:
    """Half the weight's numbers: each pair's two added up."""
    columns, pairs = weight.shape[0], pair_count(width)
    folded = weight.new_empty(columns, pairs)
    tiles = -(-width // FOLD_TILE)
    launch(
        triton_kernels.fold,
        (columns * tiles * (tiles + 1) // 2,),
        weight,
        folded,
        columns,
        width,
        weight.stride(0),
        pairs,
        BLOCK=BLOCK,
        TILE=FOLD_TILE,
        num_warps=4,
    )
    return folded


def forward(
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    output = empty_output(dense, weight)
    if output.numel() == 0:
        return output
    z, weight = joined(dense, embeddings), _contiguous_rows(weight)
    (rows, width), columns = z.shape, weight.shape[0]
    arithmetic = _arithmetic(z.dtype)
    tile = _TILES["forward"][arithmetic]
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    steps = pair_count(width) // (tile.pairs_i * BLOCK)
    splits, split_steps = _splits(tiles, steps, 8, z.device)
    partial = z.new_empty(splits, rows, columns, dtype=torch.float32)
    launch(
        triton_kernels.forward,
        (tiles, splits),
        z,
        _folded(weight, width),
        partial,
        rows,
        width,
        columns,
        pair_count(width),
        steps,
        split_steps,
        PRECISION="tf32" if arithmetic == "tf32" else "ieee",
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK_I=tile.pairs_i,
        BLOCK=BLOCK,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    launch(
        triton_kernels.finish_output,
        (-(-rows // _FINISH_ROWS), -(-columns // _FINISH_COLUMNS)),
        partial,
        z,
        weight,
        bias.contiguous() if bias is not None else None,
        output,
        rows,
        width,
        columns,
        weight.stride(0),
        splits,
        rows * columns,
        ACTIVATION=activation,
        BLOCK_ROWS=_FINISH_ROWS,
        BLOCK_COLUMNS=_FINISH_COLUMNS,
        num_warps=4,
    )
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
    recompute = functools.partial(forward, dense, embeddings, weight, bias, "identity")
    total, grad_bias = preactivation_gradient(needs, grad_output, output, activation, recompute)
    grad_dense, grad_embeddings, grad_weight, _ = empty_gradients(
        (*needs[:3], False), dense, embeddings, weight, bias
    )
    z = joined(dense, embeddings)
    if grad_weight is not None and grad_weight.numel():
        _weight_gradient(z, total, grad_weight)
    if needs[0] or needs[1]:
        first = dense.shape[1]
        _input_gradient(z, total, _contiguous_rows(weight), first, grad_dense, grad_embeddings)
    return grad_dense, grad_embeddings, grad_weight, grad_bias


def preactivation_gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    activation: str,
    recompute: Callable[[], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the pre-activation, contiguous, and the bias's, in one pass; ``recompute()``
    is the pre-activation, where the activation's derivative is a function of it."""
    passes = activation != "identity"
    total, grad_bias = grad_output, None
    if passes or needs[3]:
        from_operands = activation_named(activation).derivative_of == "preactivation"
        saved = Saved(
            activation=activation,
            scale=1.0,
            output=output,
            input=recompute() if from_operands else None,
            update=None,
            bias=None,
            input_dtype=grad_output.dtype,
            update_dtype=None,
            bias_dtype=grad_output.dtype,
        )
        first, _, grad_bias = backward_triton((passes, False, needs[3]), grad_output, saved)
        if passes:
            assert first is not None
            total = first
    return total.contiguous(), grad_bias


def _weight_gradient(z: Tensor, total: Tensor, grad_weight: Tensor) -> None:
    (rows, width), columns = z.shape, total.shape[1]
    arithmetic = _arithmetic(z.dtype)
    tile = _TILES["weight_gradient"][arithmetic]
    blocks = -(-width // tile.block)
    launch(
        triton_kernels.weight_gradient,
        (-(-columns // tile.columns) * blocks * (blocks + 1) // 2,),
        z,
        total,
        grad_weight,
        rows,
        width,
        columns,
        PRECISION="tf32" if arithmetic == "tf32" else "ieee",
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _input_gradient(
    z: Tensor,
    total: Tensor,
    weight: Tensor,
    dense_width: int,
    grad_dense: Tensor | None,
    grad_embeddings: Tensor | None,
) -> None:
    (rows, width), columns = z.shape, total.shape[1]
    if z.numel() == 0:
        return
    arithmetic = _arithmetic(z.dtype)
    tile = _TILES["input_gradient"][arithmetic]
    tiles = -(-rows // tile.rows)
    steps = pair_count(width) // (BLOCK * BLOCK)
    splits, split_steps = _splits(tiles, steps, 2, z.device)
    partial = z.new_zeros(splits, rows, width, dtype=torch.float32)
    launch(
        triton_kernels.input_gradient,
        (tiles, splits),
        z,
        total,
        _folded(weight, width),
        partial,
        rows,
        width,
        columns,
        pair_count(width),
        steps,
        split_steps,
        PRECISION="tf32" if arithmetic == "tf32" else "ieee",
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK=BLOCK,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    launch(
        triton_kernels.finish_input,
        (-(-rows // _FINISH_ROWS), -(-width // _FINISH_COLUMNS)),
        partial,
        z,
        total,
        weight,
        grad_dense,
        grad_embeddings,
        rows,
        width,
        columns,
        dense_width,
        weight.stride(0),
        splits,
        rows * width,
        BLOCK_ROWS=_FINISH_ROWS,
        BLOCK_COLUMNS=_FINISH_COLUMNS,
        num_warps=4,
    )


def supports(
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> str | None:
    """A sample has some elements, and their pairs are counted in 32 bits."""
    if dense.dtype == torch.float64:
        return "it has no float64 kernels"
    if embeddings.dim() != 3:
        return None  # which `validate` refuses
    elements = (embeddings.shape[1] + 1) * embeddings.shape[2]
    if 0 < elements <= _MOST_ELEMENTS:
        return None
    return f"a sample has {elements} elements; it takes 1 to {_MOST_ELEMENTS}"


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
