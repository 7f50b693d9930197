"""Draws replay, cover what they promise, and shrink."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from gallery import honest
from torch import Tensor

from fuselab.errors import ArgumentError
from fuselab.op import Case, Draw, FusedOp, Implementation, Inputs
from fuselab.prove.draw import LARGE, LAYOUTS, VALUES, RecordedDraw, lay_out, make_values
from fuselab.prove.shrink import shrink
from fuselab.prove.subject import Subject
from fuselab.runtime.signature import accepted

CPU = torch.device("cpu")


def draw(seed: int = 0, **options: object) -> RecordedDraw:
    return RecordedDraw(CPU, torch.float32, source=random.Random(seed), **options)  # type: ignore[arg-type]


def test_replay_gives_the_same_tensors() -> None:
    for seed in range(50):
        first = draw(seed)
        shape = (first.size(64), first.size())
        tensor = first.tensor(*shape)
        number = first.uniform(-1, 1)
        again = RecordedDraw(CPU, torch.float32, replay=first.choices)
        assert (again.size(64), again.size()) == shape
        repeated = again.tensor(*shape)
        assert repeated.stride() == tensor.stride()
        assert torch.equal(repeated.view(torch.int32), tensor.view(torch.int32)) or (
            torch.equal(
                repeated.contiguous().view(torch.int32), tensor.contiguous().view(torch.int32)
            )
        )
        assert again.uniform(-1, 1) == number
        assert again.choices == first.choices


def test_all_zero_choices_are_the_simplest_case() -> None:
    simplest = RecordedDraw(CPU, torch.float32, replay=[])
    assert simplest.size(1024) == 1
    assert simplest.choice(["a", "b"]) == "a"
    tensor = simplest.tensor(2, 3)
    assert tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.isfinite().all()


def test_sizes_stay_within_the_room() -> None:
    for seed in range(200):
        some = draw(seed, max_numel=100)
        assert some.size(1000) * max(some.size(1000), 1) * max(some.size(), 1) <= 100


def test_sizes_reach_every_interesting_one() -> None:
    seen = {draw(seed).size(77) for seed in range(800)}
    assert {0, 1, 2, 3, 76, 77, 78, 63, 64, 65, 1023, 1024, 1025} <= seen


def test_shapes_have_one_to_three_dimensions_and_an_interesting_last_one() -> None:
    assert RecordedDraw(CPU, torch.float32, replay=[]).shape(77) == (1, 1)
    shapes = [draw(seed).shape(77) for seed in range(800)]
    assert {len(shape) for shape in shapes} == {1, 2, 3}
    assert {0, 1, 76, 77, 78} <= {shape[-1] for shape in shapes}
    first = draw(5)
    shape = first.shape(77)
    assert RecordedDraw(CPU, torch.float32, replay=first.choices).shape(77) == shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 5), (0, 4)])
def test_layouts_hold_the_values(layout: str, shape: tuple[int, ...]) -> None:
    values = make_values("normal", shape, torch.float32, seed=1)
    tensor = lay_out(values, layout, CPU)
    assert tensor.shape == values.shape
    if layout.startswith("expanded") or layout == "one element":
        assert tensor.isfinite().all()
    else:
        assert torch.equal(tensor, values)


def test_layouts_are_what_they_are_called() -> None:
    values = make_values("normal", (3, 4), torch.float32, seed=1)
    strides = {layout: lay_out(values, layout, CPU).stride() for layout in LAYOUTS}
    assert strides == {
        "contiguous": (4, 1),
        "odd offset": (4, 1),
        "transposed": (1, 3),
        "padded rows": (7, 1),
        "padded outer": (6, 1),
        "swapped": (1, 3),
        "rotated": (4, 1),
        "every other": (8, 2),
        "every other row": (8, 1),
        "expanded": (1, 0),
        "expanded rows": (0, 1),
        "expanded middle": (4, 1),
        "one element": (0, 0),
        "gaps": (11, 2),
        "transposed gaps": (2, 8),
    }
    assert lay_out(values, "odd offset", CPU).storage_offset() == 4099
    assert lay_out(values, "transposed", CPU).storage_offset() == 0
    assert lay_out(values, "expanded", CPU).storage_offset() == 4099
    deep = make_values("normal", (3, 4, 5), torch.float32, seed=1)
    assert lay_out(deep, "expanded middle", CPU).stride() == (5, 0, 1)
    assert lay_out(deep, "expanded", CPU).storage_offset() == 0


def test_memory_between_elements_is_nan() -> None:
    tensor = lay_out(torch.ones(3, 4), "every other", CPU)
    whole = torch.as_strided(tensor, (3, 8), (8, 1), 0)
    assert whole[:, 0::2].isnan().all() and (whole[:, 1::2] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", VALUES)
def test_kinds_hold_what_they_promise(kind: str, dtype: torch.dtype) -> None:
    values = make_values(kind, (8, 32), dtype, seed=3)
    limits = torch.finfo(dtype)
    largest = 2.0**500 if dtype == torch.float64 else limits.max  # its square is finite
    promise = {
        "normal": lambda: values.isfinite().all(),
        "zeros": lambda: (values == 0).all() and values.signbit().any(),
        "equal": lambda: (values == values[:, :1]).all() and len(values.unique()) == 8,
        "wide": lambda: values.isfinite().all() and values.abs().max() > 8 * values.abs().median(),
        "large negative": lambda: (values < -150).all(),
        "subnormal": lambda: (values.abs() < limits.tiny).all() and (values != 0).any(),
        "one max": lambda: (values.abs() == largest).sum() == 1,
        "infinities": lambda: (values == math.inf).any() and (values == -math.inf).any(),
        "masked": lambda: (values.isinf() == (torch.arange(32) < 16)).all() and values.max() < 9,
        "NaN": lambda: values.isnan().sum() == 16,
    }
    assert promise[kind]()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3)])
@pytest.mark.parametrize("kind", VALUES)
def test_every_kind_has_every_shape(kind: str, shape: tuple[int, ...]) -> None:
    assert make_values(kind, shape, torch.float32, seed=4).shape == shape


def test_turns_leave_no_kind_and_no_tensor_out() -> None:
    seen = set()
    for turn in range(4 * (len(VALUES) - 1)):
        some = draw(turn, layouts=("contiguous",), values=VALUES, turn=turn)
        for number in range(3):
            some.tensor(4, 4)
            kind = some.notes[-1].split("] ")[1]
            if kind != "normal":
                seen.add((number, kind))
    assert seen == {(number, kind) for number in range(3) for kind in VALUES[1:]}


def test_a_quick_run_leaves_out_names_but_no_layout_and_no_kind_of_values() -> None:
    names, seen = set(), set()
    for seed in range(400):
        some = draw(seed, names=random.Random("the operator's"))
        names.add(some.choice(["relu", "gelu", "silu", "tanh"]))
        some.tensor(4, 4)
        seen.add((some.choices[1], some.choices[2]))
    assert len(names) == 2
    assert {layout for layout, _ in seen} == set(range(len(LAYOUTS)))
    assert {kind for _, kind in seen} == set(range(len(VALUES)))


def test_integers_lie_in_their_range_in_every_layout() -> None:
    seen = set()
    for seed in range(300):
        some = draw(seed)
        tensor = some.integers(3, 4, low=-2, high=9, dtype=torch.int32)
        assert tensor.dtype == torch.int32 and tensor.shape == (3, 4)
        assert tensor.min() >= -2 and tensor.max() < 9
        whole = torch.empty(0, dtype=torch.int32).set_(tensor.untyped_storage())
        assert whole.min() >= -2 and whole.max() < 9  # reading a neighbour is wrong, and no crash
        seen.add((some.choices[0], some.notes[-1].split("] ")[1].split(" in")[0]))
        again = RecordedDraw(CPU, torch.float32, replay=some.choices)
        assert torch.equal(again.integers(3, 4, low=-2, high=9, dtype=torch.int32), tensor)
    assert {layout for layout, _ in seen} == set(range(len(LAYOUTS)))
    assert {"any", "equal", "ends"} <= {kind.split(" ")[-1] for _, kind in seen}
    with pytest.raises(ValueError, match="no integer lies in"):
        draw().integers(2, low=3, high=3)


def test_a_replayed_turn_is_the_same_case() -> None:
    for turn in range(20):
        some = draw(turn, turn=turn)
        some.tensor(3, 5)
        again = RecordedDraw(CPU, torch.float32, replay=some.choices)
        again.tensor(3, 5)
        assert again.notes == some.notes


def test_shrink_finds_the_smallest_and_counts_its_tries() -> None:
    tried = []

    def fails(choices: Sequence[int]) -> Sequence[int] | None:
        tried.append(list(choices))
        padded = [*choices, 0, 0, 0][:3]
        return padded if padded[0] >= 7 and padded[2] >= 3 else None

    assert shrink([100, 50, 90], fails, tries=200) == [7, 0, 3]
    tried.clear()
    shrink([100, 50, 90], fails, tries=10)
    assert len(tried) == 10


def test_shrink_keeps_a_case_that_cannot_be_smaller() -> None:
    assert shrink([4, 2], lambda choices: None) == [4, 2]


def test_upstream_gradients_are_finite() -> None:
    for seed in range(200):
        some = draw(seed)
        assert some.gradient(3, 4, dtype=torch.float32).isfinite().all()


def test_a_draw_that_the_reference_refuses_twenty_times_is_no_trial() -> None:
    """Each retry leaves less room for sizes, until only empty tensors fit."""

    def reference(x: Tensor) -> Tensor:
        return x.amax(0)

    with pytest.raises(ArgumentError):
        accepted(reference, lambda: (torch.ones(0, 3),))
    sizes = iter([0, 0, 3])
    assert accepted(reference, lambda: (torch.ones(next(sizes), 3),))[0].shape == (3, 3)
    refusing = honest.make_op("refusing", draw=lambda _: Inputs(accepted(reference, _nothing)))
    subject = Subject.here(refusing, "plain", CPU, torch.float32)
    assert subject.draw("shapes", 0) is None


def _nothing() -> tuple[Tensor, ...]:
    return (torch.ones(0, 3),)


def test_outer_dimensions_have_gaps_steps_and_another_order() -> None:
    values = torch.arange(24.0).reshape(2, 3, 4)
    expected = {
        "padded outer": (20, 4, 1),
        "swapped": (4, 8, 1),
        "rotated": (12, 1, 3),
        "every other row": (24, 8, 1),
        "gaps": (39, 12, 2),
        "transposed gaps": (2, 6, 21),
    }
    for layout, strides in expected.items():
        laid_out = lay_out(values, layout, CPU)
        assert laid_out.stride() == strides, layout
        assert torch.equal(laid_out, values), layout


def test_every_remainder_by_eight_is_drawn() -> None:
    source = random.Random(0)
    for turn in range(8):
        draw = RecordedDraw(
            CPU,
            torch.float32,
            source,
            layouts=("contiguous",),
            values=("normal",),
            turn=turn,
        )
        size = draw.size()
        assert size % 8 == turn
        replayed = RecordedDraw(
            draw.device,
            draw.dtype,
            replay=draw.choices,
            layouts=draw.layouts,
            values=draw.values,
        )
        assert replayed.size() == size


def test_large_draws_have_two_large_dimensions_or_multiples_too() -> None:
    """A kernel may tile both dimensions, and take another path where a tile divides them."""
    sizes = [
        (some.size(), some.size(), some.target)
        for turn in range(80)
        for some in [draw(turn, turn=turn, large=4, layouts=LAYOUTS[:1], values=VALUES[:1])]
    ]
    both = [rows * columns > target for rows, columns, target in sizes if min(rows, columns) > 30]
    assert len(both) == 36 and all(both)
    quick = sizes[:9]
    assert sum(not rows % 128 and not columns % 128 for rows, columns, _ in quick) >= 1
    remainders = {rows % 256 for rows, _, _ in sizes}
    assert {0, 64, 128} < remainders and len(remainders) > 20
    assert any(columns % 4096 == 0 for _, columns, _ in sizes)


def test_very_large_draws_exceed_what_float32_counts() -> None:
    """In two dimensions at once, in either alone, and in one that is longer than the other."""
    shapes = []
    for turn in range(5):
        some = draw(turn, turn=turn, very_large=24)
        shapes.append((some.size(), some.size(), some.size()))
        again = RecordedDraw(CPU, torch.float32, replay=some.choices, very_large=24)
        assert tuple(again.size() for _ in range(3)) == shapes[-1]
    assert all(1 << 24 < first * second <= 3 << 23 for first, second, _ in map(_smaller, shapes))
    both, first, second, longer, wider = shapes
    assert min(both[:2]) > 4096 and first[0] > 1 << 24 and second[1] > 1 << 24
    assert longer[0] > 1 << 16 and wider[1] > 1 << 16 and min(longer[1], wider[0]) > 256


def _smaller(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without the small sizes of 1 and 2."""
    return tuple(1 if size < 3 else size for size in shape)


