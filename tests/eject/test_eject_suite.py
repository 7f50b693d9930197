"""The members of benchmarks/eject_suite are valid calls of the sizes that its pages promise."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "eject_suite"))

import run

MEMBERS = run.MEMBERS


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_moves_64_mb_on_a_gpu(name: str) -> None:
    """A call reads and writes 64 MB or more in bfloat16; meta tensors have sizes and no values."""
    member = MEMBERS[name]
    with torch.device("meta"):
        function = member.function()
        args = [
            torch.empty(argument.shape, dtype=torch.int64)
            if argument.kind == "index"
            else torch.empty(argument.shape, dtype=torch.bool)
            if argument.kind == "bool"
            else torch.empty(argument.shape, dtype=torch.bfloat16)
            for argument in member.arguments
        ]
        if isinstance(function, torch.nn.Module):
            function = function.bfloat16()
        output = function(*args)
    moved = sum(tensor.nbytes for tensor in [*args, output])
    assert moved >= 64e6, f"{moved / 1e6:.0f} MB"


def test_a_table_of_what_was_refused_and_timed(tmp_path: Path) -> None:
    given = run.argparse.Namespace(dtype="float32", seed=0, check=False, without_times=True)
    suite = run.Suite(tmp_path, given)
    row = {
        "phase": "forward",
        "us": {"eager": 30.0, "compile": 10.0, "cpp": 20.0},
        "over_eager": 1.5,
        "over_compile": 0.5,
    }
    suite.device = "cpu"
    suite.results = {
        "one": {"group": "pointwise", "eject": {"status": 0}, "times": [row]},
        "other": {"group": "losses", "eject": {"status": 3}, "refused": "no a|b"},
    }
    suite.write()
    table = (tmp_path / "results.md").read_text()
    assert "| one | – | forward | 30 | 10 | 20 | 1.5 | 0.5 |" in table
    assert "| other | refused: no a\\|b |" in table
    assert "1 of 2 members were ejected." in table
    assert "forward, over compile: geometric mean 0.50, least 0.50, 0 of 1" in table
