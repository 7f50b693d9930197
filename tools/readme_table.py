"""The README's table, made from the result files under benchmarks/.

python tools/readme_table.py prints it; tools/figures.py puts it into README.md between its marks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

CLONE = Path(__file__).resolve().parents[1]
RESULTS = CLONE / "benchmarks"
BEGIN, END = "<!-- table: tools/readme_table.py -->\n", "<!-- end of table -->"

# The rows of the tables: operator, case, dtype, phase.
H200_ROWS = (
    ("add_mul_activation", "4x4", "float32", "forward"),
    ("add_mul_activation", "65536x512", "float32", "forward"),
    ("add_mul_activation", "262144x1024", "float32", "forward"),
    ("softmax", "4096x4096", "float32", "forward"),
    ("softmax", "4096x16384", "bfloat16", "forward"),
    ("softmax", "2048x65536", "float32", "forward"),
    ("softmax", "1024x262144", "float32", "backward"),
    ("log_softmax", "32x19x128x128 dim 1", "bfloat16", "forward+backward"),
    ("generalized_box_iou_loss", "65536x256", "float32", "forward+backward"),
    ("linear_activation", "65536x512->256", "bfloat16", "forward+backward"),
    ("dot_interaction", "2048x26x16", "float32", "forward+backward"),
    ("dot_interaction", "65536x26x16", "float32", "forward+backward"),
    ("dot_interaction", "65536x26x16", "bfloat16", "forward+backward"),
    ("outer_interaction_linear", "2048x26x16->512 relu", "bfloat16", "forward+backward"),
)
# Rows of benchmarks/cpu/operators.json: the instruction set that most machines have, and operator,
# case, use.
CPU_INSTRUCTION_SET = "avx2"
CPU_ROWS = (
    ("bias_activation", "1000x367 relu", "inference"),
    ("add_mul_activation", "4096x1024 gelu", "training"),
    ("softmax", "4096x1024", "inference"),
    ("softmax", "24000x1001", "inference"),
    ("log_softmax", "4096x1024", "training"),
    ("dot_interaction", "2048x26x16", "training"),
    ("generalized_box_iou_loss", "65536 none", "training"),
    ("linear_sigmoid", "16384x256", "inference"),
    ("embedding_lookup", "2048 ids of 26 tables, 840543 rows x 16", "inference"),
)


def microseconds(record: dict[str, Any] | None, key: str) -> str:
    """Format a time for the table, with three significant digits."""
    if record is None or record.get(key) is None:
        return "–"
    value = record[key]
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def fastest(records: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """Return the record with the least time among those that have one."""
    timed = [record for record in records if record.get(key) is not None]
    return min(timed, key=lambda record: record[key], default=None)


def implementation(record: dict[str, Any]) -> str | None:
    """Return the implementation of ours that a record timed, also if ``auto`` took it."""
    if record["kind"] == "auto":
        return str(record["note"] or "").partition("auto takes ")[2] or None
    return str(record["provider"]) if record["kind"] == "implementation" else None


def files_of(folder: Path, operator: str, host: bool) -> list[Path]:
    """Return an operator's result files; for ``host`` times only the first.

    The others were measured beside other work, which affects host time.
    """
    return [
        *folder.glob(f"{operator}.json"),
        *(() if host else folder.glob(f"{operator}.*.json")),
    ]


def group_of(folder: str, operator: str, case: str, dtype: str, phase: str) -> dict[str, Any]:
    """Return a row's group from the newest file of its operator that has it with ours."""
    return result_of(folder, operator, case, dtype, phase)[1]


