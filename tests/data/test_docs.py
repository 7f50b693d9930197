"""The Python of docs/data.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fuselab.data import Position, synthesize
from fuselab.data.prepare import prepare

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_pages_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indented = re.findall(r"(?:^(?:    .*)?\n)+", PAGE.read_text(), flags=re.MULTILINE)
    blocks = [block for block in indented if re.search(r"^    from fuselab", block, re.MULTILINE)]
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    synthesize("train.txt", 600)
    prepare("train.txt", "prepared", processes=1)
    names: dict[str, object] = {}
    for block in blocks:
        exec(re.sub("(?m)^    ", "", block), names)
    assert names["position"] == Position(2, 0)
