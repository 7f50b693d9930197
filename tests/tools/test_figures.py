"""tools/figures.py: the pages say what the result files say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import figures
import readme_table
import tutorials

MEND = "run python tools/figures.py and commit what it wrote"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_pages_have_the_figures_on_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.BLOCK.search(text)
    assert figures.written(text, figures.PAGES[page]) == text, MEND


def test_a_block_is_made_anew_and_empty_without_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tutorials, "RESULTS", tmp_path)
    page = "A.\n\n<!-- figures: {} steps.json -->\n{}<!-- end of figures -->\n\nB.\n"
    for kind in ("sentence", "steps"):
        assert figures.written(page.format(kind, "\nold\n\n"), "..") == page.format(kind, "")
    times = {"dot-128": 90.6, "dot-2048": 135.2, "dot-65536": 942.4}
    measured = [
        {"case": case, "provider": who, "precision": "bf16", "loop_us": factor * us}
        for who, factor in (("strong", 2), ("ours", 1))
        for case, us in times.items()
    ]
    facts = {"device_name": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-21T10:00"}
    payload = {"environment": facts, "largest_table": 1000, "measured": measured[1:]}
    (tmp_path / "steps.json").write_text(json.dumps(payload))
    assert figures.written(page.format("sentence", ""), ".") == page.format("sentence", "")
    payload["measured"] = measured
    (tmp_path / "steps.json").write_text(json.dumps(payload))
    said = " ".join(figures.written(page.format("sentence", ""), ".").split())
    assert "takes 91 us at 128 rows on an H200, 135 at 2048 and 942 at 65536." in said
    assert "takes 181, 270 and 1885." in said
    table = figures.written(page.format("steps", ""), "..")
    assert "| ours, bf16 | 90.60 | 135.2 | 942.4 |" in table
    assert "](../benchmarks/nvidia-h200/steps.json)" in table


def test_a_newer_file_of_peers_alone_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all, of_peers = [{"kind": "auto"}, {"kind": "implementation"}], [{"kind": "auto"}]
    for name, day, records in (("softmax", 10, of_all), ("softmax.liger", 11, of_peers)):
        group = {"case": "8x8", "dtype": "float32", "phase": "forward", "records": records}
        payload = {"environment": {"date": f"2026-11-{day}"}, "groups": [group | {"bytes_read": 1}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(payload))
    monkeypatch.setattr(tutorials, "RESULTS", tmp_path)
    monkeypatch.setattr(readme_table, "RESULTS", tmp_path)
    (taken,) = tutorials.measured("softmax", "forward", "float32")
    assert taken.group["records"] == of_all
    row = readme_table.group_of(".", "softmax", "8x8", "float32", "forward")
    assert row["records"] == of_all
