"""Adding rows at positions: as index_put_ adds them."""

from __future__ import annotations

import pytest
import torch

from fuselab.runtime.scatter import added_along


@pytest.mark.parametrize("index_shape", [(), (1,), (7,), (3, 4), (0,), (2, 0)])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_added_where_the_index_says(dim: int, index_shape: tuple[int, ...]) -> None:
    base = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
    index = torch.randint(5, index_shape, generator=torch.Generator().manual_seed(0))
    shape = (*base.shape[:dim], *index_shape, *base.shape[dim + 1 :])
    values = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape) + 1
    expected = base.clone()
    torch.ops.aten.index_put_(expected, [*[None] * dim, index], values, True)
    given = base.clone()
    added = added_along(given, dim, index, values)
    assert added is given
    assert torch.equal(added, expected)
    assert torch.equal(base, expected) == (values.numel() == 0)
