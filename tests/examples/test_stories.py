"""Every story runs, and docs/tutorials/ says what the scripts, their output and the figures say."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fuselab

CLONE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CLONE / "tools"))

import tutorials  # noqa: E402

MEND = "run python tools/tutorials.py and commit docs/tutorials"
stories = pytest.mark.parametrize("name", tutorials.STORIES)


def committed(name: str) -> str:
    return (tutorials.FOLDER / f"{name}.md").read_text(encoding="utf-8")


def without_measurements(text: str) -> str:
    """Numbers as #, however many digits and spaces they take."""
    return re.sub(r"[ -]*\d+(\.\d+)?", "#", text)


def called_once(function: Callable[..., Any], *args: Any, **options: Any) -> SimpleNamespace:
    """What a story reads of ``fuselab.time``."""
    function(*args)
    return SimpleNamespace(median_us=1.0, host_us=1.0)


@stories
def test_the_page_has_the_script_and_the_figures_of_today(name: str) -> None:
    assert committed(name) == tutorials.renewed(name), MEND


@stories
@pytest.mark.skipif(torch.cuda.is_available(), reason="the pages were printed on a CPU")
def test_the_script_prints_what_the_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tutorials.load(name)
    # Compilation and repeats would take a minute, for times that nothing here looks at.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(fuselab, "time", called_once)
    if hasattr(module, "seconds"):  # of compilers in processes of their own
        monkeypatch.setattr(
            module, "seconds", lambda tool, caches: called_once(module.COMPILERS[tool]).median_us
        )
    shown = tutorials.outputs_of(committed(name))
    for step, old, new in zip(
        module.STEPS, shown, tutorials.printed(module, tmp_path), strict=True
    ):
        if step.__name__.startswith("time_"):
            old, new = without_measurements(old), without_measurements(new)
        assert new.strip("\n") == old.strip("\n"), f"{step.__name__}: {MEND}"
        for picture in tutorials.WROTE.findall(new):
            assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_links_and_pictures_exist() -> None:
    pages = [*tutorials.STORIES, "README"]
    assert {file.stem for file in tutorials.FOLDER.glob("*.md")} == set(pages), MEND
    for name in pages:
        prose = re.sub(r"^```.*?^```$", "", committed(name), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (tutorials.FOLDER / target).exists(), f"{name}: {target}"


def test_the_index_is_made_from_the_scripts() -> None:
    assert committed("README") == tutorials.index(), MEND


def test_pages_are_put_together_in_the_order_of_the_script() -> None:
    source = '"""Title.\n\nIntro."""\nimport os\n\n# ## One\n\nx = 1\n\n\ndef step():\n'
    source += "    # not prose\n    print(x)\n\n\n# Two\n\nSTEPS = (step,)\n"
    found = [(piece.kind, piece.text) for piece in tutorials.pieces(source, ["step"])]
    assert found == [
        ("prose", "## One"),
        ("code", "x = 1\n\n\ndef step():\n    # not prose\n    print(x)"),
        ("output", "step"),
        ("code", ""),
        ("prose", "Two"),
    ]


def test_tables_show_the_digits_of_the_files() -> None:
    groups = tutorials.measured("softmax", "forward", "float32")
    widest = groups[-1]
    assert widest.group["case"] == "1024x262144" and widest.file.name == "softmax.wide.json"
    time = tutorials.time_of(widest.group, "cuda")
    assert time is not None and tutorials.digits(time) in tutorials.table(groups).splitlines()[-3]
    assert tutorials.directive("[figures: no_such forward float32]").startswith("No figures")
