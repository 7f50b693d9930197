"""Add rows to a tensor at positions that other tensors hold, on each device in the fastest way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.runtime.triton_scatter import launch_add_rows

_MOST_TURNS = 65535  # of the last dimension of a grid


def added_along(base: Tensor, dim: int, index: Tensor, values: Tensor) -> Tensor:
    """Add ``values`` to ``base``, which is written over and returned, at positions along ``dim``.

    ``values`` has the dimensions of ``index`` in the place of ``dim``. Positions are not negative.

    On a GPU atomic additions reach one position in any order, as those of ``index_add_`` do. Under
    ``torch.use_deterministic_algorithms``, ``index_put_`` sorts the positions, which takes several
    times as long. On a CPU ``index_add_`` takes one position after the other, without
    ``index_put_``'s work for each element.
    """
    if not base.is_cuda:
        shape = (*values.shape[:dim], index.numel(), *values.shape[dim + index.dim() :])
        return base.index_add_(dim, index.flatten(), values.reshape(shape).to(base.dtype))
    is_plain = (
        base.is_contiguous()
        and base.dtype in (torch.float32, torch.float64)
        and base.shape[:dim].numel() <= _MOST_TURNS
        and not torch.are_deterministic_algorithms_enabled()
    )
    if not is_plain:
        where = [*[None] * dim, index]
        added: Tensor = torch.ops.aten.index_put_(base, where, values.to(base.dtype), True)
        return added
    launch_add_rows(base, dim, index.contiguous(), values.contiguous())
    return base


def added_at(base: Tensor, dim: int, indices: Sequence[Tensor], values: Tensor) -> Tensor:
    """Add ``values`` to ``base``, which is contiguous, written over and returned, at positions
    along as many dimensions from ``dim`` on as there are ``indices``.

    ``values`` has the dimensions of the indices together in their place, or broadcasts to these. A
    negative position counts from the end. The order is that of ``added_along``.
    """
    place = _from_start(indices[0], base.shape[dim])
    for index, size in zip(indices[1:], base.shape[dim + 1 :], strict=False):
        place = place * size + _from_start(index, size)
    last = dim + len(indices)
    shape = (*base.shape[:dim], *place.shape, *base.shape[last:])
    rows = base.view(*base.shape[:dim], base.shape[dim:last].numel(), *base.shape[last:])
    added_along(rows, dim, place, values.expand(shape))
    return base


def _from_start(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index)
