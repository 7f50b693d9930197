"""``fuselab list``: what it says of an operator, on the screen and in JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuselab import ops
from fuselab.cli import list as list_verb
from fuselab.cli.main import run
from fuselab.op import Case, Cost, FusedOp, Implementation, Inputs


def scaled(input: Tensor, scale: float = 2.0) -> Tensor:
    """``scale * input``.

    More about it.
    """
    return scale * input


def case(name: str, numel: int, *tags: str) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return Inputs((torch.randn(numel, generator=generator, dtype=dtype, device=device),))

    return Case(name, make, frozenset(tags))


OP = FusedOp(
    name="mine::scaled",
    reference=scaled,
    implementations={
        "triton": Implementation("cuda", scaled),
        "cpp": Implementation(
            "cpu", scaled, supports=lambda input, scale: "too big" if input.numel() > 9 else None
        ),
    },
    cost=lambda input, scale: Cost(4 * input.numel(), 4 * input.numel(), input.numel()),
    cases=(
        case("large", 2**42, "bench"),  # 16 TiB: only a description of it can be made
        case("small", 8, "bench"),
        case("not timed", 1, "boundary"),
    ),
    dtypes=(torch.float32, torch.bfloat16),
)


def test_a_row_says_what_runs_here_and_what_auto_takes() -> None:
    row = list_verb.operator_row(OP, torch.device("cpu"))
    assert row.call == "scaled(input, scale=2.0)"
    assert row.formula == "scale * input."
    assert row.dtypes == ("float32", "bfloat16")
    assert [(one.name, one.device, one.why_not) for one in row.implementations] == [
        ("triton", "cuda", "needs --device cuda"),
        ("cpp", "cpu", "too big"),
    ]
    assert row.auto == (
        list_verb.Choice("small", 64, "cpp"),
        list_verb.Choice("large", 2**45, "reference"),
    )


def test_screen_and_json_name_every_operator_and_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["list", "--device", "cpu", "--json", str(tmp_path / "list.json")]) == 0
    screen = capsys.readouterr().out
    written = json.loads((tmp_path / "list.json").read_text())
    assert (written["schema"], written["verb"]) == (1, "list")
    assert written["environment"]["device"] == "cpu"
    assert [row["name"] for row in written["operators"]] == [
        f"fuselab::{name}" for name in ops.operators()
    ]
    for row in written["operators"]:
        assert row["call"] in " ".join(screen.split())  # a long one is folded
        assert "triton" in {one["name"] for one in row["implementations"]}
    assert "dlrm" in [model["name"] for model in written["models"]]
    assert max(len(line) for line in screen.splitlines()) <= 80


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--device", "cuda:99"]) == 2
    assert re.match(r"fuselab: 'cuda:99' is not there", capsys.readouterr().err)
