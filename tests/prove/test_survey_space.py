"""The points of a survey: they repeat, they cover the sizes, and every operator has them."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
import torch
from bench_operators import case, operator, scaled_relu
from torch import Tensor

from fuselab import ops
from fuselab.op import Case, Draw, FusedOp, Implementation, Inputs
from fuselab.prove.survey_space import LEAST_BYTES, Space, SurveyDraw, point_of, title_of

CPU = torch.device("cpu")
META = torch.device("meta")


def made(op: FusedOp, seed: int, index: int, values: int = 0) -> tuple[object, ...]:
    point = point_of(op, Space.of(op, CPU), seed, index)
    generator = torch.Generator().manual_seed(values)
    return op.bind(point.case.make(CPU, point.dtype, generator))


def test_a_point_repeats_by_seed_and_number_with_new_values_on_request() -> None:
    op = ops.contract("bias_activation")
    for index in range(6):
        (one, *_), (same, *_), (other, *_) = (made(op, 5, index, values) for values in (0, 0, 1))
        assert isinstance(one, Tensor) and isinstance(same, Tensor) and isinstance(other, Tensor)
        assert one.stride() == same.stride() == other.stride() and one.shape == other.shape
        assert torch.equal(one, same) and not torch.equal(one, other)
    titles = [
        {point_of(op, Space.of(op, CPU), seed, index).title for index in range(6)}
        for seed in (5, 6)
    ]
    assert len(titles[0]) == 6 and not titles[0] & titles[1]


def test_any_number_of_targets_covers_the_sizes_evenly() -> None:
    space = Space((torch.float32,), 1e9, 4e12)
    for count in (12, 40, 100):
        logs = sorted(math.log10(space.target_bytes(3, index)) for index in range(count))
        assert logs[0] >= math.log10(LEAST_BYTES) and logs[-1] <= 9
        gaps = [after - before for before, after in zip([3.0, *logs], [*logs, 9.0], strict=True)]
        assert max(gaps) < 3 * 6 / count


@pytest.mark.parametrize("name", ops.operators())
def test_every_operator_has_points_near_their_targets(name: str) -> None:
    op = ops.contract(name)
    space = Space.of(op, CPU)
    assert torch.float64 not in space.dtypes
    points = [point_of(op, space, 2, index) for index in range(5)]
    assert {point.dtype for point in points} == set(space.dtypes)
    shares = []
    for index, point in enumerate(points):
        target = space.target_bytes(2, index)
        assert 0 < point.moved_bytes <= target
        if target < 1e6:
            args = op.bind(point.case.make(CPU, point.dtype, torch.Generator().manual_seed(0)))
            op.validate(*args)
            assert title_of(op, args) == point.case.name
        shares.append(point.moved_bytes / target)
    assert sorted(shares)[len(shares) // 2] > 0.5


def test_sizes_are_odd_even_and_powers_and_never_zero() -> None:
    sizes = [
        SurveyDraw(META, torch.float32, random.Random(seed), 12.0).size() for seed in range(400)
    ]
    assert min(sizes) >= 2**3 and max(sizes) <= 2**12 + 1
    assert 60 < sum(size % 2 for size in sizes) < 200
    assert 60 < sum(size & (size - 1) == 0 for size in sizes) < 200
    smallest = [SurveyDraw(META, torch.float32, random.Random(seed), 0.0).size() for seed in (1, 2)]
    assert smallest == [1, 1]


def test_a_size_is_one_of_the_interesting_ones_where_it_is_near() -> None:
    drawn = [
        SurveyDraw(META, torch.float32, random.Random(seed), 9.0).size(50257, 130)
        for seed in range(200)
    ]
    assert 5 < drawn.count(130) < 60 and 50257 not in drawn


def test_layouts_are_strided_in_a_part_of_the_points() -> None:
    op = ops.contract("square")
    space = Space.of(op, CPU)
    strided = sum("*" in point_of(op, space, 0, index).title for index in range(100))
    assert 5 <= strided <= 30


def shifted(input: Tensor, other: Tensor, scale: float = 2.0) -> Tensor:
    return input + other * scale


def test_an_operator_without_draw_varies_the_sizes_of_a_case() -> None:
    op = FusedOp(
        name="survey_tests::shifted",
        reference=shifted,
        implementations={"plain": Implementation("cpu", shifted)},
        cases=(Case.normal([(64, 48), (48,)]),),
    )
    widths = set()
    for index in range(8):
        input, other, scale = made(op, 0, index)
        assert isinstance(input, Tensor) and isinstance(other, Tensor) and scale == 2.0
        assert input.ndim == 2 and other.shape == input.shape[1:]
        widths.add(other.shape)
    assert len(widths) > 4


def test_products_are_bounded_where_no_cost_is_declared() -> None:
    def product(input: Tensor, weight: Tensor) -> Tensor:
        return input @ weight

    op = FusedOp(
        name="survey_tests::product",
        reference=product,
        implementations={},
        cases=(Case.normal([(64, 32), (32, 48)]),),
    )
    space = Space((torch.float32,), 1e9, 1e6)
    for index in range(6):
        title = point_of(op, space, 0, index).case.name
        rows, depth, _, columns = map(int, re.findall(r"\d+", title))
        assert 2 * rows * depth * columns <= 1e6


def test_an_operator_of_integers_is_surveyed_on_its_cases() -> None:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return Inputs((torch.arange(7, device=device),))

    op = FusedOp(
        name="survey_tests::integers",
        reference=scaled_relu,
        implementations={},
        cases=(Case("seven", make), case(4, 4)),
    )
    (input, _) = made(op, 0, 0)
    assert isinstance(input, Tensor) and input.is_floating_point()
    only = FusedOp(
        name="survey_tests::seven", reference=scaled_relu, implementations={}, cases=op.cases[:1]
    )
    assert point_of(only, Space.of(only, CPU), 0, 3).case.name == "seven"


def test_space_takes_the_place_of_draw() -> None:
    def space(draw: Draw) -> Inputs:
        return Inputs((draw.tensor(draw.size(), 3),))

    op = operator("spaced", plain=scaled_relu)
    spaced = replace(op, space=space, draw=lambda draw: Inputs((draw.tensor(draw.size(), 5),)))
    for index in range(4):
        (input, _) = made(spaced, 0, index)
        assert isinstance(input, Tensor) and input.shape[1] == 3


def test_the_title_names_what_is_not_the_default() -> None:
    op = ops.contract("softmax")
    input = torch.zeros(4, 6)
    assert title_of(op, op.bind(Inputs((input,), {"dim": -1}))) == "4x6"
    assert title_of(op, op.bind(Inputs((input.t(),), {"dim": 0}))) == "6x4*, dim=0"
    lookup = ops.contract("embedding_lookup")
    tables = [torch.zeros(rows, 4) for rows in (3, 9, 5, 3)]
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert title_of(lookup, lookup.bind(Inputs((tables, ids)))) == "[4 up to 9x4], 2x4"
