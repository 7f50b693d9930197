"""A target's operators at its own sizes: which, in what order, and the inputs made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fuselab.fusion.result import Decision, Replacement
from fuselab.op import Inputs
from fuselab.ops import contract
from fuselab.study.operators import found_in
from fuselab.study.run import _replaced_rows

CPU = torch.device("cpu")


def tried(
    shape: tuple[int, ...],
    before_us: float | None,
    decision: Decision = Decision.NOT_FASTER,
    activation: str = "relu",
    dtype: torch.dtype = torch.float32,
) -> Replacement:
    inputs = Inputs((torch.zeros(shape, dtype=dtype), torch.zeros(shape[-1], dtype=dtype)))
    return Replacement(
        op=contract("bias_activation"),
        module="",
        chain="add → relu",
        source="m.py:1",
        decision=decision,
        reason="",
        implementation="cpp",
        before_us=before_us,
        inputs=Inputs((*inputs.args, activation)),
    )


def test_kept_first_then_the_costliest_each_once() -> None:
    (found,) = found_in(
        [
            tried((2, 8), 1.0),
            tried((4, 8), 9.0),
            tried((4, 8), 8.0),
            tried((4, 8), 7.0, activation="gelu"),
            tried((8, 8), None, Decision.REFUSED),
            tried((3, 8), 0.5, Decision.KEPT),
        ],
        most=3,
    )
    assert [case.name for case in found.op.cases] == ["3x8 8 relu", "4x8 8 relu", "4x8 8 gelu"]
    assert found.implementations == ("cpp",)
    assert found.dtype == torch.float32


def test_rows_of_the_report_each_once_and_refusals_of_tried_chains_left_out() -> None:
    other = Replacement(**{**vars(tried((2, 8), None, Decision.REFUSED)), "chain": "mul → add"})
    rows = _replaced_rows(
        [
            tried((2, 8), None, Decision.REFUSED),
            other,
            tried((2, 8), 5.0),
            tried((2, 8), 5.0),
            tried((3, 8), 1.0, Decision.KEPT),
        ]
    )
    assert [(row.decision, row.chain, row.before_us) for row in rows] == [
        ("kept", "add → relu", 1.0),
        ("not faster", "add → relu", 5.0),
        ("refused", "mul → add", None),
    ]


def test_dtypes_are_apart_and_nothing_measured_is_nothing() -> None:
    found = found_in([tried((2, 8), 1.0), tried((2, 8), 2.0, dtype=torch.float64)], most=4)
    assert [each.dtype for each in found] == [torch.float64, torch.float32]
    assert found_in([tried((2, 8), None, Decision.REFUSED)], most=4) == []


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(4, 6).t(),
        torch.zeros(6).expand(4, 6),
        torch.zeros(4, 12)[:, ::2],
        torch.zeros(4, 6, requires_grad=True),
        torch.zeros(()),
    ],
)
def test_inputs_have_the_strides_found_and_fresh_values(value: Tensor) -> None:
    row = tried((2, 8), 1.0)
    row = Replacement(**{**vars(row), "inputs": Inputs((value, torch.arange(3), None, 0.5))})
    (found,) = found_in([row], most=1)
    case = found.op.cases[0]
    made = case.make(CPU, torch.float64, torch.Generator().manual_seed(1))
    again = case.make(CPU, torch.float64, torch.Generator().manual_seed(1))
    first, second, none, scale = made.args
    assert (first.shape, first.stride()) == (value.shape, value.stride())
    assert first.dtype == torch.float64
    assert first.requires_grad == value.requires_grad
    assert first.abs().max() > 0
    assert torch.equal(first, again.args[0])
    assert second.tolist() == [0, 1, 2]
    assert (none, scale) == (None, 0.5)
