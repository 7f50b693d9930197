"""The contents of a Criteo file as one figure: missing fields, cardinalities, collisions of the
modulus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fuselab.data.description import CountColumn, Description, IdColumn
from fuselab.report.plots import COLORS, check_plot, import_pyplot


def description_plot(found: Description, path: Path) -> None:
    """Write the figure.

    Raises ArgumentError for a suffix that no plot has, MissingDependencyError without matplotlib.
    """
    check_plot(path)
    pyplot = import_pyplot()

    figure, (missing, sizes, collisions, fullest) = pyplot.subplots(
        4, 1, figsize=(11, 12), layout="constrained"
    )
    figure.suptitle(f"{found.file}: {found.rows:,} rows, {found.label_rate:.1%} positive")
    columns: list[CountColumn | IdColumn] = [*found.counts, *found.ids]
    _bars(missing, [column.name for column in columns], "missing (%)", {
        "missing": [100 * column.missing / found.rows for column in columns],
    })  # fmt: skip
    names = [column.name for column in found.ids]
    _bars(sizes, names, "rows", {
        "distinct ids": [column.cardinality for column in found.ids],
        "table of the modulus": [column.table for column in found.ids],
    })  # fmt: skip
    sizes.set_yscale("log")
    _bars(collisions, names, "ids that share a slot (%)", {
        "ids": [100 * column.colliding / max(column.cardinality, 1) for column in found.ids],
    })  # fmt: skip
    _bars(fullest, names, "share of all rows (%)", {
        "most frequent id": [100 * column.top_share for column in found.ids],
        "fullest slot of the modulus": [100 * column.fullest_share for column in found.ids],
    })  # fmt: skip
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axis: Any, names: list[str], label: str, series: dict[str, list[float]]) -> None:
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(names))]
        axis.bar(places, values, width, label=name, color=COLORS[5 - number])
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.set_ylabel(label)
    axis.grid(alpha=0.25, axis="y")
    if len(series) > 1:
        axis.legend(fontsize=8)
