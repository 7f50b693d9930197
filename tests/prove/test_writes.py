"""Gradients after a write between a forward and its backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gallery import honest, lookup
from torch import Tensor

from fuselab.op import FusedOp
from fuselab.prove import check_group
from fuselab.prove.asked_memory import gradients_after_write
from fuselab.prove.check import check
from fuselab.prove.held import Held
from fuselab.prove.result import Verdict


def silu_gradient(input: Tensor) -> Tensor:
    leaf = input.detach().requires_grad_()
    torch.nn.functional.silu(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_a_write_to_a_saved_tensor_is_refused_and_one_to_an_output_is_none_of_its() -> None:
    held = Held(honest.make_op("written_between"), "plain")
    input, bias = torch.tensor([[0.5, -1.0]]), torch.zeros(2)
    values = [input, bias, 1.0, (torch.ones(1, 2),)]
    assert gradients_after_write(held, 0, input + 1, [0, 1], values) is None
    assert gradients_after_write(held, 1, bias + 1, [0, 1], values) is None
    after_output = gradients_after_write(held, 2, torch.zeros(1, 2), [0, 1], values)
    assert after_output is not None
    torch.testing.assert_close(after_output[0], silu_gradient(input))
    assert input.tolist() == [[0.5, -1.0]]  # copies were written to


def test_a_write_to_an_output_that_is_a_view_is_refused() -> None:
    def viewed(input: Tensor) -> Tensor:
        output: Tensor = _Viewed.apply(input)
        return output

    values = [torch.ones(1, 2), (torch.ones(1, 2),)]
    assert gradients_after_write(viewed, 1, torch.zeros(1, 2), [0], values) is None
    found = gradients_after_write(viewed, 0, torch.zeros(1, 2), [0], values)
    assert found is not None and found[0].tolist() == [[2.0, 2.0]]


class _Viewed(torch.autograd.Function):
    """Twice its input, as a view of memory that the forward has made."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return (input * 2).reshape(-1).view(input.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output * 2


@pytest.mark.parametrize(
    "op",
    [honest.make_op("writes_honest"), lookup.make_op("writes_lookup")],
    ids=lambda op: op.short_name,
)
def test_honest_operators_pass(op: FusedOp, monkeypatch: pytest.MonkeyPatch) -> None:
    (known,) = (known for known in check_group.CHECKS if known.name == "writes before backward")
    monkeypatch.setattr(check_group, "CHECKS", (replace(known, quick=12),))
    report = check(op, dtype=torch.float32, quick=True, seed=0, device="cpu")
    (result,) = report.groups[0].results
    assert (result.verdict, result.trials) == (Verdict.PASS, 12)
