"""The scripts in benchmarks/ run and print a time for each of their rows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "script, options, rows",
    [
        (
            "boxes_step.py",
            *(("--batch", "2", "--boxes", "3", "--loss", "none", "padded", "--gradients", "1"),),
            {"eager", "clamped", "masked", "cpp", "auto"},
        ),
        (
            "embedding_step.py",
            ("--batch", "4", "--largest", "50"),
            {"look-up: cpp", "step: SGD, cpp", "step: one table, index_add_"},
        ),
        (
            "dlrm_step.py",
            (
                "--case",
                "dot-8",
                "forward-2",
                "--largest",
                "50",
                "--budget",
                "0",
                "--provider",
                "eager",
                "ours",
            ),
            {"eager fp32", "ours fp32"},
        ),
    ],
)
def test_prints_a_time_per_row(script: str, options: tuple[str, ...], rows: set[str]) -> None:
    words = (sys.executable, str(BENCHMARKS / script), "--device", "cpu", *options)
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    times = {}
    for line in ended.stdout.splitlines():
        found = re.match(r"  (\S.*?)\s{2,}(?:device\s+)?([0-9.]+)", line)
        if found:
            times[found[1]] = float(found[2])
    assert rows <= set(times)
    assert all(time > 0 for time in times.values())
