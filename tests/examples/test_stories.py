"""Every story runs, and docs/tutorials/ says what the scripts, their output and the figures say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
    return re.sub(r"[ -]*\d[\d,]*(\.\d+)?", "#", text)


FRACTION = re.compile(r"[ -]*\d[\d,]*\.\d+")


def rounded_alike(new: str, old: str) -> bool:
    """Whether two texts agree, where numbers with a fraction may differ by one in their last digit.

    A sum is rounded in another order on a machine with other vectors, and what is printed of it may
    round to the neighbour; integers and words are the same everywhere.
    """
    if FRACTION.sub("#", new) != FRACTION.sub("#", old):
        return False
    pairs = zip(FRACTION.findall(new), FRACTION.findall(old), strict=True)
    for digits in pairs:
        one, other = (Decimal(re.sub(r"[ ,]|-(?=.*-)", "", text)) for text in digits)
        last = min(each.as_tuple().exponent for each in (one, other))
        if abs(one - other) > Decimal(1).scaleb(int(last)):
            return False
    return True


def called_once(function: Callable[..., Any], *args: Any, **options: Any) -> SimpleNamespace:
    """What a story reads of ``fuselab.time``."""
    function(*args)
    return SimpleNamespace(median_us=1.0, host_us=1.0)


@stories
def test_the_page_has_the_script_and_the_figures_of_today(name: str) -> None:
    assert committed(name) == tutorials.renewed(name), MEND


@pytest.fixture
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """Compilation and repeats would take minutes, for times that nothing here looks at."""

    def hurry(module: ModuleType) -> None:
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
        monkeypatch.setattr(fuselab, "time", called_once)
        if hasattr(module, "ROWS"):
            monkeypatch.setattr(module, "ROWS", 7_000)
        if hasattr(module, "seconds"):  # of compilers in processes of their own
            monkeypatch.setattr(
                module, "seconds", lambda tool, _: called_once(module.COMPILERS[tool]).median_us
            )

    return hurry


@stories
@pytest.mark.skipif(torch.cuda.is_available(), reason="the pages were printed on a CPU")
def test_the_script_prints_what_the_page_shows(
    name: str, tmp_path: Path, without_measuring: Callable[[ModuleType], None]
) -> None:
    module = tutorials.load(name)
    without_measuring(module)
    shown = tutorials.outputs_of(committed(name))
    for step, old, new in zip(
        module.STEPS, shown, tutorials.printed(module, tmp_path), strict=True
    ):
        if tutorials.is_measured(step.__name__):
            old, new = without_measurements(old), without_measurements(new)
        new, old = new.strip("\n"), old.strip("\n")
        assert new == old or rounded_alike(new, old), f"{step.__name__}: {MEND}\n{new}"
        for picture in tutorials.WROTE.findall(new):
            assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("new", "old", "alike"),
    [
        ("loss 0.664", "loss 0.665", True),
        ("loss 0.664", "loss 0.666", False),
        ("rank 10:  9.9% lost", "rank 10: 10.0% lost", True),
        ("rank 10:  9.9% lost", "rank 11:  9.9% lost", False),
        ("[0.5, 0.62]", "[0.5, 0.622]", False),
        ("[0.0, -0.001]", "[-0.0, 0.0]", True),
        ("2 rows, True", "2 rows, False", False),
        ("loss nan", "loss 0.0", False),
        ("1,918.2 kB", "1,918.3 kB", True),
    ],
)
def test_printed_numbers_may_round_to_the_neighbour_and_no_further(
    new: str, old: str, alike: bool
) -> None:
    assert rounded_alike(new, old) == rounded_alike(old, new) == alike


@stories
@pytest.mark.gpu
def test_the_script_runs_on_a_gpu(
    name: str, tmp_path: Path, without_measuring: Callable[[ModuleType], None]
) -> None:
    """Scripts assert what they show; a measured line on a CPU has one on a GPU too, or more."""
    module = tutorials.load(name)
    without_measuring(module)
    shown = tutorials.outputs_of(committed(name))
    for old, new in zip(shown, tutorials.printed(module, tmp_path), strict=True):
        assert len(new.splitlines()) >= len(old.strip().splitlines())


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


def test_what_is_not_on_file_is_left_out_with_the_line_that_announces_it() -> None:
    prose = "One.\n\nThe operator:\n\n[{}: {}]\n\nTwo."
    missing = {
        "figures": "no_such forward float32",
        "plot": "no_such forward float32",
        "host": "no_such forward float32",
        "steps": "no_such.json",
        "bars": "modes no_such.json",
        "file": "no_such.txt",
    }
    for kind, of in missing.items():
        assert tutorials.carried_out(prose.format(kind, of)) == ["One.", "Two."], kind
    kept = tutorials.carried_out(prose.format("figures", "softmax forward float32"))
    assert kept[1] == "The operator:" and kept[2].startswith("| us | eager |")


def test_what_a_measured_step_printed_beside_stands_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written step by step, and no output of the page's own machine."""
    source = '"""Title."""\n\n# ## One\n\n\ndef time_it():\n    print(7)\n    print("wrote a.png")'
    source += "\n\n\ndef shown():\n    print(8)\n\n\nSTEPS = (time_it, shown)\n"
    (tmp_path / "tale.py").write_text(source)
    monkeypatch.setattr(tutorials, "SCRIPTS", tmp_path)
    monkeypatch.setattr(tutorials, "RESULTS", tmp_path)
    without = tutorials.page("tale", ["1\n", "8\n"], "*Printed on paper*")
    tutorials.print_beside("tale", tmp_path)
    text = tutorials.page("tale", ["1\n", "8\n"], "*Printed on paper*")
    assert json.loads((tmp_path / "story.tale.json").read_text())["printed"] == {"time_it": "7"}
    assert "```text beside\n7\n```" in text and "beside" not in without
    assert tutorials.outputs_of(text) == tutorials.outputs_of(without) == ["1\n", "8\n"]


