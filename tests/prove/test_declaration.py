"""Little to judge is NOT JUDGED, and a wide bar is warned of."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gallery import honest, wrong_declarations
from torch import Tensor

from fuselab.op import FusedOp
from fuselab.prove import check_group
from fuselab.prove.check import check
from fuselab.prove.result import CheckReport, Verdict
from fuselab.prove.subject import Subject
from fuselab.prove.trials import run_check
from fuselab.report.check_text import check_text


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


REASON = (
    "the reference raised RuntimeError: no rows of {}; let validate or draw leave such inputs out"
)


def test_a_reference_that_raises_is_named_and_not_the_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
        if not input.shape[-1] % 3:
            raise RuntimeError(f"no rows of {input.shape[-1]}")
        return honest.reference(input, bias, scale)

    op = honest.make_op("raises_at_three", reference=reference, gradient=None, backward=None)
    wanted = {"shapes", "values"}
    some = tuple(known for known in check_group.CHECKS if known.name in wanted)
    monkeypatch.setattr(check_group, "CHECKS", some)
    report = check(op, dtype=torch.float32, quick=True, seed=0, device="cpu")
    assert report.failed_checks() == wanted
    for failure in report.groups[0].failures:
        (size,) = ast.literal_eval(failure.case[2].split()[1].removeprefix("float32"))  # the bias
        assert size % 3 == 0 and failure.reason == REASON.format(size)
        assert failure.guide == 'docs/check.md, "The declaration does not fit"'
    text = check_text(report)
    assert text.count("the reference raised") == 1
    assert "The same error in 1 more: values." in text


def test_a_reference_that_raises_on_another_draw_is_shown_with_that_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first: list[torch.Size] = []

    def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
        if first and input.shape != first[0]:
            raise RuntimeError(f"no rows of {input.shape[-1]}")
        return honest.reference(input, bias, scale)

    op = honest.make_op("raises_on_others", reference=reference, gradient=None, backward=None)
    subject = Subject.here(op, "plain", torch.device("cpu"), torch.float32, 0, True)
    drawn = subject.draw("eager", 0, max_numel=4096, layouts=("contiguous",), values=("normal",))
    assert drawn is not None
    first.append(drawn.args[0].shape)
    (known,) = (known for known in check_group.CHECKS if known.name == "eager")
    failure = run_check(subject, known)
    shape = ast.literal_eval(failure.case[1].split("float32")[1].rsplit("]")[0] + "]")
    assert failure.reason == REASON.format(shape[-1])
    assert shape != list(first[0])
    assert failure.guide == 'docs/check.md, "The declaration does not fit"'


def test_another_process_tells_that_its_reference_raised(tmp_path: Path) -> None:
    path = tmp_path / "raises.py"
    source = Path(honest.__file__).read_text()
    path.write_text(f"{source}\n{RAISES}\nOP = make_op('raises_apart')\n")
    report = check(str(path), dtype=torch.float32, quick=True, device="cpu", case="cases@8x8")
    (failure,) = report.groups[0].failures
    assert failure.reason == REASON.format(8) and failure.of_declaration


RAISES = """
def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    raise RuntimeError(f"no rows of {input.shape[-1]}")

def make_op(name, _make=make_op):
    return _make(name, reference=reference)
"""
