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


# Numbers that meet, cross between two lanes, cross behind a vector, and never cross.
CROSSING = [
    (first, step, other, growth)
    for first in (-40, -8, -3, -1, 0, 1, 2, 7, 30)
    for step in (-2, -1, 0, 1, 3)
    for other, growth in ((0, 0), (1, 0), (-2, 1), (5, 1), (6, -2), (2**40, 0))
]


@pytest.mark.parametrize("dtype", NAMES, ids=["float32", "float64"])
def test_numbers_within_a_stretch(dtype):
    pairs = torch.tensor(CROSSING)
    lengths = torch.zeros(len(CROSSING), dtype=torch.int64)
    found = torch.full((len(CROSSING), 7, 16), 777)
    arguments = (pairs, lengths, found, i64(len(CROSSING)))
    SOURCE.launch(f"within_stretch<{NAMES[dtype]}>", arguments)
    lanes = int((found[0, 0] != 777).sum())
    for place, (first, step, other, growth) in enumerate(CROSSING):
        expected, course = [], []
        for lane in range(100):
            a, b = first + step * lane, other + growth * lane
            expected.append([a < b, a <= b, a == b, max(a, b), min(a, b), abs(a), abs(a) // 2])
            course.append((a < b, b < a, a < 0))
        # An even quotient of a step that is odd holds for one lane.
        length = next((lane for lane in range(100) if course[lane] != course[0]), 100)
        length = 1 if step % 2 else length
        assert min(int(lengths[place]), 100) == length, CROSSING[place]
        here = min(length, lanes)
        wanted = torch.tensor(expected[:here], dtype=torch.int64).T
        assert torch.equal(found[place, :, :here], wanted), CROSSING[place]


def test_a_stretch_ends_where_a_difference_does_not_fit():
    pairs = torch.tensor([(-(2**63), 1, 2**62, 0), (2**62 + 5, 1, 0, 0)])
    lengths = torch.zeros(2, dtype=torch.int64)
    SOURCE.launch("within_stretch<float>", (pairs, lengths, torch.zeros(2, 7, 16).long(), i64(2)))
    assert lengths.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", NAMES, ids=["float32", "float64"])
def test_quotients_are_rounded_towards_zero(dtype):
    firsts = (0, 1, -1, 5, -9, 2**30 - 64, -(2**30), 2**30 + 1, -(2**40) - 3, 2**52 + 1)
    divisors = (1, 2, 3, 7, 112, 2**30 - 1, 2**31 - 1, 2**31 + 1, -2)
    triples = list(itertools.product(firsts, (0, 1, -1, 3, 2**26 + 1), divisors))
    found = torch.full((len(triples), 16), 777)
    arguments = (torch.tensor(triples), found, i64(len(triples)))
    SOURCE.launch(f"divide<{NAMES[dtype]}>", arguments)
    lanes = int((found != 777).sum(1).max())
    for place, (first, step, by) in enumerate(triples):
        numbers = [first + step * lane for lane in range(lanes)]
        expected = [abs(one) // abs(by) * (1 if (one < 0) == (by < 0) else -1) for one in numbers]
        assert found[place, :lanes].tolist() == expected, triples[place]


def towards_zero(number, by):
    return abs(number) // abs(by) * (1 if (number < 0) == (by < 0) else -1)


@pytest.mark.parametrize("dtype", NAMES, ids=["float32", "float64"])
def test_small_numbers(dtype):
    """Quotients of numbers up to 2^30 are exact, found in single precision or not."""
    pairs = [
        (first, step, other, growth)
        for first in (0, 1, 2, 5, -7, 2**20 - 1, 2**24 + 1, 2**30 - 1000, -(2**30) + 100)
        for step in (0, 1, 2, 31, -1)
        for other, growth in ((0, 0), (1, 0), (-2, 1), (3, -2))
    ]
    found = torch.full((len(pairs), 9, 16), 777)
    reals = torch.zeros(len(pairs), 16, dtype=dtype)
    arguments = (torch.tensor(pairs), found, reals, i64(len(pairs)))
    SOURCE.launch(f"combine_small<{NAMES[dtype]}>", arguments)
    lanes = int((found[0, 0] != 777).sum())
    for place, (first, step, other, growth) in enumerate(pairs):
        expected = []
        for lane in range(lanes):
            a, b = first + step * lane, other + growth * lane
            third = towards_zero(a, 3)
            product = third * b
            if dtype == torch.float32:  # of which the lower 32 bits remain
                product = (product + 2**31) % 2**32 - 2**31
            chosen = third if third < b else a
            bigger, less = max(a, b), min(a, b)
            expected.append([a < b, a <= b, a == b, bigger, less, abs(a), third, product, chosen])
        wanted = torch.tensor(expected, dtype=torch.int64).T
        assert torch.equal(found[place, :, :lanes], wanted), pairs[place]
        assert torch.equal(reals[place, :lanes], wanted[8].to(dtype)), pairs[place]


@pytest.mark.parametrize(
    ("bounds", "is_small"),
    [
        ((0, 2**30, 0, 1), True),
        ((0, 2**30 + 1, 0, 1), False),  # a
        ((0, 9, -(2**30) - 1, 0), False),  # b
        ((0, 3 * 2**20, 0, 2**10), True),
        ((0, 3 * 2**20 + 3, 0, 2**10), False),  # their product
        ((-(3 * 2**20), 0, 0, 2**11), False),
        ((-(2**62), 2**62, 0, 0), False),
        ((-9, 9, -9, 9), True),
    ],
    ids=str,
)
def test_bounds_of_numbers(bounds, is_small):
    found = torch.zeros(1, dtype=torch.bool)
    SOURCE.launch("bound<float>", (torch.tensor(bounds), found, i64(1)))
    assert found.item() is is_small


@pytest.mark.parametrize(
    ("dtype", "element", "name"),
    [
        (torch.float32, torch.float32, "float"),
        (torch.float32, torch.int32, "int32_t"),
        (torch.float32, torch.bfloat16, "BFloat16"),
        (torch.float32, torch.int64, "int64_t"),
        (torch.float64, torch.float64, "double"),
        (torch.float64, torch.float32, "float"),
    ],
    ids=str,
)
def test_elements_are_gathered_where_a_mask_is_true(dtype, element, name):
    """Places lie within a vector of each other or not, before and behind the first, and those of
    lanes whose mask is false lie outside of the memory."""
    generator = torch.Generator().manual_seed(0)
    count, outside = 64, 2**28
    spread = torch.tensor([1, 2, 7, 16, 200])[torch.arange(count) % 5]
    places = (torch.rand(count, 16, generator=generator) * spread[:, None]).long()
    places[count // 2 :] += torch.randint(0, 50, (count - count // 2, 1), generator=generator)
    masks = torch.rand(count, 16, generator=generator) < torch.linspace(0, 1.2, count)[:, None]
    elements = torch.arange(1, 257).to(element)
    found = torch.zeros(count, 32, dtype=element)
    wanted = torch.where(masks, elements[places], torch.zeros((), dtype=element))
    hidden = torch.where(masks, places, outside)
    arguments = (elements, hidden, masks, found, i64(count))
    SOURCE.launch(f"gather<{NAMES[dtype]}, {name}>", arguments)
    lanes = int(found[-1, :16].ne(0).sum())
    assert lanes in (2, 4, 8, 16)
    assert torch.equal(found[:, :lanes], wanted[:, :lanes])
    seconds = found[:, 16 : 16 + lanes]
    if seconds.any():
        of_second = torch.where(masks, elements[0:32:2], torch.zeros((), dtype=element))
        assert torch.equal(seconds, of_second[:, :lanes])
