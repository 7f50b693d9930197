"""Losses are read in order, and the first that is no number is named."""

from __future__ import annotations

import pytest
import torch

from fuselab.errors import DivergenceError
from fuselab.train.losses import Losses


def test_reads_what_was_recorded_since() -> None:
    losses = Losses(3, torch.device("cpu"))
    assert losses.read() == []
    for step, value in enumerate((1.0, 2.0, 3.0)):
        assert not losses.full
        losses.record(step, torch.tensor(value))
    assert losses.full
    assert losses.read() == [1.0, 2.0, 3.0]
    losses.record(3, torch.tensor(0.5))
    assert losses.read() == [0.5]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_the_first_that_is_no_number_is_named(wrong: float) -> None:
    losses = Losses(8, torch.device("cpu"))
    for step in range(10, 15):
        losses.record(step, torch.tensor(wrong if step >= 13 else 1.0))
    with pytest.raises(DivergenceError, match=str(wrong)) as raised:
        losses.read()
    assert raised.value.step == 14
