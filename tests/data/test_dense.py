"""The dense transforms against their formulas, missing and negative counts first."""

from __future__ import annotations

import math

import numpy
import pytest

from fuselab.data import MISSING_COUNT, Dense
from fuselab.errors import ArgumentError, UnknownNameError

COUNTS = (MISSING_COUNT, -3, -2, -1, 0, 1, 10**15)
FLOATS = (math.nan, *COUNTS[1:])
LOW = -2.0


@pytest.mark.parametrize("counts", [COUNTS, FLOATS], ids=["int64", "float32"])
@pytest.mark.parametrize(
    ("dense", "formula"),
    [
        (Dense(), lambda x: math.log(max(x, 0) + 1)),
        (Dense("log3"), lambda x: math.log(max(x, -2) + 3)),
        (Dense("shifted", (LOW,) * 13), lambda x: math.log(max(x, LOW) - (LOW - 2))),
    ],
    ids=["log1p", "log3", "shifted"],
)
def test_formulas_with_missing_as_0(counts, dense: Dense, formula) -> None:
    dtype = numpy.int64 if counts is COUNTS else numpy.float32
    found = dense(numpy.tile(numpy.array(counts, dtype)[:, None], 13))
    assert found.dtype == numpy.float32
    expected = [formula(count) for count in (0, *COUNTS[1:])]
    assert found[:, 0] == pytest.approx(expected, rel=1e-6)
    assert (found == found[:, :1]).all()


def test_bad_transforms_are_refused() -> None:
    with pytest.raises(UnknownNameError) as refused:
        Dense("log2")
    assert (refused.value.kind, refused.value.name) == ("dense transform", "log2")
    with pytest.raises(ArgumentError, match="needs the smallest value of each of the 13"):
        Dense("shifted")
