"""Options that an operator's draw leaves at one value are tried, or told of as never varied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gallery import honest, wrong_options
from torch import Tensor

from fuselab.errors import ArgumentError
from fuselab.op import FusedOp
from fuselab.prove import check_group
from fuselab.prove.asked_inputs import option_names, other_options
from fuselab.prove.check import check
from fuselab.prove.held import Held
from fuselab.prove.result import Result, Verdict
from fuselab.report.check_text import check_text


def other_options_of(op: FusedOp, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, str]:
    """Return the result of the check alone, and the printed report."""
    (known,) = (known for known in check_group.CHECKS if known.name == "other options")
    monkeypatch.setattr(check_group, "CHECKS", (replace(known, shrink_tries=2),))
    report = check(op, dtype=torch.float32, quick=True, seed=0, device="cpu")
    (result,) = report.groups[0].results
    return result, check_text(report)


def test_an_honest_operator_passes_and_what_never_varied_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, text = other_options_of(wrong_options.make_op("honest_options"), monkeypatch)
    assert (result.verdict, result.trials) == (Verdict.PASS, 4)
    assert result.reason == (
        "never varied: shift (of which draw gives one value, and no other was taken)"
    )
    assert "never varied: shift" in " ".join(text.split())


def test_options_that_are_refused_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(input: Tensor, bias: Tensor | None, *options: Any) -> None:
        if bias is None or options[0]:
            raise ArgumentError("a bias, and nothing flipped")

    op = wrong_options.make_op("narrow_options", validate=validate)
    result, _ = other_options_of(op, monkeypatch)
    assert result.verdict is Verdict.PASS  # the dimension was counted from the other end
    assert result.reason is not None and "never varied: bias, flipped, shift" in result.reason


def test_an_operator_without_options_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = other_options_of(honest.make_op("without_options"), monkeypatch)
    assert (result.verdict, result.reason) == (Verdict.SKIPPED, "it takes no option")


def test_which_other_options_are_tried() -> None:
    held = Held(wrong_options.make_op("listed_options"))
    input = torch.arange(6.0).reshape(2, 3)
    args = [input, input, False, 0, 0]
    assert option_names(held) == ("bias", "flipped", "dim", "shift")
    assert other_options(held, args, {}) == [
        {"bias": None, "dim": -1},
        {"bias": None},
        {"flipped": True},
        {"dim": -2},
    ]
    seen = {"bias": ["None", "a tensor"], "flipped": ["False", "True"], "dim": ["-1", "0"]}
    assert other_options(held, args, seen) == [{"bias": None, "dim": -1}, {"dim": -2}]
    seen["dim"].append("-2")
    assert other_options(held, args, seen) == [{"bias": None, "dim": -1}]
    row, whole = other_options(held, [input, None, False, -1, 0], {"flipped": ["False", "True"]})[
        :2
    ]
    assert row["bias"].tolist() == [3.0, 4.0, 5.0]
    assert torch.equal(whole["bias"], input)