def test_layouts_begin_at_addresses_of_every_alignment() -> None:
    offsets = {
        lay_out(torch.ones(size, 3), "padded rows", CPU).storage_offset() for size in range(1, 9)
    }
    assert offsets == {0, 1, 2, 3, 4, 8, 16}


def test_upstream_gradients_are_those_of_scaled_losses_too() -> None:
    largest = [
        float(draw(seed).gradient(64, dtype=torch.float32).abs().max()) for seed in range(99)
    ]
    assert any(some > 4096 for some in largest) and any(0 < some < 2**-9 for some in largest)


def test_a_large_draw_exceeds_its_number_in_one_dimension() -> None:
    for turn, number in enumerate(LARGE):
        draw = RecordedDraw(
            CPU,
            torch.float32,
            random.Random(turn),
            values=("normal",),
            turn=turn,
            large=len(LARGE),
            max_numel=2 * LARGE[-1],
        )
        sizes = [draw.size() for _ in range(3)]
        assert math.prod(sizes) > number
        if number < LARGE[-1] and draw._large_place < 3:
            assert number < max(sizes) <= number + 4096
        again = RecordedDraw(
            draw.device, draw.dtype, replay=draw.choices, large=len(LARGE), max_numel=1 << 21
        )
        assert [again.size() for _ in range(3)] == sizes


