"""Times of every operator's C++ kernels on this CPU beside eager PyTorch, by which ``auto``
chooses.

``measure`` times the ``cpu_cases`` of the library's operators in this process and returns the table
that ``fuselab.runtime.cpu_choice`` reads. ``python -m fuselab.prove.cpu_times FILE`` does the same
in its own process, started with pinned allocation (``fuselab.measure.fresh``), and writes the
table. With ``--rows`` it instead times the cases tagged ``row`` through eager, torch.compile and
``auto``, for the published table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fuselab import ops
from fuselab.composition import Composition
from fuselab.device.environment import describe
from fuselab.measure import fresh
from fuselab.measure.statistics import median_interval
from fuselab.op import Case, FusedOp, dtype_name
from fuselab.prove import cpu_builds
from fuselab.prove.cpu_points import CPU, REFERENCE, Point, points_of, timed_operators
from fuselab.prove.load import load
from fuselab.runtime import autograd_node, cpu_choice, dispatch
from fuselab.runtime.instruction_set import instruction_set

# Seconds for the rounds of one point, and the fewest rounds; a slow call gets only the latter.
BUDGET_S, FEWEST_ROUNDS = 0.06, 5
ROW_BUDGET_S, FEWEST_ROW_ROUNDS = 0.3, 7

Progress = Callable[[str], None]


def measure(
    names: Sequence[str] | None = None,
    most_bytes: int | None = None,
    dtypes: Sequence[str] | None = None,
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """Time operators (those that ``names`` load, or all of the library) and return the table, by
    operator, use, dtype and regime: lists of bytes moved and microseconds by provider, ascending.

    Args:
        most_bytes: larger cases are left out.
        dtypes: floating dtypes other than these are left out.
        progress: called with one line per operator.
    """
    autograd_node.start()
    operators: dict[str, Any] = {}
    for op in (one for name in names or timed_operators() for one in _operators(name)):
        progress(f"{op.name}: {len(op.cpu_cases or op.cases)} cases")
        table: dict[str, Any] = {}
        points = [
            (case, dtype)
            for case, dtype in points_of(op)
            if dtypes is None or not dtype.is_floating_point or dtype_name(dtype) in dtypes
        ]
        cpu_builds.build(op, points)
        for case, dtype in points:
            for use in ("inference", "training") if op.gradient is not None else ("inference",):
                point = Point(op, case, dtype, use)
                if most_bytes is not None and point.moved > most_bytes:
                    continue
                times = point.time((REFERENCE, *point.implementations()), BUDGET_S, FEWEST_ROUNDS)
                medians = {name: _microseconds(found) for name, found in times.items()}
                if any(median is None for median in medians.values()):
                    continue
                regimes = table.setdefault(use, {}).setdefault(point.dtype, {})
                regimes.setdefault(point.regime, []).append([point.moved, medians])
        operators[cpu_choice.table_key(op)] = _in_order(table)
    return {
        "schema": cpu_choice.SCHEMA,
        "instruction_set": instruction_set(),
        "environment": describe(CPU),
        "operators": operators,
    }


def _operators(name: str) -> Sequence[FusedOp]:
    """Return the operator that a name or path loads, or all that a folder is composed of."""
    found = load(name)
    return found.operators if isinstance(found, Composition) else (found,)


def _in_order(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with each regime's points ordered by size; of equal sizes the last
    remains."""
    return {
        use: {
            dtype: {
                regime: [[moved, times] for moved, times in sorted(dict(points).items())]
                for regime, points in regimes.items()
            }
            for dtype, regimes in dtypes.items()
        }
        for use, dtypes in table.items()
    }


def _microseconds(times: Sequence[float]) -> float | None:
    """Return the median of a provider's rounds to four digits, or None if it failed."""
    return float(f"{statistics.median(times):.4g}") if times else None


def measure_rows(
    names: Sequence[str] | None = None, progress: Progress = lambda line: None
) -> list[dict[str, Any]]:
    """Time the cases tagged ``row`` through eager, torch.compile and ``auto``; one fact per row.

    ``auto`` follows the table that is in force.
    """
    torch._dynamo.config.cache_size_limit = 64
    autograd_node.start()
    rows = []
    for name in names or timed_operators():
        op = ops.contract(name)
        progress(f"{name}: rows")
        for use in ("inference", "training") if op.gradient is not None else ("inference",):
            rows += [_row(name, op, case, use) for case in op.cpu_cases if "row" in case.tags]
            torch._dynamo.reset()
    return rows


