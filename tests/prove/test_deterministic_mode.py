"""The check under ``torch.use_deterministic_algorithms``, which an operator may refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gallery import honest
from torch import Tensor

from fuselab.prove import check_group
from fuselab.prove.check import check
from fuselab.prove.result import Verdict


@pytest.mark.parametrize(
    ("declared", "verdict"), [("unordered atomics", Verdict.PASS), (None, Verdict.FAIL)]
)
def test_an_unordered_sum_may_refuse_it(
    declared: str | None, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own operators do; one that declares a fixed order has no reason to."""

    def forward(*args: Any) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("mine::sum does not have a deterministic implementation")
        return honest.forward(*args)

    asked = [known for known in check_group.CHECKS if known.name == "deterministic mode"]
    monkeypatch.setattr(check_group, "CHECKS", tuple(asked))
    op = honest.make_op(
        f"refuses_{verdict.name.lower()}", forward=forward, nondeterministic=declared
    )
    (result,) = check(op, dtype=torch.float32, quick=True, seed=0, device="cpu").groups[0].results
    assert result.verdict is verdict
    assert "does not have a deterministic implementation" in str(result.reason)
