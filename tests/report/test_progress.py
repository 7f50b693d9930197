"""The progress lines: rate over the last updates, time left, one line on a terminal."""

from __future__ import annotations

import io

import pytest

from fuselab.report import progress as module
from fuselab.report.progress import Progress, clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    shown = io.StringIO()
    progress = Progress(shown)
    progress.begin("step", 1000, 500)
    assert progress.line("loss 0.5000") == "step 500 of 1,000  loss 0.5000"
    now[0] += 10
    progress.update(6400, 100, "loss 0.2500")
    assert shown.getvalue() == "step 600 of 1,000  loss 0.2500  640 rows/s  0:40 left\n"
    now[0] += 9
    progress.update(64, 1, "loss 0.2500")
    assert shown.getvalue().count("\n") == 1
    progress.update(399 * 64, 399, "loss 0.1250")
    assert shown.getvalue().splitlines()[1].startswith("step 1,000 of 1,000  loss 0.1250")


def test_a_terminal_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    shown = Terminal()
    progress = Progress(shown)
    progress.begin("step", 1000)
    for _ in range(2):
        now[0] += 1
        progress.update(100, 100, "loss 1.0000")
    assert shown.getvalue().count("\r") == 2
    assert "\n" not in shown.getvalue()
    progress.end()
    progress.end()
    assert shown.getvalue().endswith("left\n")


def test_parts_of_a_walk_over_rows() -> None:
    for shown, rewritten in ((io.StringIO(), 0), (Terminal(), 2)):
        walks = Progress(shown)
        for what in ("survey", "write"):
            walks.begin(f"{what}:", 1)
            walks.update(50)
        lines = shown.getvalue().replace("\r", "").split("\n")
        assert [line.partition(" rows")[0] for line in lines] == [
            "survey: 1 of 1 parts, 50", "write: 1 of 1 parts, 50", "",
        ]  # fmt: skip
        assert shown.getvalue().count("\r") == rewritten


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3599, 3723)] == [
        "0:00", "1:00", "59:59", "1:02:03",
    ]  # fmt: skip
