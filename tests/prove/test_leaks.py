"""The check of leaks finds memory that calls keep, whatever else Python frees meanwhile."""

from __future__ import annotations

import gc
import itertools
import time

import pytest
import torch
from gallery import honest, wrong_patterns

from fuselab.op import FusedOp
from fuselab.prove.asked_outputs import leaked
from fuselab.prove.held import Held
from fuselab.runtime import builds

SPAN = 128


def kept_by(op: FusedOp, gradients: bool = True) -> str | None:
    args = (torch.ones(3, 8), torch.ones(8), 0.5)
    upstream = (torch.ones(3, 8),) if gradients else None
    return leaked(Held(op, "plain"), args, upstream, SPAN, thoroughly=False)


def keeps_a_number_and_frees(spans: set[int]) -> FusedOp:
    """Return an operator whose forward keeps a number, and frees objects in some spans, as a thread
    does that ends."""
    kept: list[float] = []
    others = [[number + 0.5] for number in range(1000)]
    calls = itertools.count(-SPAN // 4)

    def forward(*args: object) -> torch.Tensor:
        kept.append(len(kept) + 0.5)
        span, call = divmod(next(calls), SPAN)
        if span in spans and call == SPAN // 2:
            del others[-200:]
        return honest.forward(*args)

    return honest.make_op("keeps_a_number_and_frees", forward=forward)


@pytest.mark.parametrize("spans", [(), (0,), (1,), (3, 4), (3, 5)])
def test_what_is_freed_meanwhile_hides_nothing(spans: tuple[int, ...]) -> None:
    op = keeps_a_number_and_frees({*spans})
    assert "objects of Python" in str(kept_by(op, gradients=False))


def test_freed_floats_and_cycles_hide_no_kept_numbers() -> None:
    for _ in range(3):
        floats = [number + 0.5 for number in range(1000)]
        del floats  # up to a hundred of them wait for the next floats
        assert "objects of Python" in str(kept_by(wrong_patterns.backward_keeps_a_number("cpu")))
        assert gc.isenabled() and gc.get_freeze_count() == 0


def test_an_operator_that_keeps_nothing_is_right() -> None:
    assert kept_by(honest.make_op("keeps_nothing")) is None


@pytest.mark.parametrize("most", [300, 600, 900])
def test_what_fills_slowly_is_no_leak(most: int) -> None:
    kept: list[float] = []

    def forward(*args: object) -> torch.Tensor:
        if len(kept) < most:
            kept.append(len(kept) + 0.5)
        return honest.forward(*args)

    op = honest.make_op(f"fills_up_to_{most}", forward=forward)
    assert kept_by(op, gradients=False) is None


def test_leaks_are_looked_for_when_no_build_runs_beside() -> None:
    building = builds.in_background(lambda: time.sleep(2), daemon=True)
    assert kept_by(honest.make_op("built_meanwhile")) is None
    assert building.done()
