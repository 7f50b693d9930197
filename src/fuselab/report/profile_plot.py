"""A picture of a profile: how the step divides, and the memory over time by source line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselab.report.numbers import byte_count, duration, share
from fuselab.report.plots import COLORS, check_plot, import_pyplot
from fuselab.report.screen import cut, cut_place

PARTS = (
    ("compute", "#0072B2"),
    ("memory", "#E69F00"),
    ("overhead", "#999999"),
    ("data", "#009E73"),
)
RANGES = 12  # named ranges drawn above the memory
REST = "#d0d0d0"
NAME_WIDTH = 34
LEAST_LABEL = 0.04  # the least share of the width for a label inside a bar


def profile_plot(facts: Mapping[str, Any], path: Path) -> None:
    """Write one figure from the facts of a profile's JSON.

    Above is the split of the step; below is the memory above the step's start, a layer per source
    line that holds it, under the named ranges in their order. Without recorded memory only the
    split is drawn. Raises ArgumentError for another suffix than a plot's, MissingDependencyError
    without matplotlib.
    """
    check_plot(path)
    pyplot = import_pyplot()
    memory = facts["memory"]
    heights = [1.0] if memory is None else [1.0, 4.6]
    figure, axes = pyplot.subplots(
        len(heights),
        1,
        figsize=(11, sum(heights) + 1.2),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    _draw_split(axes[0, 0], facts)
    if memory is not None:
        _draw_memory(axes[1, 0], memory)
    within = f", within {facts['within']}" if facts.get("within") else ""
    name = cut(f"{facts['name']} on {facts['device']}{within}", 80)
    figure.suptitle(f"{name}: {duration(facts['step_us'])} per step under the profiler")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_split(axis: Any, facts: Mapping[str, Any]) -> None:
    whole = facts["step_us"] or 1.0
    left = 0.0
    for name, color in PARTS:
        us = facts["split"][f"{name}_us"]
        label = f"{name} {duration(us)}, {share(us / whole)}"
        axis.barh(0, us, left=left, color=color, label=label, height=0.7)
        left += us
    axis.set_xlim(0, whole)
    axis.set_ylim(-0.5, 0.5)
    axis.set_yticks([])
    axis.xaxis.set_major_formatter(lambda us, _: duration(us))
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PARTS), frameon=False)


def _draw_memory(axis: Any, memory: Mapping[str, Any]) -> None:
    moments = [moment for moment, _ in memory["timeline"]]
    layers = memory["layers"]
    if len(moments) > 1 and layers:
        axis.stackplot(
            moments,
            *(layer["held_bytes"] for layer in layers),
            labels=[cut_place(layer["name"], NAME_WIDTH) for layer in layers],
            colors=[
                REST if layer["name"] == "other" else COLORS[1 + place % (len(COLORS) - 2)]
                for place, layer in enumerate(layers)
            ],
            step="post",
            alpha=0.85,
        )
    heights = [size for _, size in memory["timeline"]]
    axis.step(moments, heights, where="post", color="#000000", lw=1.0)
    peak = max(range(len(heights)), key=lambda place: heights[place])
    axis.annotate(
        f"peak {byte_count(memory['peak_bytes'])}",
        (moments[peak], heights[peak]),
        xytext=(0, 5),
        textcoords="offset points",
        ha="center" if 0.1 < peak / len(heights) < 0.9 else ("left" if peak == 0 else "right"),
    )
    end = moments[-1] or 1.0
    axis.set_xlim(0, end)
    axis.set_ylim(min(0, *heights), max(1, *heights) * 1.22)
    _draw_ranges(axis, memory["ranges"], end)
    axis.yaxis.set_major_formatter(lambda size, _: byte_count(size))
    axis.xaxis.set_major_formatter(lambda us, _: duration(us))
    axis.set_ylabel("memory above the step's start")
    axis.set_xlabel("time in the watched step, which runs slower than the others")
    axis.legend(title="allocated by", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axis.grid(alpha=0.25)


def _draw_ranges(axis: Any, ranges: Sequence[tuple[str, float, float]], end: float) -> None:
    """Draw the outermost named ranges as brackets above the curve."""
    last = 0.0
    for name, start, stop in sorted(ranges, key=lambda one: (one[1], -one[2]))[:RANGES]:
        if start < last:  # inside a range that is drawn already
            continue
        last = stop
        axis.axvspan(start, stop, ymin=0.94, ymax=1.0, color="#eeeeee", ec="#777777", lw=0.6)
        if (stop - start) / end >= LEAST_LABEL:
            axis.text(
                (start + stop) / 2,
                0.97,
                cut(name, max(int(90 * (stop - start) / end), 3)),
                transform=axis.get_xaxis_transform(),
                ha="center",
                va="center",
                size=8,
            )
