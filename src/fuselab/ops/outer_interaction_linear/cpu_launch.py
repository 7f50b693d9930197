"""Launchers of the C++ kernels: the pairs of a tile of elements at a time, and PyTorch's matrix
products between them.

A tile's products and folded weights stay in the cache, so the ``(B, K²)`` outer product is never in
memory, and the matrix products take half of the operations. In return the weight is folded in every
call, so this pays for many samples; the measured times that ``auto`` goes by say from where on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared import activations
from fuselab.ops._shared.dtypes import CPP_NAMES
from fuselab.ops._shared.matrices import empty_output, row_readable
from fuselab.ops.outer_interaction_linear.folding import BLOCK, FOLD_TILE
from fuselab.runtime.cpp_source import CppSource, i64

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
_DTYPES = (torch.float32, torch.float64)
_COLUMNS = 256  # outputs whose weights are folded at a time: up to 4 MB of a tile in float32


def supports(dense: Tensor, *rest: Any) -> str | None:
    """Return None for float32 and float64, else the reason."""
    return None if dense.dtype in _DTYPES else "it takes float32 or float64"


def forward(
    dense: Tensor, embeddings: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """Compute the output. The workspace is a tile's products, 16 KB a sample in float32, and its
    folded weights, up to 4 MB."""
    output = empty_output(dense, weight)
    if output.numel() == 0:
        return output
    if bias is None:
        output.zero_()
    else:
        output.copy_(bias.expand_as(output))
    for tile in _tiles(_row(dense, embeddings), row_readable(weight)):
        products = tile.products()
        for columns in tile.column_shares():
            output[:, columns].addmm_(products, tile.folded(columns).t())
    return activations.activation(activation).function(output)


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
    """Compute the gradients of dense, embeddings, weight and bias. The workspace is that of the
    forward, and z's gradient."""
    pulled = activations.pulled_back(
        activation,
        grad_output,
        output,
        lambda: forward(dense, embeddings, weight, bias, "identity"),
    ).contiguous()
    z = _row(dense, embeddings)
    grad_z = torch.zeros_like(z) if needs[0] or needs[1] else None
    grad_weight = weight.new_empty(weight.shape) if needs[2] else None
    if pulled.numel() == 0 and grad_weight is not None:
        grad_weight.zero_()
    for tile in _tiles(z, row_readable(weight)) if pulled.numel() else ():
        if grad_z is not None:
            grad_products = tile.products_room().zero_()
            for columns in tile.column_shares():
                grad_products.addmm_(pulled[:, columns], tile.folded(columns))
            tile.pull(grad_products, grad_z)
        if grad_weight is not None:
            products = tile.products()
            for columns in tile.column_shares():
                grad_folded = tile.folded_room(columns)
                torch.mm(pulled[:, columns].t(), products, out=grad_folded)
                tile.unfold(grad_folded, grad_weight[columns])
    grad_dense, grad_embeddings = None, None
    if grad_z is not None:
        middle = dense.shape[1]
        plain = torch.contiguous_format
        if needs[0]:
            grad_dense = grad_z[:, :middle].clone(memory_format=plain)
        if needs[1]:
            grad_embeddings = grad_z[:, middle:].clone(memory_format=plain).view(embeddings.shape)
    return grad_dense, grad_embeddings, grad_weight, pulled.sum(0) if needs[3] else None


def _row(dense: Tensor, embeddings: Tensor) -> Tensor:
    """Return z, a sample's elements as one row, ``(B, K)``, contiguous."""
    return torch.cat([dense, embeddings.flatten(1)], dim=1)


class _Tile:
    """The products of 64 elements of z, from ``row`` on, with 64, from ``column`` on, of which
    those on and below the diagonal are taken; and what is computed of them.

    z ``(B, K)`` is contiguous, and the rows of the weight ``(N, K²)`` are. What the methods return
    lies in two workspaces that all tiles share: one for products, and one for weights.
    """

    def __init__(self, z: Tensor, weight: Tensor, rooms: Sequence[Tensor], place: tuple[int, int]):
        self.z, self.weight, self.rooms = z, weight, rooms
        row, column = place
        width = z.shape[1]
        squares = sum(
            (min(column + FOLD_TILE, first + BLOCK) - column) // BLOCK
            for first in range(row, min(row + FOLD_TILE, width), BLOCK)
        )
        self.pairs = squares * BLOCK * BLOCK
        self.sizes = (row, column, self.pairs)

    def column_shares(self) -> Iterator[slice]:
        """Yield the weight's rows in runs."""
        for first in range(0, self.weight.shape[0], _COLUMNS):
            yield slice(first, min(first + _COLUMNS, self.weight.shape[0]))

    def products_room(self) -> Tensor:
        """Return the workspace of the products, ``(B, pairs)``."""
        return self._room(0, self.z.shape[0])

    def folded_room(self, columns: slice) -> Tensor:
        """Return the workspace of folded weights, ``(columns, pairs)``."""
        return self._room(1, columns.stop - columns.start)

    def products(self) -> Tensor:
        """Return the products, ``(B, pairs)``."""
        products, (batch, width) = self.products_room(), self.z.shape
        self._launch("form", (self.z, products), (batch, width))
        return products

    def folded(self, columns: slice) -> Tensor:
        """Return the weights of the products, ``(columns, pairs)``."""
        weight, folded = self.weight[columns], self.folded_room(columns)
        sizes = (weight.shape[0], self.z.shape[1], self.weight.stride(0))
        self._launch("fold", (weight, folded), sizes)
        return folded

    def pull(self, grad_products: Tensor, grad_z: Tensor) -> None:
        """Add to ``grad_z`` what the gradient of the products passes on."""
        self._launch("pull", (self.z, grad_products, grad_z), self.z.shape)

    def unfold(self, grad_folded: Tensor, grad_weight: Tensor) -> None:
        """Write the gradient of the tile's weights, in rows that are K² apart."""
        sizes = (grad_folded.shape[0], self.z.shape[1])
        self._launch("unfold", (grad_folded, grad_weight), sizes)

    def _room(self, number: int, rows: int) -> Tensor:
        return self.rooms[number][: rows * self.pairs].view(rows, self.pairs)

    def _launch(self, kernel: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        numbers = map(i64, (*sizes, *self.sizes))
        CPP.launch(f"{kernel}<{CPP_NAMES[self.z.dtype]}>", (*tensors, *numbers))


def _tiles(z: Tensor, weight: Tensor) -> Iterator[_Tile]:
    """Yield the tiles that contain all pairs."""
    rows = (z.shape[0], min(_COLUMNS, weight.shape[0]))
    rooms = [z.new_empty(count * FOLD_TILE * FOLD_TILE) for count in rows]
    for row in range(0, z.shape[1], FOLD_TILE):
        for column in range(0, row + 1, FOLD_TILE):
            yield _Tile(z, weight, rooms, (row, column))
