"""One bar for every process that is judged: ``check``, compositions, ``judge`` and ``bench`` accept
the same honest work, a sum of float32 whose terms are added one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fuselab.prove import accuracy, bench_outside, judge_problem
from fuselab.prove.check import check
from fuselab.prove.judge_problem import Judgement

SUMS = """
import functools
import torch
from torch import Tensor

def drawn(generator=None):
    return torch.rand(32, 4000, generator=generator)

def by_eager(input: Tensor) -> Tensor:
    return input.sum(-1, keepdim=True)

def one_by_one(input: Tensor) -> Tensor:
    return functools.reduce(torch.add, input.t().contiguous())[:, None]

def in_bfloat16(input: Tensor) -> Tensor:
    return one_by_one(input.bfloat16()).to(input.dtype)
"""
CASE = """
from fuselab.composition import Composition
from fuselab.op import Case, FusedOp, Implementation, Inputs

def make(device, dtype, generator):
    return Inputs((drawn(generator).to(device, dtype),), {})

CASE = Case("sums", make, frozenset({"boundary"}))
"""
OPERATOR = """
OP = FusedOp(
    "sums::{0}", by_eager, {{"plain": Implementation("cpu", {0})}}, cases=(CASE,),
    dtypes=(torch.float32,),
)
"""
COMPOSITION = """
OP = Composition("sums::{0}_composed", {0}, by_eager, (), (CASE,), dtypes=(torch.float32,))
"""
MODEL = """
class {name}(torch.nn.Module):
    def forward(self, x):
        return {function}(x)

def get_inputs():
    return [drawn()]
"""
SOURCES = ("one_by_one", "in_bfloat16")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(accuracy, "COPIES", 6)
    monkeypatch.setattr(judge_problem, "TIMING_S", {True: 0.0, False: 0.0})
    monkeypatch.setattr(bench_outside, "_BATCH_S", 1e-4)
    monkeypatch.setattr(bench_outside, "SLACK", 1.0)  # the bar itself accepts the sum
    for name in SOURCES:
        (tmp_path / f"{name}.py").write_text(SUMS + CASE + OPERATOR.format(name))
        folder = tmp_path / f"{name}_composed"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "composed.py").write_text(SUMS + CASE + COMPOSITION.format(name))
        (tmp_path / f"{name}_model.py").write_text(
            SUMS + MODEL.format(name="ModelNew", function=name)
        )
    (tmp_path / "problem.py").write_text(SUMS + MODEL.format(name="Model", function="by_eager"))
    return tmp_path


def of_check(files: Path, name: str) -> str | None:
    report = check(str(files / f"{name}.py"), quick=True, seed=0, device="cpu", case="cases@sums")
    return next((failure.reason for group in report.groups for failure in group.failures), None)


def of_composition(files: Path, name: str) -> str | None:
    report = check(str(files / f"{name}_composed"), quick=True, seed=0, device="cpu")
    assert [group.results[0].check for group in report.groups] == ["whole"]
    return next((failure.reason for group in report.groups for failure in group.failures), None)


def of_judge(files: Path, name: str) -> str | None:
    report = judge_problem.judge_problem(
        str(files / "problem.py"),
        [str(files / f"{name}_model.py")],
        torch.device("cpu"),
        seed=3,
        quick=True,
        with_compile=False,
    )
    assert report.answers[0].verdict is not Judgement.FAILED
    return report.answers[0].reason


def of_bench(files: Path, name: str) -> str | None:
    record = {"provider": "plain", "kind": "implementation", "status": "ok", "median_us": 1e6}
    group = {"case": "sums", "dtype": "float32", "phase": "forward", "records": [record]}
    told: dict[str, Any] = {"groups": [group]}
    (found,) = bench_outside.measured_outside(str(files / f"{name}.py"), told)
    assert found.judged_calls
    return found.problem


@pytest.mark.parametrize("judge", [of_check, of_composition, of_judge, of_bench])
def test_every_judge_accepts_a_sum_in_order_and_refuses_one_of_fewer_bits(
    files: Path, judge: Any
) -> None:
    assert judge(files, "one_by_one") is None
    assert "ulp where eager is off by" in str(judge(files, "in_bfloat16"))