def test_a_size_of_two_dimensions_is_no_larger_than_a_trial_can_hold() -> None:
    """A square of scores would have 2^34 elements where its one size exceeds 2^17."""

    def draw(source: Draw) -> Inputs:
        length = source.size()
        return Inputs((source.tensor(length, length), source.integers(length, low=0, high=2)))

    op = FusedOp(
        name="tests::squares",
        reference=squares,
        implementations={"plain": Implementation("cpu", squares)},
        cases=(Case.normal([(4, 4)], "boundary"),),
        draw=draw,
    )
    subject = Subject.here(op, "plain", torch.device("cpu"), torch.float32)
    drawn = [subject.draw("large", index, turn=index, large=True) for index in range(12)]
    sizes = [trial.args[0].numel() for trial in drawn if trial is not None]
    assert len(sizes) == 12 and 1025 * 1025 <= max(sizes) <= 4096 * 4096
    for index, trial in enumerate(drawn):
        assert trial is not None
        again = subject.draw("large", index, replay=trial.draw.choices, large=True)
        assert again is not None
        torch.testing.assert_close(again.args[0], trial.args[0], rtol=0, atol=0, equal_nan=True)


def squares(input: Tensor, ids: Tensor) -> Tensor:
    return input * input


def test_large_draws_of_the_interpreter_have_few_elements_in_any_dimension() -> None:
    """Each row may be a program's, which the interpreter takes half a millisecond for."""
    for seed in range(200):
        drawn = draw(seed, large=1, largest_size=1900, max_numel=2 * LARGE[-1])
        shape = drawn.shape()
        assert max(shape) <= 1900
        assert math.prod(shape) <= 2 * LARGE[0]
    sizes = [
        math.prod(draw(seed, large=1, largest_size=1900, max_numel=2 * LARGE[-1]).shape())
        for seed in range(200)
    ]
    assert sum(size > LARGE[0] for size in sizes) > 50


def test_a_tensor_of_many_elements_has_values_of_its_kind() -> None:
    """Only normal numbers are repeated in place of drawing so many."""
    assert not make_values("zeros", (1 << 22, 2), torch.float32, seed=0).any()
    assert make_values("normal", (1 << 22, 2), torch.float32, seed=0).unique().numel() > 1