def result_of(
    folder: str, operator: str, case: str, dtype: str, phase: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the environment in which a row was measured, and its ``group_of``."""
    files = files_of(RESULTS / folder, operator, host=case == "4x4")
    results = [json.loads(file.read_text()) for file in files]
    results.sort(key=lambda result: result["environment"]["date"], reverse=True)
    return next(
        (result["environment"], group)
        for result in results
        for group in result["groups"]
        if (group["case"], group["dtype"], group["phase"]) == (case, dtype, phase)
        and has_ours(group)
    )


def has_ours(group: dict[str, Any]) -> bool:
    """Return whether an implementation of ours was timed by name.

    Files of further peers have only ``auto`` beside them, and are not a newer measurement of the
    others.
    """
    return any(record["kind"] == "implementation" for record in group["records"])


def line(folder: str, operator: str, case: str, dtype: str, phase: str) -> str:
    """Return one row of a table."""
    records = group_of(folder, operator, case, dtype, phase)["records"]
    tiny = case == "4x4"
    key = "host_us" if tiny else "median_us"
    compiled = fastest([r for r in records if r["provider"].startswith("compile")], key)
    scripted = fastest([r for r in records if r["provider"] == "torchscript"], key)
    eager = fastest([r for r in records if r["provider"] == "eager"], key)
    ours = fastest([r for r in records if r["kind"] == "implementation"], key)
    taken = fastest([r for r in records if r["kind"] == "auto" and implementation(r)], key)
    if taken and implementation(taken) not in {r["provider"] for r in records}:
        ours = taken  # the implementation that auto took had no row of its own
    assert ours is not None
    limit = "host time" if tiny else f"{100 * ours['ceiling_share']:.0f} %"
    return (
        f"| `{operator}` {phase} | {case} {dtype} | {microseconds(eager, key)} "
        f"| {microseconds(scripted, key)} | {microseconds(compiled, key)} "
        f"| **{microseconds(ours, key)}** ({implementation(ours)}) | {limit} |"
    )


def cpu_results() -> dict[str, Any]:
    """Return the results of ``benchmarks/cpu_operators.py``, by instruction set."""
    found: dict[str, Any] = json.loads((RESULTS / "cpu" / "operators.json").read_text())
    return found


def cpu_row(rows: list[dict[str, Any]], operator: str, case: str, use: str) -> dict[str, Any]:
    """Return the results of one row of the CPU's table."""
    return next(
        row for row in rows if (row["operator"], row["case"], row["use"]) == (operator, case, use)
    )


def cpu_line(rows: list[dict[str, Any]], operator: str, case: str, use: str) -> str:
    """Return one row of the CPU's table."""
    row = cpu_row(rows, operator, case, use)
    phase = "forward" if use == "inference" else "forward+backward"
    eager, compiled, ours = (
        microseconds(row["us"], name) for name in ("reference", "compile", "auto")
    )
    ratio = row["eager_over_auto"][0]
    return (
        f"| `{operator}` {phase} | {case} {row['dtype']} | {eager} | {compiled} "
        f"| **{ours}** ({row['auto_takes']}) | {ratio:.2f} x |"
    )


def cpu_summary(found: dict[str, Any]) -> str:
    """Return how all rows of an instruction set compare with eager."""
    ratios = [row["eager_over_auto"][0] for row in found["rows"]]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return (
        f"{len(ratios)} rows, {mean:.2f} x eager in the geometric mean, {min(ratios):.2f} at least"
    )


def limit() -> str:
    """Return the explanation of the H200 table's last column, with the rows bound by arithmetic."""
    bounds = {row: group_of("nvidia-h200", *row)["ceiling"]["bound"] for row in H200_ROWS}
    computes = [f"`{row[0]}` {row[1]}" for row, bound in bounds.items() if bound == "compute"]
    return (
        "The limit is the fastest kernel that only moves the same bytes, timed in the same rounds "
        "(a little over 100 % is its own spread), or a matrix product of as many operations at the "
        f"library's measured rate where that is more: {' and '.join(computes) or 'in no row here'}."
    )


def table() -> str:
    """Return both tables, each with the line that says where it comes from."""
    places = [result_of("nvidia-h200", *row)[0] for row in H200_ROWS]
    days = sorted({place["date"][:10] for place in places})
    (h200,) = {
        f"{place['device_name']}, torch {place['torch']}, Triton {place['triton']}"
        for place in places
    }
    everywhere = cpu_results()
    found = everywhere[CPU_INSTRUCTION_SET]
    machines = [
        found["environments"][place]
        for place in sorted({cpu_row(found["rows"], *row)["environment"] for row in CPU_ROWS})
    ]
    cpus = " and ".join(
        f"{cpu['threads']} cores of an {cpu['cpu']} with {CPU_INSTRUCTION_SET.upper()}, torch "
        f"{cpu['torch']}, {cpu['date']}"
        for cpu in machines
    )
    others = "; ".join(f"{name}: {cpu_summary(one)}" for name, one in everywhere.items())
    head = [
        "| us per call | size | eager | TorchScript | torch.compile | fuselab | of the limit |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(
        [
            *head,
            *(line("nvidia-h200", *row) for row in H200_ROWS),
            "",
            f"{h200}, {' to '.join(dict.fromkeys((days[0], days[-1])))}: medians, cold L2, all "
            f"providers of a row interleaved in one run. {limit()}",
            "",
            "| us per call | size | eager | torch.compile | fuselab | to eager |",
            "|---|---|---|---|---|---|",
            *(cpu_line(found["rows"], *row) for row in CPU_ROWS),
            "",
            f"{cpus}, warm cache, torch.compile with dynamic shapes. "
            f"Every operator with a C++ kernel at twelve sizes, by instruction set: {others}. "
            "[All rows](benchmarks/cpu/operators.md), [commands](benchmarks/README.md).",
            "",
        ]
    )


def written(readme: str) -> str:
    """Return ``readme`` with the table in its place."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    print(table())