def test_bars_are_drawn_where_there_is_one_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tutorials, "PICTURES", tmp_path)
    tutorials.draw("generalized_box_iou_loss", "forward+backward", "float32")
    tutorials.draw_study("steps", tutorials.RESULTS / "dlrm_step.json")
    tutorials.draw_study("modes", tmp_path / "no_such.json")
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn >= {"h200-dlrm_step.png"} and len(drawn) == 2


def test_tables_of_training_runs_come_from_their_files(tmp_path: Path) -> None:
    environment = {"device_name": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-21T10:00"}
    plan = {"steps": 2000, "batch_size": 64, "optimizer": "sgd", "lr": 0.1}
    ranges = {"copy": 1.5, "forward": 20.0}
    payloads: dict[str, dict[str, Any]] = {
        "steps": {
            "largest_table": 1000,
            "measured": [
                {"case": "dot-128", "provider": "ours", "precision": "bf16", "loop_us": 90.5},
                {"case": "dot-2048", "provider": "strong", "precision": "tf32", "loop_us": 351.0},
            ],
        },
        "ranges": {
            "settings": {"batch_size": 8, "runs": 3, "steps": 20},
            "variants": [
                {
                    "variant": {"loss": "cuda", "model": "eager", "casts": False},
                    "ranges_us": ranges,
                    "step_us": 21.5,
                    "held_out": 0.5,
                }
            ],
        },
        "loader": {
            "rows": 1000,
            "figures": {
                "8: in order (M rows/s)": 9.5,
                "8: given (M rows/s)": 7.25,
                "8: step (M rows/s)": 6.0,
                "8: fed (M rows/s)": 5.125,
            },
        },
        "parity": {
            "runs": {
                way: {
                    "0": {**plan, "held_out": {"loss": loss, "auc": 0.75}},
                    "1": {**plan, "held_out": {"loss": 0.5, "auc": 0.76}},
                }
                for way, loss in (("eager fp32", 0.51), ("fused bf16", 0.5102))
            }
        },
        "modes": {
            "settings": {
                "hidden": 64,
                "rank": 8,
                "steps": 10,
                "batch_size": 16,
                "amp": True,
            },
            "modes": [
                {
                    "mode": "fused",
                    "loss": 0.1,
                    "accuracy": 0.975,
                    "step_us": 50.0,
                    "peak_bytes": 2000,
                }
            ],
        },
    }
    rows = {
        "steps": "| ours, bf16 | 90.50 | – |",
        "ranges": "| cuda | eager | none | 1.500 | 20.00 | 21.50 | 0.500 |",
        "loader": "| batch 8 | 9.500 | 7.250 | 6.000 | 5.125 |",
        "parity": "| fused bf16 | 0.51020 | 0.50000 | 0.7500 to 0.7600 | 0.0002 |",
        "modes": "| fused | 0.1000 | 97.5% | 50.00 | 2.00 kB |",
    }
    for kind, payload in payloads.items():
        file = tmp_path / f"{kind}.json"
        assert tutorials.trained(kind, file) == ""
        file.write_text(json.dumps({"environment": environment, **payload}))
        table = tutorials.trained(kind, file).splitlines()
        assert rows[kind] in table and table[-1].startswith("NVIDIA H200, torch 2.11.0, 2026-11-21")
