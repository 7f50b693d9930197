"""What ``auto`` takes at calls like those of a survey."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselab.op import Case, FusedOp, Gradient, Implementation
from fuselab.runtime import dispatch, launch_plans, surveyed_choice

CPU = torch.device("cpu")
CALLS: list[str] = []


def tripled(input: Tensor, kind: str = "plain", scale: float = 3.0) -> Tensor:
    return input * scale


def first(input: Tensor, kind: str, scale: float) -> Tensor:
    CALLS.append("first")
    return input * scale


def second(input: Tensor, kind: str, scale: float) -> Tensor:
    CALLS.append("second")
    return input * scale


def save(output: Tensor, input: Tensor, kind: str, scale: float) -> tuple[Any, ...]:
    return (input, scale)


def gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, scale: float
) -> tuple[Tensor | None, ...]:
    return (grad_output * scale,)


OP = FusedOp(
    name="surveyed_tests::tripled",
    reference=tripled,
    implementations={
        "first": Implementation("cpu", first, gradient),
        "second": Implementation(
            "cpu",
            second,
            gradient,
            supports=lambda input, *rest: "too long" if input.shape[0] == 65 else None,
        ),
    },
    gradient=Gradient(save, gradient),
    cases=(Case.normal([(8, 8)]),),
)

# median, low and high of each, in microseconds
SLOWER, FASTER = [10.0, 9.5, 10.5], [5.0, 4.5, 5.5]
WIN = {"reference": [20.0, 19.0, 21.0], "first": SLOWER, "second": FASTER}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path))
    surveyed_choice.forget()
    yield
    surveyed_choice.forget()


def call(*shape: int, kind: str = "plain", dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return (torch.zeros(*shape, dtype=dtype), kind, 3.0)


def surveyed(args: tuple[Any, ...], us: dict[str, list[float]]) -> dict[str, Any]:
    form, sizes = surveyed_choice.form_of(args), surveyed_choice.sizes_of(args)
    return {"form": form, "sizes": sizes, "us": us}


def write(*points: dict[str, Any]) -> Path:
    return surveyed_choice.write(OP, CPU, {"points": points})


def test_without_a_survey_the_operator_s_own_rule_decides() -> None:
    assert not surveyed_choice.file_of(CPU).exists()
    assert dispatch.choose(OP, call(64, 64)) == "first"
    assert not dispatch.is_by_survey(OP, call(64, 64))


def test_a_call_like_a_surveyed_one_takes_what_was_faster_there() -> None:
    write(surveyed(call(64, 64), WIN))
    for shape in ((64, 64), (32, 128), (128, 32), (100, 64)):
        assert dispatch.choose(OP, call(*shape)) == "second"
        assert dispatch.is_by_survey(OP, call(*shape))
    assert dispatch.choose(OP, (torch.zeros(64, 64), "plain", 0.5)) == "second"


@pytest.mark.parametrize(
    "args",
    [
        call(129, 64),
        call(31, 64),
        call(64, 63),
        call(64),
        call(0, 64),
        call(64, 64, kind="other"),
        call(64, 64, dtype=torch.float64),
        (torch.zeros(64, 64).t(), "plain", 3.0),
        (torch.zeros(65 * 64)[1:4097].view(64, 64), "plain", 3.0),
    ],
    ids=["longer", "shorter", "ragged", "1d", "empty", "option", "dtype", "strided", "offset"],
)
def test_another_call_is_left_to_the_rule(args: tuple[Any, ...]) -> None:
    write(surveyed(call(64, 64), WIN))
    assert dispatch.choose(OP, args) == "first"


def test_the_nearest_point_counts() -> None:
    write(
        surveyed(call(64, 64), {**WIN, "first": FASTER, "second": SLOWER}),
        surveyed(call(96, 64), WIN),
    )
    assert dispatch.choose(OP, call(70, 64)) == "first"
    assert dispatch.choose(OP, call(90, 64)) == "second"


@pytest.mark.parametrize(
    ("us", "taken"),
    [
        ({"reference": FASTER, "first": SLOWER, "second": SLOWER}, "reference"),
        ({"first": SLOWER, "second": [9.0, 8.0, 9.4]}, "first"),
        ({"first": SLOWER, "second": [9.0, 8.0, 9.2]}, "second"),
        ({"second": FASTER}, "first"),
        ({"first": SLOWER, "second": [6.0, 5.9, 6.1], "gone": FASTER}, "first"),
    ],
    ids=["reference", "within 3 %", "beyond 3 %", "the rule's was not timed", "unknown"],
)
def test_only_what_is_clearly_faster_takes_the_place(us: dict[str, Any], taken: str) -> None:
    write(surveyed(call(64, 64), us))
    assert dispatch.choose(OP, call(64, 64)) == taken


def test_what_cannot_run_and_what_needs_a_gradient_are_left_to_the_rule() -> None:
    write(surveyed(call(64, 64), WIN))
    assert dispatch.choose(OP, call(65, 64)) == "first"
    needing = (torch.zeros(64, 64, requires_grad=True), "plain", 3.0)
    assert dispatch.choose(OP, needing) == "first"
    with torch.no_grad():
        assert dispatch.choose(OP, needing) == "second"


def test_a_survey_takes_effect_at_once_in_place_of_an_earlier_one() -> None:
    function, args = dispatch.operator(OP), call(64, 64)
    CALLS.clear()
    function(*args)
    file = write(surveyed(args, WIN))
    function(*args)
    write(surveyed(args, {**WIN, "second": SLOWER}))
    function(*args)
    assert CALLS == ["first", "second", "first"]
    payload = json.loads(file.read_text())
    assert [len(one["points"]) for one in payload["operators"].values()] == [1]
    assert [name.split()[0] for name in payload["operators"]] == ["surveyed_tests::tripled"]
    launch_plans.forget_all()


@pytest.mark.parametrize("text", ["{", '{"schema": 0}', "[]"])
def test_a_file_that_cannot_be_read_is_passed_over_with_a_warning(text: str) -> None:
    file = write(surveyed(call(64, 64), WIN))
    file.write_text(text)
    surveyed_choice.forget()
    with pytest.warns(UserWarning, match="surveyed times are passed over"):
        assert dispatch.choose(OP, call(64, 64)) == "first"
