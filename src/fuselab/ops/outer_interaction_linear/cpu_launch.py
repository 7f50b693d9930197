"""Launchers for CPUs: PyTorch's matrix products, with C++ kernels between them, and the
``(B, K²)`` outer product never in memory.

A row of the weight is a matrix W_n of K x K, and output n is z W_n zᵀ: one matrix product for a run
of outputs, z with their W_n, and then a dot product with z. For many samples the forward takes the
pairs of a tile of elements at a time instead: it adds the weights of both places of a pair, which
halves the operations of the matrix products.

This multiplies the factors of a term in another order than PyTorch does, so that a product may
overflow here alone. Where one may have, the call is computed once more in PyTorch's order.
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
from fuselab.ops.outer_interaction_linear import reference
from fuselab.ops.outer_interaction_linear.folding import BLOCK, FOLD_TILE
from fuselab.runtime.cpp_source import CppSource, i64

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
_DTYPES = (torch.float32, torch.float64)
# Samples from which on halving the operations pays for the pass that adds the weights.
FOLDED_FROM = 384
SUMMED_FROM = 48  # samples from which on a second matrix product takes longer than W_n + W_nᵀ
_SHARE = 1 << 20  # elements of a share's workspace, unless those of one output are more
_PIECE = 1 << 22  # elements of the outer products of samples that PyTorch computes at a time
_COLUMNS = 256  # outputs whose weights are folded at a time: up to 4 MB of a tile in float32


def supports(dense: Tensor, *rest: Any) -> str | None:
    """Return None for float32 and float64, else the reason."""
    return None if dense.dtype in _DTYPES else "it takes float32 or float64"


def forward(
    dense: Tensor, embeddings: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """Compute the output. The workspace is up to 4 MB in float32, or K numbers a sample if that is
    more; for many samples a tile's products, 16 KB a sample, and its folded weights, up to 4 MB."""
    output = empty_output(dense, weight)
    if output.numel() == 0:
        return output
    if bias is None:
        output.zero_()
    else:
        output.copy_(bias.expand_as(output))
    z, rows = _row(dense, embeddings), row_readable(weight)
    if z.shape[0] < FOLDED_FROM and z.numel():
        for share in _Share.all_of(z, rows):
            output[:, share.columns] += share.outputs()
    else:
        for tile in _tiles(z, rows):
            products = tile.products()
            for columns in tile.column_shares():
                output[:, columns].addmm_(products, tile.folded(columns).t())
    if not output.isfinite().all():
        output = torch.cat(
            [
                reference.reference(dense[piece], embeddings[piece], weight, bias)
                for piece in _pieces(z)
            ]
        )
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
    """Compute the gradients of dense, embeddings, weight and bias, some outputs at a time.

    With g the gradient of the pre-activation and W_n the matrix of output n, z's gradient is the
    sum over n of (g_n z) (W_n + W_nᵀ), and W_n's is (g_n z)ᵀ z. For few samples z is multiplied by
    both matrices, which are not added. The workspace is z's gradient,
    and two pieces of up to 4 MB in float32, or K numbers a sample and K² if that is more.
    """
    pulled = activations.pulled_back(
        activation,
        grad_output,
        output,
        lambda: forward(dense, embeddings, weight, bias, "identity"),
    )
    z, rows = _row(dense, embeddings), row_readable(weight)
    if pulled.numel() and z.numel() and not _stay_finite(pulled, z):
        return _in_pieces(needs, pulled, dense, embeddings, weight, bias)
    grad_z = torch.zeros_like(z) if needs[0] or needs[1] else None
    make_weight = weight.new_empty if pulled.numel() else weight.new_zeros
    grad_weight = make_weight(weight.shape) if needs[2] else None
    if pulled.numel() and z.numel() and any(needs[:3]):
        with_sums = grad_z is not None and z.shape[0] >= SUMMED_FROM
        for share in _Share.all_of(z, rows, with_sums):
            if grad_z is not None and not with_sums:
                grad_z += share.pulled_through(pulled)
            scaled = share.scaled(pulled)
            if grad_z is not None:
                grad_z.addmm_(scaled, share.sums() if with_sums else share.matrices())
            if grad_weight is not None:
                own = grad_weight[share.columns].view(-1, z.shape[1])
                torch.mm(scaled.t(), z, out=own)
    if grad_z is not None and not grad_z.isfinite().all():
        return _in_pieces(needs, pulled, dense, embeddings, weight, bias)
    grad_dense, grad_embeddings = None, None
    if grad_z is not None:
        middle = dense.shape[1]
        plain = torch.contiguous_format
        if needs[0]:
            grad_dense = grad_z[:, :middle].clone(memory_format=plain)
        if needs[1]:
            grad_embeddings = grad_z[:, middle:].clone(memory_format=plain).view(embeddings.shape)
    return grad_dense, grad_embeddings, grad_weight, pulled.sum(0) if needs[3] else None


