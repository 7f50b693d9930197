"""The check above 2^24 elements: what it is spared, and what it accepts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gallery import honest
from torch import Tensor

from fuselab.op import Case, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.prove import check_group, check_very_large
from fuselab.prove.check import check
from fuselab.prove.result import Result, Verdict


def very_large(op: FusedOp, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Return the result of the check in float32, as --quick makes it."""
    monkeypatch.setattr(check_group, "CHECKS", check_very_large.CHECKS)
    (result,) = check(op, dtype=torch.float32, quick=True, seed=0, device="cpu").groups[0].results
    return result


def total(input: Tensor) -> Tensor:
    return input.sum()


def total_of(name: str, forward: Callable[[Tensor], Tensor]) -> FusedOp:
    """Return an operator that adds everything."""

    def draw(source: Draw) -> Inputs:
        return Inputs((source.tensor(source.size(), source.size()),))

    return FusedOp(
        f"very_large::{name}",
        total,
        {"plain": Implementation("cpu", forward)},
        cases=(Case.normal([(4, 4)], "boundary"),),
        draw=draw,
    )


def test_a_sum_in_another_order_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order(input: Tensor) -> Tensor:
        """Add one row after the other."""
        sums = input.new_zeros(input.shape[1])
        for piece in input.split(max(1, len(input) // 64)):
            sums += piece.sum(0)
        return sums.sum()

    result = very_large(total_of("in_order", in_order), monkeypatch)
    assert (result.verdict, result.trials) == (Verdict.PASS, 2)


def test_fewer_digits_above_a_million_elements_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output.bfloat16().to(output.dtype) if output.numel() > 5 << 20 else output

    result = very_large(honest.make_op("fewer_digits", forward=forward), monkeypatch)
    assert result.verdict is Verdict.FAIL and "is off by" in str(result.reason)


def _summed(needs: Sequence[bool], grad_output: Tensor, input: Tensor) -> tuple[Tensor | None]:
    return (grad_output.sum(0),)


def test_an_output_too_large_for_an_upstream_gradient_is_judged_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of a table are much smaller than what they are repeated to."""

    def repeated(input: Tensor) -> Tensor:
        return input.unsqueeze(0) * torch.ones(40, 1, 1, dtype=input.dtype, device=input.device)

    def draw(source: Draw) -> Inputs:
        return Inputs((source.tensor(source.size(), source.size()),))

    gradient = Gradient(lambda output, input: (input,), _summed)
    op = FusedOp(
        "very_large::repeated",
        repeated,
        {
            "plain": Implementation(
                "cpu",
                lambda input: input.expand(40, *input.shape).clone(),
                _summed,
            )
        },
        cases=(Case.normal([(4, 4)], "boundary"),),
        draw=draw,
        gradient=gradient,
        contiguous=True,
    )
    (large,) = (known for known in check_group.CHECKS if known.name == "large")
    monkeypatch.setattr(check_group, "CHECKS", (replace(large, quick=6),))
    (result,) = check(op, dtype=torch.float32, quick=True, seed=0, device="cpu").groups[0].results
    assert (result.verdict, result.reason) == (Verdict.PASS, None)


def test_what_takes_long_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any) -> Tensor:
        time.sleep(2.0 if args[0].numel() > 1 << 20 else 0.0)
        return honest.forward(*args)

    result = very_large(honest.make_op("slow", forward=slow), monkeypatch)
    assert result.verdict is Verdict.NOT_JUDGED
    assert str(result.reason).startswith("the implementation takes 2")

    def slow_reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
        time.sleep(0.2 if input.numel() > 1 << 20 else 0.0)
        return honest.reference(input, bias, scale)

    op = honest.make_op("slow_reference", reference=slow_reference, fake=None)
    result = very_large(op, monkeypatch)
    assert result.verdict is Verdict.NOT_JUDGED
    assert str(result.reason).startswith("the reference takes 0.2")
