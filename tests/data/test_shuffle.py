"""The keyed order: every row once, decided by the key, and no order that is easy to see."""

from __future__ import annotations

import numpy
import pytest

from fuselab.data.shuffle import permutation
from fuselab.errors import ArgumentError


@pytest.mark.parametrize("rows", [*range(20), 31, 32, 33, 32_767, 32_768, 32_769, 65_537, 2**20])
def test_every_row_comes_once(rows: int) -> None:
    assert numpy.array_equal(numpy.sort(permutation(rows, (1, 2))), numpy.arange(rows))


def test_the_order_is_the_same_forever() -> None:
    # Written down from the first version: a checkpoint resumed by a later one must see these.
    assert permutation(10, (0, 0, 0)).tolist() == [5, 0, 7, 9, 3, 1, 8, 2, 6, 4]
    assert int(permutation(2**20, (7, 3, 11))[:1000].astype(numpy.int64).sum()) == 514050521


def test_another_key_gives_another_order() -> None:
    orders = {tuple(permutation(100, key)) for key in ((0, 0), (0, 1), (1, 0), (1, 1), (2**40, 0))}
    assert len(orders) == 5


def test_places_neighbours_and_batches_are_as_random_ones() -> None:
    orders = numpy.stack([permutation(100, (seed,)) for seed in range(4000)])
    for seen, kinds in ((orders[:, 0], 100), ((orders[:, 1] - orders[:, 0]) % 100 - 1, 99)):
        expected = len(seen) / kinds
        chi_squared = ((numpy.bincount(seen, minlength=kinds) - expected) ** 2 / expected).sum()
        assert chi_squared < 1.5 * kinds  # its mean is kinds - 1, its deviation 14
    batches = numpy.sort(permutation(2**20, (5,)).reshape(-1, 128), axis=1)
    gaps = numpy.diff(batches, axis=1) / (2**20 / 129)
    assert (gaps < 0.1).mean() == pytest.approx(1 - numpy.exp(-0.1), abs=0.003)


def test_a_window_that_no_index_reaches_is_refused() -> None:
    with pytest.raises(ArgumentError, match="expected fewer than 2"):
        permutation(2**31, (0,))