def _stay_finite(pulled: Tensor, z: Tensor) -> bool:
    """Return whether no product of a gradient with one element of z, or with two, summed over the
    samples, can overflow; False if there is an infinity or a NaN."""
    limit = torch.finfo(z.dtype).max / 4
    largest = float(z.abs().amax())
    product = float(pulled.abs().amax()) * largest
    return product < limit and product * largest * z.shape[0] < limit


def _pieces(z: Tensor) -> Iterator[slice]:
    """Yield runs of samples, whose outer products have at most ``_PIECE`` elements, or one
    sample's."""
    most = max(1, _PIECE // max(z.shape[1], 1) ** 2)
    for first in range(0, z.shape[0], most):
        yield slice(first, first + most)


def _in_pieces(
    needs: Sequence[bool],
    pulled: Tensor,
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients by the reference's formulas, a run of samples at a time."""
    parts = [
        reference.gradient(
            needs, pulled[piece], None, dense[piece], embeddings[piece], weight, bias, "identity"
        )
        for piece in _pieces(_row(dense, embeddings))
    ]
    found: list[Tensor | None] = []
    for place, needed in enumerate(needs):
        tensors = [tensor for part in parts if (tensor := part[place]) is not None]
        if not needed:
            found.append(None)
        elif place < 2:  # dense and embeddings hold samples
            found.append(torch.cat(tensors))
        else:
            found.append(torch.stack(tensors).sum(0))
    return tuple(found)


class _Share:
    """Some outputs of the layer, and what is computed for them with the outer product left out.

    z ``(B, K)`` is contiguous, and the rows of the weight ``(N, K²)`` are. What the methods return
    lies in workspaces that all shares use.
    """

    def __init__(self, z: Tensor, weight: Tensor, columns: slice, rooms: Sequence[Tensor]):
        self.z, self.weight, self.columns, self.rooms = z, weight[columns], columns, rooms
        self.count, self.width = self.weight.shape[0], z.shape[1]

    @classmethod
    def all_of(cls, z: Tensor, weight: Tensor, with_sums: bool = False) -> Iterator[_Share]:
        """Yield the shares that contain all outputs; ``with_sums`` gives ``sums`` its room."""
        lengths = z.shape if with_sums else z.shape[:1]
        most = min(max(1, _SHARE // (z.shape[1] * max(lengths))), weight.shape[0])
        rooms = [z.new_empty(most * z.shape[1] * length) for length in lengths]
        for first in range(0, weight.shape[0], most):
            yield cls(z, weight, slice(first, min(first + most, weight.shape[0])), rooms)

    def matrices(self) -> Tensor:
        """Return W_n of each output, ``(outputs x K, K)``."""
        return self.weight.reshape(-1, self.width)

    def products(self) -> Tensor:
        """Return z W_nᵀ of each sample and output, ``(B, outputs, K)``."""
        room = self._room(0, self.z.shape[0], self.count * self.width)
        return torch.mm(self.z, self.matrices().t(), out=room).view(-1, self.count, self.width)

    def outputs(self) -> Tensor:
        """Return z W_n zᵀ of each sample and output, ``(B, outputs)``."""
        return torch.bmm(self.products(), self.z.unsqueeze(2)).squeeze(2)

    def pulled_through(self, pulled: Tensor) -> Tensor:
        """Return the sum over the outputs of g_n z W_nᵀ, ``(B, K)``."""
        return torch.bmm(pulled[:, self.columns].unsqueeze(1), self.products()).squeeze(1)

    def scaled(self, pulled: Tensor) -> Tensor:
        """Return g_n z of each sample and output, ``(B, outputs x K)``."""
        room = self._room(0, self.z.shape[0], self.count * self.width)
        own = pulled[:, self.columns].unsqueeze(2)
        torch.mul(own, self.z.unsqueeze(1), out=room.view(-1, self.count, self.width))
        return room

    def sums(self) -> Tensor:
        """Return W_n + W_nᵀ of each output, ``(outputs x K, K)``."""
        room = self._room(1, self.count * self.width, self.width)
        sizes = map(i64, (self.count, self.width, self.weight.stride(0)))
        CPP.launch(f"add_transposed<{CPP_NAMES[self.z.dtype]}>", (self.weight, room, *sizes))
        return room

    def _room(self, number: int, rows: int, columns: int) -> Tensor:
        return self.rooms[number][: rows * columns].view(rows, columns)


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

    def products(self) -> Tensor:
        """Return the products, ``(B, pairs)``."""
        batch, width = self.z.shape
        products = self._room(0, batch)
        self._launch("form", (self.z, products), (batch, width))
        return products

    def folded(self, columns: slice) -> Tensor:
        """Return the weights of the products, ``(columns, pairs)``."""
        weight, folded = self.weight[columns], self._room(1, columns.stop - columns.start)
        sizes = (weight.shape[0], self.z.shape[1], self.weight.stride(0))
        self._launch("fold", (weight, folded), sizes)
        return folded

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