def _row(name: str, op: FusedOp, case: Case, use: str) -> dict[str, Any]:
    point = Point(op, case, op.dtypes[0], use)
    times = point.time((REFERENCE, "compile", "auto"), ROW_BUDGET_S, FEWEST_ROW_ROUNDS)
    medians = {provider: _microseconds(found) for provider, found in times.items()}
    pairs = zip(times[REFERENCE], times["auto"], strict=True)
    ratio = median_interval([theirs / ours for theirs, ours in pairs])
    return {
        "operator": name,
        "case": case.name,
        "use": use,
        "dtype": point.dtype,
        "bytes_moved": point.moved,
        "us": medians,
        "auto_takes": dispatch.choose(op, point.args),
        "eager_over_auto": [round(part, 4) for part in ratio],
    }


def _add_operators(file: Path, table: dict[str, Any]) -> None:
    """Merge the table's operators into those of the file."""
    kept = json.loads(file.read_text(encoding="utf-8"))["operators"] if file.is_file() else {}
    write(file, table | {"operators": dict(sorted((kept | table["operators"]).items()))})


def _drop_library(file: Path) -> None:
    """Remove the library's operators from a table; those of packages remain."""
    if file.is_file():
        table = json.loads(file.read_text(encoding="utf-8"))
        kept = table.get("operators", {})
        write(file, table | {"operators": {name: kept[name] for name in kept if "::" in name}})


def _add_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Merge rows into the file, after those of other operators. A row's ``environment`` is its
    place in the file's ``environments``, one for each machine and day."""
    again = {row["operator"] for row in rows}
    kept: dict[str, Any] = {"environments": [], "rows": []}
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
    whole = [row for row in kept["rows"] if row["operator"] not in again]
    here = describe(CPU)
    here["date"] = here["date"][:10]
    merged: list[dict[str, Any]] = []
    for row, environment in (
        *((row, kept["environments"][row["environment"]]) for row in whole),
        *((row, here) for row in rows),
    ):
        if environment not in merged:
            merged.append(environment)
        row["environment"] = merged.index(environment)
    facts = {
        "instruction_set": instruction_set(),
        "aten": torch.backends.cpu.get_cpu_capability(),
        "environments": merged,
        "rows": whole + rows,
    }
    file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def write(file: Path, table: dict[str, Any]) -> None:
    """Write a table as JSON, one regime to a line, so that two versions compare line by line."""
    text = json.dumps(table, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_joined(text) + "\n", encoding="utf-8")


def _joined(text: str) -> str:
    """Return indented JSON with everything below the fifth level on one line."""
    lines: list[str] = []
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip(" "))
        if depth > 5 or (depth == 5 and line.strip() in ("]", "],")):
            lines[-1] += ("" if lines[-1].endswith(("[", "{")) else " ") + line.strip()
        else:
            lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Measure in this process and write the file named."""
    parser = argparse.ArgumentParser(description="Times of the C++ kernels on this CPU.")
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--operator",
        action="append",
        help="an operator of the library, or the path of a package; the others' times are kept",
    )
    parser.add_argument("--most-bytes", type=int)
    parser.add_argument("--dtype", action="append", help="of floating tensors; all without it")
    parser.add_argument("--rows", action="store_true", help="the published table's rows instead")
    options = parser.parse_args(arguments)

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not options.operator:
            _drop_library(options.file)
        # The file is written after each operator, so that finished ones remain if a later one
        # fails.
        for name in options.operator or timed_operators():
            if options.rows:
                _add_rows(options.file, measure_rows([name], progress))
            else:
                found = measure([name], options.most_bytes, options.dtype, progress)
                _add_operators(options.file, found)
    return 0


def measure_in_process(file: Path, arguments: Sequence[str] = ()) -> int:
    """Run ``main`` in a fresh process with pinned allocation; returns its exit status."""
    return fresh.run_pinned(__name__, [str(file), *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
