"""``fuselab data``: make synthetic Criteo rows, prepare rows for training, describe them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fuselab.cli.options import FILE, Json, Verbs, flag, option, output_option
from fuselab.data.dense import TRANSFORMS, Dense
from fuselab.data.description import Description
from fuselab.data.description import describe as describe_rows
from fuselab.data.ids import Modulus, Vocabulary
from fuselab.data.metadata import load_metadata
from fuselab.data.prepare import VALIDATIONS
from fuselab.data.prepare import prepare as prepare_rows
from fuselab.data.prepared import Prepared, is_prepared
from fuselab.data.synthetic import Synthetic
from fuselab.data.synthetic import synthesize as synthesize_file
from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.report.data_plots import description_plot
from fuselab.report.files import replacing
from fuselab.report.plots import check_plot
from fuselab.report.progress import Progress, say
from fuselab.report.result import write_result
from fuselab.report.screen import folded, table

_SHOWN = 10  # messages on the screen about rows left out; the JSON has a hundred

SourcePath = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A file, a folder or a quoted glob, or the URL of one: Criteo TSV (.gz is fine), "
        ".parquet, .npz.",
    ),
]
OnError = Annotated[
    str, option("At a malformed row: stop, or skip it and list it.", None, "--on-error")
]
LargestTable = Annotated[
    int | None,
    option("Modulus: no table has more rows than this; default: the Kaggle set's.", min=1),
]


def add(app: typer.Typer) -> None:
    """Register the verb."""
    verbs = Verbs()
    verbs.command()(synthesize)
    verbs.command()(prepare)
    verbs.command()(describe)
    summary = "Criteo's rows: synthesize, prepare for training, describe."
    app.add_typer(verbs, name="data", help=summary)


def synthesize(
    output: Annotated[
        Path,
        output_option(
            "TSV to write; .gz compresses, .parquet is parquet; a folder with --prepared.", "PATH"
        ),
    ],
    rows: Annotated[int, option("How many rows.")] = 100_000,
    seed: Annotated[int, option("Seed of the rows; the click model is fixed.")] = 0,
    prepared: Annotated[
        bool, flag("--prepared", "Write a prepared folder instead of a file.")
    ] = False,
    largest_table: LargestTable = None,
    json: Json = None,
) -> None:
    """Write synthetic rows, with a signal that a model can learn."""
    start = time.perf_counter()
    begun = is_prepared(output)
    if prepared:
        ids = _modulus(largest_table)
        with _to_go_on_from():
            prepare_rows(Synthetic(rows, seed), output, ids=ids, progress=Progress())
    elif largest_table is not None:
        raise ArgumentError("--largest-table is about prepared rows; add --prepared.")
    else:
        # the temporary path keeps the suffix, and so the format
        with replacing(output) as temporary:
            synthesize_file(temporary, rows, seed, Progress())
    seconds = time.perf_counter() - start
    rate = None if begun else round(rows / seconds)
    result = {"file": str(output), "rows": rows, "seed": seed, "rows_per_s": rate}
    how = "all or some of them prepared before" if rate is None else f"{rate:,} rows/s"
    print(f"{output}: {rows:,} rows, seed {seed}, {how}")
    write_result(json, "data synthesize", result)


def prepare(
    source: SourcePath,
    output: Annotated[Path, output_option("Folder to write.", "DIR")],
    ids: Annotated[str, option("How ids become indices: modulus, or vocabulary.")] = "modulus",
    largest_table: LargestTable = None,
    min_frequency: Annotated[
        int, option("Vocabulary: ids in fewer training rows count as unknown.")
    ] = 1,
    metadata: Annotated[
        Path | None,
        option(
            "Take vocabulary or cardinalities from this JSON or .npz, or ids and transform "
            "from this prepared folder.",
            "PATH",
        ),
    ] = None,
    dense: Annotated[str | None, option(f"Transform of counts: {', '.join(TRANSFORMS)}.")] = None,
    validation: Annotated[
        str, option(f"Rows kept for validation: {', '.join(VALIDATIONS)}.")
    ] = "auto",
    on_error: OnError = "stop",
    processes: Annotated[
        int | None, option("Processes at once; default: all cores.", min=1)
    ] = None,
    dask: Annotated[
        str | None,
        option("Work on the workers of the Dask scheduler there, instead.", "ADDRESS"),
    ] = None,
    json: Json = None,
) -> None:
    """Write rows as records that train without parsing.

    A second call goes on where an interrupted one stopped.
    """
    if dask is not None and processes is not None:
        raise ArgumentError("--processes is for this machine and --dask for others; give one.")
    start = time.perf_counter()
    told, transform = _told(ids, largest_table, metadata, dense)
    with _to_go_on_from():
        found = prepare_rows(
            source,
            output,
            ids=told,
            min_frequency=min_frequency,
            dense=transform,
            validation=validation,
            skip_malformed=_skips(on_error),
            processes=processes,
            progress=Progress(),
            scheduler=dask,
        )
    seconds = time.perf_counter() - start
    description = Description.from_json(found.manifest["description"])
    _show_left_out(description)
    training = found.validation_first
    result = {
        "folder": str(output),
        "rows": found.rows,
        "training_rows": training,
        "validation_rows": found.rows - training,
        "ids": found.manifest["ids"],
        "cardinalities": found.cardinalities,
        "dense": found.manifest["dense"]["name"],
        "rejected": description.rejected,
        "left_out": description.left_out,
        "seconds": seconds,
    }
    print(
        f"{output}: {training:,} rows to train, {found.rows - training:,} to validate; "
        f"{result['ids']} ids, tables of {sum(found.cardinalities):,} rows, {result['dense']}; "
        f"{seconds:,.1f} s"
    )
    write_result(json, "data prepare", result)


def describe(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A file, a folder or a quoted glob: TSV (.gz is fine), .parquet, .npz, prepared.",
        ),
    ],
    largest_table: LargestTable = None,
    on_error: OnError = "stop",
    plot: Annotated[
        Path | None, option("Draw it: .png, .svg or .pdf.", "FILE", click_type=FILE)
    ] = None,
    json: Json = None,
) -> None:
    """Say what rows hold: missing fields, ranges, ids, collisions."""
    if plot is not None:
        check_plot(plot)
    if largest_table is not None and is_prepared(source):
        raise ArgumentError(f"{source} is prepared: it has its tables; leave --largest-table out.")
    start = time.perf_counter()
    modulus, skips = _modulus(largest_table), _skips(on_error)
    found = describe_rows(source, modulus=modulus, skip_malformed=skips, progress=Progress())
    seconds = time.perf_counter() - start
    _show_left_out(found)
    _show(found)
    if plot is not None:
        with replacing(plot) as temporary:
            description_plot(found, temporary)
    result = {
        **asdict(found),
        "ids": [{**asdict(column), "skew": column.skew} for column in found.ids],
        "label_rate": found.label_rate,
        "rows_per_s": round(found.rows / seconds),
    }
    write_result(json, "data describe", result)


@contextlib.contextmanager
def _to_go_on_from() -> Iterator[None]:
    """Answer Ctrl-C with a message and status 130, since typer would end without one."""
    try:
        yield
    except KeyboardInterrupt:
        say(
            "fuselab: interrupted; what is prepared so far is kept: the same command goes on from "
            "there."
        )
        raise typer.Exit(130) from None


def _told(
    ids: str, largest_table: int | None, metadata: Path | None, dense: str | None
) -> tuple[str | Modulus | Vocabulary, str | Dense]:
    """Return ids and transform as ``prepare`` takes them."""
    if largest_table is not None and (ids != "modulus" or metadata is not None):
        raise ArgumentError("--largest-table is for ids by modulus without --metadata.")
    if metadata is None:
        return (_modulus(largest_table) if ids == "modulus" else ids), dense or "log1p"
    if ids != "modulus":
        raise ArgumentError("--ids builds what --metadata brings along; give one of them.")
    if is_prepared(metadata):
        if dense is not None:
            raise ArgumentError(f"{metadata} brings its transform along; leave --dense out.")
        like = Prepared(metadata)
        return like.ids(), like.dense()
    return load_metadata(metadata).ids, dense or "log1p"


def _modulus(largest_table: int | None) -> Modulus:
    return Modulus() if largest_table is None else Modulus.capped(largest_table)


def _skips(on_error: str) -> bool:
    if on_error not in ("stop", "skip"):
        raise UnknownNameError("answer to a malformed row", on_error, ("stop", "skip"))
    return on_error == "skip"


def _show_left_out(found: Description) -> None:
    """Print on stderr what was left out, and how many malformed rows there were."""
    for sentence in found.left_out[:_SHOWN]:
        say(f"fuselab: warning: {sentence}")
    if found.rejected:
        say(f"fuselab: warning: malformed rows left out: {found.rejected:,}.")


def _show(found: Description) -> None:
    counts = [
        [
            count.name,
            f"{count.missing / found.rows:.1%}",
            *map(_number, (count.smallest, count.largest, count.mean, count.mean_log)),
        ]
        for count in found.counts
    ]
    ids = [
        [
            column.name,
            f"{column.missing / found.rows:.1%}",
            f"{column.cardinality:,}",
            f"{column.top_share:.1%}",
            f"{column.table:,}",
            f"{column.colliding / max(column.cardinality, 1):.1%}",
            f"{column.fullest_share:.1%}",
        ]
        for column in found.ids
    ]
    of_counts = ["counts", "missing", "smallest", "largest", "mean", "mean log"]
    of_ids = ["ids", "missing", "distinct", "top id", "table", "colliding", "fullest slot"]
    lines = [
        *folded("", f"{found.file}: {found.rows:,} rows"),
        f"positives  {found.positives:,} ({found.label_rate:.2%})\n",
        *table(of_counts, counts, right=range(1, 6)),
        "",
        *table(of_ids, ids, right=range(1, 7)),
        "",
        "top id: the most frequent one's share of all rows. By (id + 1) % table:",
        "colliding are the ids that have their slot not alone, and the fullest",
        "slot's share is that of all rows; missing ids lie in slot 0.",
    ]
    print("\n".join(lines))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
