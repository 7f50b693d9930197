"""Little to judge is NOT JUDGED, and a wide bar is warned of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gallery import honest, wrong_declarations
from torch import Tensor

from fuselab.op import FusedOp
from fuselab.prove import check_group
from fuselab.prove.check import check
from fuselab.prove.result import CheckReport, Verdict


def checked(op: FusedOp, name: str, monkeypatch: pytest.MonkeyPatch) -> CheckReport:
    wanted = [known for known in check_group.CHECKS if known.name in {"cases", name}]
    monkeypatch.setattr(check_group, "CHECKS", tuple(wanted))
    return check(op, dtype=torch.float32, quick=True, seed=0, device="cpu")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (wrong_declarations.supports_one_size, "of 48 inputs drawn"),
        (wrong_declarations.draws_one_shape, "have the same shapes"),
        (wrong_declarations.draws_its_tensors_itself, "every input drawn is contiguous"),
        (wrong_declarations.draws_numbers_only, "holds a NaN or an infinity"),
    ],
)
def test_little_to_judge_is_not_judged(
    build: Callable[[str, str], FusedOp], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = checked(build(build.__name__, "cpu"), "coverage", monkeypatch)
    (group,) = report.groups
    assert group.verdict is Verdict.NOT_JUDGED
    assert group.reason is not None
    assert reason in group.reason
    assert report.passed


def test_enough_to_judge_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    report = checked(honest.make_op("honest_coverage"), "coverage", monkeypatch)
    assert report.groups[0].verdict is Verdict.PASS


def test_a_rough_reference_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
        narrow = input.dtype == torch.float32
        z = input * scale + bias
        return torch.nn.functional.silu(z.bfloat16().to(z.dtype) if narrow else z)

    report = checked(honest.make_op("rough", reference=reference), "eager", monkeypatch)
    (result,) = report.results("eager")
    assert result.reason is not None
    assert result.reason.startswith("warning: on ordinary numbers eager is ")
    assert " (it keeps 10 of the 24 bits of float32)" in result.reason
    report = checked(honest.make_op("smooth"), "eager", monkeypatch)
    assert report.results("eager")[0].reason is None


def test_a_reference_that_is_rough_on_few_inputs_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one is on inputs that all lie in the tail of an activation."""
    rough = []

    def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
        z = input * scale + bias
        if input.ndim == 3 and input.dtype == torch.float32:
            rough.append(input.shape)
            z = z.bfloat16().to(z.dtype)
        return torch.nn.functional.silu(z)

    op = honest.make_op("seldom_rough", reference=reference)
    report = checked(op, "eager", monkeypatch)
    assert rough
    assert report.results("eager")[0].reason is None
