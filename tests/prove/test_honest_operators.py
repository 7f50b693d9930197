"""Honest work passes: right operators, written in other orders of the arithmetic than eager's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from honest_operators import (
    cut_gradients,
    masked_and_ignored,
    norms_and_losses,
    scans_and_products,
    sums_in_order,
)

from fuselab.op import FusedOp
from fuselab.prove import check_group
from fuselab.prove.check import check

OPERATORS = (
    *cut_gradients.OPERATORS,
    *masked_and_ignored.OPERATORS,
    *norms_and_losses.OPERATORS,
    *scans_and_products.OPERATORS,
    *sums_in_order.OPERATORS,
)
# The checks that judge numbers, and how many trials of each.
TRIALS = {"cases": 1, "values": 33, "mixture": 12, "layouts": 12, "autocast": 2}
TRIALS |= {"gradients": 15, "upstream overflow": 8, "summed": 4, "second derivative": 4}
TRIALS |= {"gradcheck": 6}


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.short_name)
def test_an_honest_operator_is_not_refused(op: FusedOp, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [
        replace(known, quick=TRIALS[known.name], once=known.name == "layouts")
        for known in check_group.CHECKS
        if known.name in TRIALS
    ]
    monkeypatch.setattr(check_group, "CHECKS", tuple(checks))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        report = check(op, quick=True, seed=11, device="cpu")
    finally:
        torch.set_num_threads(threads)
    assert report.passed, [failure for group in report.groups for failure in group.failures]
    assert {group.dtype for group in report.groups} == {"float32", "float16", "bfloat16", "float64"}
    assert report.trials > 150
