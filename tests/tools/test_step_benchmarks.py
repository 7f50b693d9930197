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
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    times = {}
    for line in ended.stdout.splitlines():
        found = re.match(r"  (\S.*?)\s{2,}(?:device\s+)?([0-9.]+)", line)
        if found:
            times[found[1]] = float(found[2])
    assert rows <= set(times)
    assert all(time > 0 for time in times.values())


def test_parity_says_yes_or_no() -> None:
    words = [sys.executable, str(BENCHMARKS / "dlrm_parity.py"), "--device", "cpu"]
    words += ["--config", "small", "--rows", "3000", "--steps", "4", "--batch-size", "64"]
    words += ["--mode", "fused", "--precision", "fp32", "--seeds", "2"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"^(?:eager|fused) fp32 +seed [01]: held-out", ended.stdout, re.M)) == 4
    assert ended.stdout.endswith("\nwithin the spread of eager's seeds: yes\n")


def test_the_loader_says_whether_it_keeps_up() -> None:
    words = [sys.executable, str(BENCHMARKS / "loader.py"), "--device", "cpu", "--seconds", "0"]
    words += ["--rows", "2000", "--batch", "32", "--largest", "50"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    figures = dict(re.findall(r"^(\S.*?) {2,}([0-9,.]+)$", ended.stdout, re.M))
    assert {"32: in order (M rows/s)", "32: given (M rows/s)", "32: fed (us)"} <= set(figures)
    assert re.search(r"1\.2 asked: (yes|no)$", ended.stdout.strip())
