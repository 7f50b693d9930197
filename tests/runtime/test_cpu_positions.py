"""Arithmetic and comparisons of cpu_positions.h against Python's integers."""

from __future__ import annotations

import itertools
import operator
from pathlib import Path

import pytest
import torch

from fuselab.runtime.cpp_source import CppSource, i64

SOURCE = CppSource(Path(__file__).with_name("cpu_positions_check.cpp"))
NAMES = {torch.float32: "float", torch.float64: "double"}
# Beyond 2^26 a step, and beyond 2^30 a difference, does not fit the lanes of float32; the
# difference of the outermost two does not fit 64 bits.
FIRST = [0, 3, -7, 2**30, -(2**30) - 1, 2**31 + 5, 2**40, 2**62, -(2**63) + 2**40]
STEPS = [0, 1, -2, 3, 2**26 + 1, -(2**33)]
PAIRS = [
    (*one, *other)
    for one, other in itertools.product(itertools.product(FIRST, STEPS), repeat=2)
    if other[1] in (0, 1, 3)
]


def wrapped(number):
    return (number + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", NAMES, ids=["float32", "float64"])
def test_comparisons_are_exact(dtype):
    pairs = torch.tensor(PAIRS)
    masks = torch.full((len(PAIRS), 8, 16), 7)
    SOURCE.launch(f"compare<{NAMES[dtype]}>", (pairs, masks, i64(len(PAIRS))))
    lanes = int((masks[0, 0] != 7).sum())
    comparisons = (operator.lt, operator.le, operator.eq, operator.ne)
    expected = [
        [
            [
                -int(compare(wrapped(first + step * lane), wrapped(other + growth * lane)))
                for lane in range(lanes)
            ]
            for compare in comparisons
        ]
        for first, step, other, growth in PAIRS
    ]
    wanted = torch.tensor(expected)
    assert torch.equal(masks[:, 4:, :lanes], wanted)
    assert torch.equal(masks[:, :4, :lanes], wanted)


@pytest.mark.parametrize("dtype", NAMES, ids=["float32", "float64"])
def test_sums_and_their_conversion_are_exact(dtype):
    pairs = torch.tensor(PAIRS)
    sums, reals = torch.full((len(PAIRS), 16), 777), torch.zeros(len(PAIRS), 16, dtype=dtype)
    SOURCE.launch(f"combine<{NAMES[dtype]}>", (pairs, sums, reals, i64(len(PAIRS))))
    lanes = int((sums[0] != 777).sum())
    expected = torch.tensor(
        [
            [wrapped(3 * (a + s * lane) - (b + g * lane) + 2) for lane in range(lanes)]
            for a, s, b, g in PAIRS
        ]
    )
    assert torch.equal(sums[:, :lanes], expected)
    assert torch.equal(reals[:, :lanes], expected.to(dtype))
