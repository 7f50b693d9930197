"""The README's table, made from the result files under benchmarks/.

python tools/readme_table.py          print it
python tools/readme_table.py --write  put it into README.md between its two marks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CLONE = Path(__file__).resolve().parents[1]
RESULTS = CLONE / "benchmarks" / "nvidia-h200"
BEGIN, END = "<!-- table: tools/readme_table.py -->\n", "<!-- end of table -->"

# What the table shows: operator, case, dtype, phase.
ROWS = (
    ("add_mul_activation", "4x4", "float32", "forward"),
    ("add_mul_activation", "65536x512", "float32", "forward"),
    ("add_mul_activation", "262144x1024", "float32", "forward"),
    ("softmax", "4096x4096", "float32", "forward"),
    ("softmax", "4096x16384", "float32", "forward"),
    ("softmax", "4096x16384", "bfloat16", "forward"),
    ("softmax", "4096x4096", "float32", "backward"),
    ("softmax", "4096x16384", "float32", "backward"),
    ("softmax", "4096x16384", "bfloat16", "backward"),
)


def microseconds(record: dict[str, Any] | None, key: str) -> str:
    """A time as the table shows it: three significant digits."""
    if record is None or record.get(key) is None:
        return "–"
    value = record[key]
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def fastest(records: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """The record with the least time among those that have one."""
    timed = [record for record in records if record.get(key) is not None]
    return min(timed, key=lambda record: record[key], default=None)


def line(operator: str, case: str, dtype: str, phase: str) -> str:
    """One row, from the file of its operator."""
    result = json.loads((RESULTS / f"{operator}.json").read_text())
    group = next(
        group
        for group in result["groups"]
        if (group["case"], group["dtype"], group["phase"]) == (case, dtype, phase)
    )
    records = group["records"]
    tiny = case == "4x4"
    key = "host_us" if tiny else "median_us"
    compiled = fastest([r for r in records if r["provider"].startswith("compile")], key)
    scripted = fastest([r for r in records if r["provider"] == "torchscript"], key)
    eager = fastest([r for r in records if r["provider"] == "eager"], key)
    ours = fastest([r for r in records if r["kind"] == "implementation"], key)
    assert ours is not None
    limit = "host time" if tiny else f"{100 * ours['ceiling_share']:.0f} %"
    return (
        f"| `{operator}` {phase} | {case} {dtype} | {microseconds(eager, key)} "
        f"| {microseconds(scripted, key)} | {microseconds(compiled, key)} "
        f"| **{microseconds(ours, key)}** ({ours['provider']}) | {limit} |"
    )


def table() -> str:
    """The table with the line that says where it comes from."""
    environment = json.loads((RESULTS / "softmax.json").read_text())["environment"]
    date = str(environment["date"])[:10]
    return "\n".join(
        [
            "| us per call | size | eager | TorchScript | torch.compile | fuselab | of the limit |",
            "|---|---|---|---|---|---|---|",
            *(line(*row) for row in ROWS),
            "",
            f"{environment['device_name']}, torch {environment['torch']}, Triton "
            f"{environment['triton']}, {date}: medians, cold L2, all providers interleaved in one "
            "run. The limit is the fastest kernel that only moves the same bytes, timed in the same "
            "rounds; a little over 100 % is its own spread. Commands and full results: "
            "[benchmarks](benchmarks/README.md).",
            "",
        ]
    )


def written(readme: str) -> str:
    """``readme`` with the table in its place."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        path = CLONE / "README.md"
        path.write_text(written(path.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
