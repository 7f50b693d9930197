"""Tables of 80 columns: what gives way when a row is too wide."""

from __future__ import annotations

import sys

import pytest

from fuselab.errors import MissingDependencyError
from fuselab.inspect.explain import Explanation
from fuselab.report import explain_text
from fuselab.report.screen import bar, cut, cut_place, folded, table


def test_wide_left_columns_share_the_loss_and_numbers_stay_whole():
    lines = table(["name", "text", "us"], [["n" * 90, "t" * 60, "1.234 ms"]], right=[2])
    assert all(len(line) <= 80 for line in lines)
    assert lines[2].endswith("1.234 ms")
    name, text = lines[2].removesuffix("1.234 ms").split()
    assert name.endswith("…") and text.endswith("…") and abs(len(name) - len(text)) <= 1


def test_narrow_tables_stay_as_they_are():
    assert table(["a", "b"], [["x", "10"]], right=[1]) == [" a   b", " ─────", " x  10"]


def test_cut_and_bar():
    assert cut("abcdef", 6) == "abcdef" and cut("abcdefg", 6) == "abcde…"
    assert bar(0.0, 10) == "" and bar(1.0, 10) == "█" * 10 and bar(2.0, 4) == "█" * 4
    assert bar(0.5, 1) == "▌"


def test_a_line_number_is_never_cut_off():
    place = "a_rather_long_name_of_a_training_script.py:1234"
    assert cut_place(place, 20) == "a_rathe…ript.py:1234"
    assert cut_place("model.py:12", 20) == "model.py:12"
    assert all(cut_place(place, width).endswith(":1234") for width in range(1, 60))
    rows = [[cut_place(place, 26), "t" * 90, "1.23 ms"]]
    line = table(["line", "", "us"], rows, right=[2], whole=[0])[2]
    assert ":1234 " in line and line.endswith("1.23 ms") and len(line) <= 80


@pytest.mark.parametrize(
    "figure", ["9.8 GiB", "537 MB", "1.23 µs", "95 %", "27.3 GB/s", "1.5 TFLOP/s", "640 B", "3 s"]
)
def test_a_number_is_not_parted_from_its_unit(figure):
    for width in range(16, 40):
        lines = folded(" ", f"it needs some {figure} more, and so on", width=width, indent=3)
        assert " ".join(" ".join(lines).split()) == f"it needs some {figure} more, and so on"
        assert sum(figure in line for line in lines) == 1
        assert max(map(len, lines)) <= width


def test_without_rich_the_text_is_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(MissingDependencyError, match=r"fuselab\[cli\]"):
        table(["a"], [["x"]], right=[])
    explanation = Explanation({"name": "Model", "device": "cpu", "backward": False})
    monkeypatch.setattr(explain_text, "explain_text", lambda facts: table(["a"], [["x"]], right=[]))
    assert str(explanation) == repr(explanation)
