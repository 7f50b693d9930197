"""``fuselab data``: make synthetic Criteo rows, and say what a file holds."""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fuselab.data.description import Description
from fuselab.data.description import describe as describe_file
from fuselab.data.synthetic import synthesize as synthesize_file
from fuselab.data.batches import TruncatedLineWarning
from fuselab.device import environment
from fuselab.report.files import replacing, write_json

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON too.")
]


def add(app: typer.Typer) -> None:
    """Registers the verb."""
    verbs = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    verbs.command()(synthesize)
    verbs.command()(describe)
    app.add_typer(verbs, name="data", help="Criteo's layout: synthesize rows, describe a file.")


def synthesize(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="TSV to write; .gz compresses.")
    ],
    rows: Annotated[int, typer.Option(help="How many rows.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Which rows; the click model stays the same.")] = 0,
    json: JsonFile = None,
) -> None:
    """Write synthetic rows in Criteo's layout, with a signal that a model can learn."""
    start = time.perf_counter()
    with replacing(output) as temporary:  # which keeps the suffix, and so the compression
        synthesize_file(temporary, rows, seed)
    seconds = time.perf_counter() - start
    result = {"file": str(output), "rows": rows, "seed": seed, "rows_per_s": round(rows / seconds)}
    print(f"{output}: {rows:,} rows, seed {seed}, {result['rows_per_s']:,} rows/s")
    _write(json, "data synthesize", result)


def describe(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Criteo TSV; .gz is fine.")],
    json: JsonFile = None,
) -> None:
    """Say what a file holds: rows, positives, missing fields, ranges, cardinalities."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TruncatedLineWarning)
        found = describe_file(file)
    seconds = time.perf_counter() - start
    left_out = [str(warning.message) for warning in caught]
    for sentence in left_out:
        print(f"fuselab: warning: {sentence}", file=sys.stderr)
    result = {
        **asdict(found),
        "label_rate": round(found.label_rate, 4),
        "left_out": left_out,
        "rows_per_s": round(found.rows / seconds),
    }
    _show(found, result["rows_per_s"])
    _write(json, "data describe", result)


def _show(found: Description, rows_per_s: int) -> None:
    console = Console(highlight=False, markup=False)
    console.print(f"{found.file}: {found.rows:,} rows, read at {rows_per_s:,} rows/s")
    console.print(f"positives  {found.positives:,} ({found.label_rate:.2%})\n")
    table = Table("column", box=box.SIMPLE_HEAD)
    for heading in ("missing", "smallest", "largest", "mean log", "distinct ids"):
        table.add_column(heading, justify="right")
    for count in found.counts:
        mean_log = "" if count.mean_log is None else f"{count.mean_log:.2f}"
        extremes = ("" if end is None else f"{end:,}" for end in (count.smallest, count.largest))
        table.add_row(count.name, f"{count.missing / found.rows:.1%}", *extremes, mean_log, "")
    for ids in found.ids:
        missing = f"{ids.missing / found.rows:.1%}"
        table.add_row(ids.name, missing, "", "", "", f"{ids.cardinality:,}")
    console.print(table)


def _write(path: Path | None, verb: str, result: dict[str, Any]) -> None:
    if path is not None:
        payload = {"schema": 1, "verb": verb, "environment": environment.describe(), **result}
        write_json(path, payload)
