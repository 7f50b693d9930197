"""Adding rows at positions: as index_put_ adds them."""

from __future__ import annotations

import pytest
import torch

from fuselab.runtime.scatter import added_along, added_at


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


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_values_are_added_where_several_indices_say(dim: int) -> None:
    """From the end, too, and values that broadcast."""
    generator = torch.Generator().manual_seed(dim)
    base = torch.arange(360.0, dtype=torch.float64).reshape(3, 4, 5, 6)
    sizes = base.shape[dim : dim + 2]
    rows = torch.randint(-sizes[0], sizes[0], (7, 1), generator=generator)
    columns = torch.randint(-sizes[1], sizes[1], (5,), generator=generator)
    behind = base.shape[dim + 2 :]
    shape = (*base.shape[:dim], 7, 5, *behind)
    for values in (torch.rand(shape, generator=generator), torch.rand(behind[-1:] or (5,))):
        expected = base.clone()
        where = [*[None] * dim, rows, columns]
        torch.ops.aten.index_put_(expected, where, values.double(), True)
        given = base.clone()
        assert added_at(given, dim, (rows, columns), values) is given
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


def test_an_empty_index_adds_nothing() -> None:
    base = torch.ones(0, 3)
    index = torch.zeros(0, dtype=torch.int64)
    assert added_at(base, 0, (index,), torch.ones(0, 3)).shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 5, 1), (3, 40, 257), (70000, 3, 2), (2, 1000, 4096)])
def test_a_gpu_adds_the_same(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Or does so in a fixed order."""
    generator = torch.Generator("cuda").manual_seed(0)
    outer, size, inner = shape
    base = torch.zeros(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    base = base.cuda()
    count = 3 * size
    index = torch.randint(size, (count,), generator=generator, device="cuda")
    values = torch.randn(outer, count, inner, generator=generator, device="cuda").to(dtype)
    expected = base.double().clone()
    torch.ops.aten.index_put_(expected, [None, index], values.double(), True)
    found = added_along(base.clone(), 1, index, values)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    transposed = values.transpose(0, 2).contiguous().transpose(0, 2)
    found = added_at(base.clone(), 1, (index - size,), transposed)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.use_deterministic_algorithms(True)
    try:
        found = [added_along(base.clone(), 1, index, values) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)
