"""Honest work passes: right operators, written in other orders of the arithmetic than eager's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from honest_operators import (
    cut_gradients,
    masked_and_ignored,
    norms_and_losses,
    rotary_gates_and_attention,
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
# The checks that judge numbers, and how many trials of each; a quarter of them for the operators
# that have shown no fault of the judge.
TRIALS = {"cases": 1, "values": 33, "mixture": 12, "layouts": 12, "autocast": 2}
TRIALS |= {"gradients": 15, "upstream overflow": 8, "summed": 4, "second derivative": 4}
TRIALS |= {"gradcheck": 6}
ASKED = [pytest.param(op, 1, id=op.short_name) for op in OPERATORS]
ASKED += [pytest.param(op, 4, id=op.short_name) for op in rotary_gates_and_attention.OPERATORS]


@pytest.mark.parametrize(("op", "part"), ASKED)
def test_an_honest_operator_is_not_refused(
    op: FusedOp, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [
        replace(known, quick=-(-TRIALS[known.name] // part), once=known.name == "layouts")
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
    assert report.trials > 150 // part
