"""Launching the Triton kernels: tiles, and how many programs share a tile's sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuselab.ops.activations import activation as activation_named
from fuselab.ops.add_mul_activation.launch import Saved, backward_triton
from fuselab.ops.cat_interaction.triton_launch import forward as joined
from fuselab.ops.outer_interaction_linear import triton_kernels
from fuselab.ops.outer_interaction_linear.tensors import empty_gradients, empty_output
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.matmul_precision import allows_tf32, input_precision
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.tuning import Config

BLOCK = 16  # of j: what a matrix instruction takes of it, and DLRM's embedding width
FOLD_TILE = 64
# The weight is folded a piece at a time, which stays in an H200's L2 (60 MB) until multiplied. Of
# 512 x 432² that makes 4 pieces of up to 36 MB; the whole would be 99.
PIECE_BYTES = 36 * 2**20
_FINISH_ROWS, _FINISH_COLUMNS = 16, 128
_MOST_ELEMENTS = 32768  # of z: pairs and places in a row of the weight count in 32 bits


# What a program of a matrix kernel owns: ``rows`` are samples and ``columns`` outputs
# (weight_gradient sums over the rows, input_gradient over the columns), ``pairs_i`` the i's of a
# step of the forward, ``block`` the side of weight_gradient's squares, ``pairs_first`` a constant
# of it.
#
# sm_90, 16-bit ("bf16", float16 too), registers and KB of shared memory: forward 212 and 131,
# weight_gradient 122 and 111, input_gradient 255 and 147, of which 4 words spill; HGMMA in all
# three. A tile's other side is as wide as accumulators allow: 256 sums for each product formed. For
# 2048 x 432 -> 512 a step of the forward is 1024 cycles of HGMMA beside 296 of instructions; tiles
# of 128 rows read `folded` 16 times, 1.6 GB out of L2. weight_gradient reads the upstream gradient
# once per square: 0.9 GB with squares of 16, whose products take 242 instructions by pairs_first.
# There, on an H200 (2026-11-21), 8 other tiles of the forward took 471 to 832 us for 472, and 9
# other pairs of the gradients' 1220 to 1878 for 1182. tf32 and fp32 have not been timed; exact
# float32 has no matrix instruction, and tiles are smaller.
_FORWARD = {
    "bf16": Config(rows=128, columns=256, pairs_i=4, warps=8, stages=3),
    "tf32": Config(rows=128, columns=128, pairs_i=2, warps=8, stages=3),
    "fp32": Config(rows=64, columns=64, pairs_i=1, warps=4, stages=2),
}
_WEIGHT_GRADIENT = {
    "bf16": Config(rows=64, columns=128, block=16, warps=8, stages=4, pairs_first=1),
    "tf32": Config(rows=32, columns=64, block=16, warps=8, stages=3, pairs_first=0),
    "fp32": Config(rows=16, columns=64, block=8, warps=8, stages=2, pairs_first=0),
}
_INPUT_GRADIENT = {
    "bf16": Config(rows=128, columns=64, warps=8, stages=3),
    "tf32": Config(rows=64, columns=32, warps=8, stages=3),
    "fp32": Config(rows=16, columns=16, warps=8, stages=2),
}


def _arithmetic(dtype: torch.dtype) -> str:
    """A key of the tables above."""
    if dtype == torch.float32:
        return "tf32" if allows_tf32() else "fp32"
    return "bf16"


def pair_count(width: int) -> int:
    """Numbers in a row of the folded weight: pairs i <= j and the zeros of its order."""
    blocks = ceil_div(width, BLOCK)
    return BLOCK * BLOCK * blocks * (blocks + 1) // 2


def shares(tiles: int, steps: int, least_steps: int, device: torch.device) -> int:
    """Programs per tile that fill the device's multiprocessors, and have ``least_steps`` each, if
    they can."""
    most = max(2, multiprocessors(device))  # 2 under the interpreter: sums are split there too
    return max(1, min(most // tiles, steps // least_steps))


def contiguous_rows(weight: Tensor) -> Tensor:
    return weight if weight.stride(1) == 1 or weight.shape[1] < 2 else weight.contiguous()


@dataclass(frozen=True)
class Piece:
    """A run of ``squares`` of BLOCK x BLOCK pairs of the folded weight, from number ``first`` on,
    which ``tiles`` programs per column fold, the first of them ``first_tile``."""

    first: int
    squares: int
    first_tile: int
    tiles: int

    @property
    def pairs(self) -> int:
        return self.squares * BLOCK * BLOCK


def pieces(width: int, columns: int, element_size: int) -> list[Piece]:
    """All of the folded weight in pieces of at most PIECE_BYTES, or of one row of tiles."""
    blocks, side = ceil_div(width, BLOCK), FOLD_TILE // BLOCK
    found: list[Piece] = []
    for upper in range(ceil_div(width, FOLD_TILE)):
        first = triangle(upper * side)
        squares = triangle(min((upper + 1) * side, blocks)) - first
        row = Piece(first, squares, triangle(upper), upper + 1)
        if found:
            last = found[-1]
            both = Piece(
                last.first, last.squares + squares, last.first_tile, last.tiles + row.tiles
            )
            if both.pairs * columns * element_size <= PIECE_BYTES:
                found[-1] = both
                continue
        found.append(row)
    return found


def triangle(side: int) -> int:
    """Places on and below the diagonal of a square."""
    return side * (side + 1) // 2


def folded_pieces(
    weight: Tensor, width: int, scratch: Tensor | None = None
) -> Iterator[tuple[Piece, Tensor]]:
    """Each pair's two weights added up, piece after piece in the same memory: ``(columns,
    pairs)``. That is ``scratch``'s, if it is large enough."""
    columns = weight.shape[0]
    found = pieces(width, columns, weight.element_size())
    numel = columns * max(piece.pairs for piece in found)
    if scratch is None or scratch.numel() < numel:
        scratch = weight.new_empty(numel)
    for piece in found:
        folded = scratch.view(-1)[: columns * piece.pairs].view(columns, piece.pairs)
        launch(
            triton_kernels.fold,
            (columns * piece.tiles,),
            weight,
            folded,
            columns,
            width,
            weight.stride(0),
            piece.pairs,
            piece.first_tile,
            piece.first * BLOCK * BLOCK,
            PRECISION=input_precision(weight.dtype),
            BLOCK=BLOCK,
            TILE=FOLD_TILE,
            num_warps=4,
        )
        yield piece, folded


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
    tile = _FORWARD[_arithmetic(z.dtype)]
    tiles = ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns)
    square_steps = BLOCK // tile.pairs_i
    splits = shares(tiles, pair_count(width) // (tile.pairs_i * BLOCK), 8, z.device)
    partial = z.new_empty(splits, rows, columns, dtype=torch.float32)
    for piece, folded in folded_pieces(weight, width, scratch):
        steps = piece.squares * square_steps
        launch(
            triton_kernels.forward,
            (tiles, splits),
            z,
            folded,
            partial,
            rows,
            width,
            columns,
            piece.pairs,
            piece.first * square_steps,
            steps,
            ceil_div(steps, splits),
            ADDS=piece.first > 0,
            PRECISION=input_precision(z.dtype),
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            BLOCK_I=tile.pairs_i,
            BLOCK=BLOCK,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    finish_output(partial, z, weight, bias, activation, output)
    return output


def transposed(z: Tensor) -> Tensor:
    """``(K, B)``: the samples of an element are neighbours, and rows begin at 16 bytes."""
    rows, width = z.shape
    output = z.new_empty(width, ceil_div(rows, 8) * 8)
    launch(
        triton_kernels.transpose,
        (ceil_div(rows, FOLD_TILE), ceil_div(width, FOLD_TILE)),
        z,
        output,
        rows,
        width,
        output.stride(0),
        TILE=FOLD_TILE,
        num_warps=4,
    )
    return output[:, :rows]


def finish_output(
    partial: Tensor,
    z: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    output: Tensor,
) -> None:
    """The sum of the shares ``(splits, rows, columns)``, the bias and the activation."""
    (splits, rows, columns), width = partial.shape, z.shape[1]
    launch(
        triton_kernels.finish_output,
        (ceil_div(rows, _FINISH_ROWS), ceil_div(columns, _FINISH_COLUMNS)),
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
    z = joined(dense, embeddings)
    if needs[0] or needs[1]:
        _input_gradient(
            *(z, total, contiguous_rows(weight), grad_weight, dense.shape[1]),
            *(grad_dense, grad_embeddings),
        )
    if grad_weight is not None and grad_weight.numel():
        _weight_gradient(z, total, grad_weight)
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
    tile = _WEIGHT_GRADIENT[_arithmetic(z.dtype)]
    blocks = ceil_div(width, tile.block)
    launch(
        triton_kernels.weight_gradient,
        (ceil_div(columns, tile.columns) * blocks * (blocks + 1) // 2,),
        z,
        total,
        grad_weight,
        rows,
        width,
        columns,
        PRECISION=input_precision(z.dtype),
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK=tile.block,
        PAIRS_FIRST=bool(tile.pairs_first),
        num_warps=tile.warps,
        num_stages=tile.stages,
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
    if z.numel() == 0:
        return
    tile = _INPUT_GRADIENT[_arithmetic(z.dtype)]
    tiles = ceil_div(rows, tile.rows)
    splits = shares(tiles, pair_count(width) // (BLOCK * BLOCK), 2, z.device)
    partial = z.new_zeros(splits, rows, width, dtype=torch.float32)
    for piece, folded in folded_pieces(weight, width, scratch):
        launch(
            triton_kernels.input_gradient,
            (tiles, splits),
            z,
            total,
            folded,
            partial,
            rows,
            width,
            columns,
            piece.pairs,
            piece.first,
            piece.squares,
            ceil_div(piece.squares, splits),
            PRECISION=input_precision(z.dtype),
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            BLOCK=BLOCK,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    finish_input(partial, z, total, weight, dense_width, grad_dense, grad_embeddings)


def finish_input(
    partial: Tensor,
    z: Tensor,
    total: Tensor,
    weight: Tensor,
    dense_width: int,
    grad_dense: Tensor | None,
    grad_embeddings: Tensor | None,
) -> None:
    """The sum of the shares ``(splits, rows, width)``, into the gradients that are asked for."""
    splits, rows, width = partial.shape
    launch(
        triton_kernels.finish_input,
        (ceil_div(rows, _FINISH_ROWS), ceil_div(width, _FINISH_COLUMNS)),
        partial,
        z,
        total,
        weight,
        grad_dense,
        grad_embeddings,
        rows,
        width,
        total.shape[1],
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
