"""Every operator accepts its own cases: check leaves out, silently, what an operator refuses."""

from __future__ import annotations

import pytest
import torch

from fuselab import ops
from fuselab.op import FusedOp

CONTRACTS = [ops.contract(name) for name in ops.operators()]


@pytest.mark.parametrize("op", CONTRACTS, ids=lambda op: op.short_name)
def test_small_cases_are_valid(op: FusedOp) -> None:
    for case in op.cases:
        if not case.tags & {"bench", "sweep", "huge"}:
            made = case.make(torch.device("cpu"), op.dtypes[0], torch.Generator().manual_seed(0))
            op.validate(*op.bind(made))
