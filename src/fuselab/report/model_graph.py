"""A picture of a DLRM: its layers from the inputs at the bottom to the probability at the top."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from fuselab.models.dlrm import DlrmConfig
from fuselab.report.files import replacing
from fuselab.report.plots import COLORS, check_plot, import_pyplot

_WIDTH, _HEIGHT, _GAP = 3.4, 0.62, 0.42
_DENSE, _SPARSE, _TOP = 0.0, 4.4, 2.2  # left edges of the three columns


def model_graph(config: DlrmConfig, path: Path) -> None:
    """Write the picture as SVG, PNG or PDF, with every layer's output shape and number of
    parameters.

    Raises ArgumentError for another suffix, MissingDependencyError, OutputError.
    """
    check_plot(path)
    pyplot = import_pyplot()
    from matplotlib.patches import FancyBboxPatch

    bottom, sparse, top = columns(config)
    levels = len(bottom) + len(top)
    figure, axis = pyplot.subplots(figsize=(9, 0.85 * levels + 0.6), layout="constrained")

    def box(left: float, level: int, text: str, color: str) -> tuple[float, float]:
        low = level * (_HEIGHT + _GAP)
        axis.add_patch(
            FancyBboxPatch(
                (left, low), _WIDTH, _HEIGHT, boxstyle="round,pad=0.04", edgecolor=color,
                facecolor="white", linewidth=1.5,
            )
        )  # fmt: skip
        middle = left + _WIDTH / 2
        axis.text(middle, low + _HEIGHT / 2, text, ha="center", va="center", fontsize=9)
        return middle, low

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        axis.annotate(
            "",
            xy=(end[0], end[1] - 0.04),
            xytext=(start[0], start[1] + _HEIGHT + 0.04),
            arrowprops={"arrowstyle": "-|>", "color": "0.35"},
        )

    def column(left: float, first: int, texts: list[str], color: str) -> list[tuple[float, float]]:
        places = [box(left, first + level, text, color) for level, text in enumerate(texts)]
        for lower, upper in pairwise(places):
            arrow(lower, upper)
        return places

    dense = column(_DENSE, 0, bottom, COLORS[5])
    tables = column(_SPARSE, 0, sparse, COLORS[3])
    head = column(_TOP, len(bottom), top, COLORS[4])
    for side in (dense, tables):
        arrow(side[-1], head[0])
    axis.set_xlim(-0.2, _SPARSE + _WIDTH + 0.2)
    axis.set_ylim(-0.2, levels * (_HEIGHT + _GAP))
    axis.axis("off")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
    pyplot.close(figure)


def columns(config: DlrmConfig) -> tuple[list[str], list[str], list[str]]:
    """Return the text of every box, bottom to top: dense layers, tables, interaction and
    prediction."""
    widths = (13, *config.dense_hidden, config.embedding_dim)
    bottom = ["13 counts, transformed\n[B, 13]", *(_layer(*pair) for pair in pairwise(widths))]
    rows, tables = sum(config.table_sizes), len(config.table_sizes)
    sparse = [
        f"{tables} ids by {config.ids}\n[B, {tables}]",
        f"{tables} tables, {rows:,} rows in all\n[B, {tables}, {config.embedding_dim}]  "
        f"{_count(rows * config.embedding_dim)}",
    ]
    mixed = config.interaction_width
    widths = (mixed, *config.prediction_hidden)
    top = [
        f"{config.interaction} interaction\n[B, {mixed:,}]",
        *(_layer(*pair) for pair in pairwise(widths)),
    ]
    last = widths[-1]
    top.append(f"linear + sigmoid: the probability\n[B, 1]  {_count(last + 1)}")
    return bottom, sparse, top


def _layer(inputs: int, outputs: int) -> str:
    return f"linear + ReLU\n[B, {outputs}]  {_count((inputs + 1) * outputs)}"


def _count(parameters: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit} parameters"
    return f"{parameters} parameters"
