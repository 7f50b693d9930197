"""A picture of what each program of a kernel reads and writes, and what the mask cuts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuselab.errors import ArgumentError
from fuselab.inspect.debugger.offsets import Accesses, grouped, runs
from fuselab.report.plots import COLORS, check_plot, import_pyplot

PANELS = 12
PROGRAMS = 32  # rows of a panel
NUMBERED = 40  # with at most so many offsets, each cell has its number


def access_picture(facts: Mapping[str, Any], path: Path) -> None:
    """Draw a panel per line and tensor: a row per program, the offsets that it touches filled,
    those that the mask cuts hatched, and the tensor's end as a dashed line.

    Raises ArgumentError if nothing was touched or the suffix is no plot's, MissingDependencyError
    without matplotlib.
    """
    check_plot(path)
    panels = grouped(facts)
    if not panels:
        raise ArgumentError("there is nothing to draw: no program touched a tensor.")
    pyplot = import_pyplot()
    shown = panels[:PANELS]
    heights = [0.9 + 0.28 * min(len(one.programs), PROGRAMS) for one in shown]
    figure, axes = pyplot.subplots(
        len(shown),
        1,
        figsize=(10, sum(heights) + 0.4),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    for axis, one in zip(axes[:, 0], shown, strict=True):
        _draw(axis, one)
    names = ", ".join(dict.fromkeys(kernel["name"] for kernel in facts["kernels"]))
    more = f" (the first {len(shown)} of {len(panels)} accesses)" if len(panels) > PANELS else ""
    figure.suptitle(names + more)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axis: Any, one: Accesses) -> None:
    programs = list(one.programs.items())[:PROGRAMS]
    every = [offset for _, (touched, cut) in programs for offset in (*touched, *cut)]
    low, high = min(every, default=0), max(every, default=0)
    for row, (_, (touched, cut)) in enumerate(programs):
        color = COLORS[1 + row % (len(COLORS) - 1)]
        for first, last in runs(touched):
            axis.broken_barh(
                [(first, last - first + 1)], (row - 0.4, 0.8), facecolor=color, edgecolor="white"
            )
        for first, last in runs(cut):
            axis.broken_barh(
                [(first, last - first + 1)],
                (row - 0.4, 0.8),
                facecolor="none",
                edgecolor=color,
                hatch="////",
            )
        if high - low < NUMBERED:
            for offset in sorted({*touched, *cut}):
                axis.text(offset + 0.5, row, str(offset), ha="center", va="center", fontsize=8)
    shows_end = low <= one.span <= high + 1
    if shows_end:
        axis.axvline(one.span, color="black", linestyle="--", linewidth=1)
    axis.set_xlim(low - 0.5, high + 1.5)
    axis.set_ylim(len(programs) - 0.5, -0.5)
    axis.set_yticks(range(len(programs)), [one.name_of(program) for program, _ in programs])
    more = len(one.programs) - len(programs)
    axis.set_ylabel("program" + (f"\n({more} more)" if more else ""))
    axis.set_title(
        f"line {one.line}: {one.does} {one.tensor}[offset]"
        + ("; hatched is cut by the mask" if any(cut for _, (_, cut) in programs) else "")
        + (f"; dashed is its end ({one.span})" if shows_end else ""),
        loc="left",
        fontsize=9,
    )
