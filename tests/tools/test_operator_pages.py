"""docs/operators/ says what the contracts and the benchmarks say now."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CLONE / "tools"))

import operator_pages  # noqa: E402

PAGES = operator_pages.pages()
MEND = "run python tools/operator_pages.py and commit docs/operators"


def test_every_package_has_a_page_and_nothing_else_has() -> None:
    committed = {file.name for file in operator_pages.FOLDER.iterdir()}
    assert committed == {"README.md", *(f"{name}.md" for name in operator_pages.paged())}, MEND


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_the_one_that_the_tool_makes(name: str) -> None:
    assert (operator_pages.FOLDER / name).read_text(encoding="utf-8") == PAGES[name], MEND


def test_pages_show_the_measured_digits() -> None:
    result = json.loads((CLONE / "benchmarks" / "nvidia-h200" / "softmax.json").read_text())
    group = result["groups"][0]
    records = {record["provider"]: record for record in group["records"]}
    (row,) = (
        line
        for line in PAGES["softmax.md"].splitlines()
        if line.startswith(f"| {group['case']} | {group['dtype']} {group['phase']} |")
        and f"{records['cuda']['median_us']:.4g}"[:4] in line
    )
    share = f"({100 * records['cuda']['ceiling_share']:.0f} %)"
    assert row.endswith(f"{share} |")
    assert f"{records['eager']['median_us']:.4g}"[:4] in row


def test_what_auto_takes_has_a_column_where_nothing_else_shows_it() -> None:
    eager = {"provider": "eager", "kind": "eager", "note": None, "median_us": 4.0}
    cuda = {"provider": "cuda", "kind": "implementation", "note": None, "median_us": 2.0}
    auto = {"provider": "auto", "kind": "auto", "note": "auto takes cuda", "median_us": 2.1}
    group = {"case": "4x4", "dtype": "float32", "phase": "forward", "verdicts_by": "device time"}

    def row(*records: dict[str, object]) -> str:
        shared = {"ceiling_share": 0.5, "host_us": 1.0}
        given = {**group, "records": [{**shared, **record} for record in records]}
        return operator_pages.measured_row(given, ["auto"])

    assert row(eager, auto).endswith("| 2.100 (50 %) cuda |")
    assert row(eager, cuda, auto).endswith(f"| {operator_pages.NONE} |")
    group["phase"] = "backward"
    assert row(eager, auto).endswith("| 2.100 (50 %) |")
    assert row(eager, {**auto, "note": "auto runs the reference"}).endswith(
        f"| {operator_pages.NONE} |"
    )


def test_links_lead_to_files() -> None:
    for name, page in PAGES.items():
        for target in operator_pages.re.findall(r"\]\(([^)#]+)\)", page):
            assert (operator_pages.FOLDER / target).exists(), f"{name}: {target}"


def test_of_several_days_the_newest_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: str, day: str, *cases: str) -> None:
        groups = [{"case": case, "dtype": "float32", "phase": "forward"} for case in cases]
        payload = {"environment": {"date": f"{day}T12:00:00"}, "groups": groups}
        (tmp_path / "gpu" / file).write_text(json.dumps(payload))

    (tmp_path / "gpu").mkdir()
    write("op.json", "2026-11-20", "old and new", "old")
    write("op.peer.json", "2026-11-22", "old and new")
    write("op.wide.json", "2026-11-22", "old and new", "new")
    write("op.worn.json", "2026-11-19", "old and new", "old")
    monkeypatch.setattr(operator_pages, "RESULTS", tmp_path)
    found = {
        file.name: [group["case"] for group in payload["groups"]]
        for file, payload in operator_pages.result_files("op")
    }
    assert found == {
        "op.json": ["old"],
        "op.peer.json": ["old and new"],
        "op.wide.json": ["old and new", "new"],
    }
    assert operator_pages.where_measured("op") == "gpu, 2026-11-20; gpu, 2026-11-22"


def test_floors_count_what_the_contract_counts() -> None:
    assert operator_pages.count(0) == "0"
    assert operator_pages.count(999) == "999"
    assert operator_pages.count(20_971_520) == "20.97M"
    assert operator_pages.count(3 * 10**15) == "3000T"
    assert "| 4096x1024 | 16.8 MB | 16.8 MB | 20.97M fp32 |" in PAGES["softmax.md"]
    # Where float32 was not timed, the floor is of what was.
    page = PAGES["linear_activation.md"]
    assert "every output byte written once; bfloat16." in page
    assert "| 4096x4096->4096 | 67.1 MB | 33.6 MB | 137.4G bf16 |" in page
