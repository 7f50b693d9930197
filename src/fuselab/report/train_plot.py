"""A picture of training steps: the parts of a step, one bar for each way to train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fuselab.report.numbers import duration
from fuselab.report.plots import COLORS, check_plot, import_pyplot
from fuselab.report.screen import cut


def step_plot(title: str, bars: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Write one figure with a bar for each of ``bars``, which give the microseconds of each part.

    Raises ArgumentError for another suffix than a plot's, MissingDependencyError without
    matplotlib.
    """
    check_plot(path)
    pyplot = import_pyplot()
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.45 * len(bars)), layout="constrained")
    parts = list(dict.fromkeys(part for own in bars.values() for part in own))
    left = [0.0] * len(bars)
    places = range(len(bars))
    for number, part in enumerate(parts):
        widths = [own.get(part, 0.0) for own in bars.values()]
        axis.barh(
            places, widths, left=left, color=COLORS[1 + number % (len(COLORS) - 1)], label=part
        )
        left = [one + width for one, width in zip(left, widths, strict=True)]
    for place, whole in zip(places, left, strict=True):
        axis.text(whole, place, f" {duration(whole)}", va="center")
    axis.set_yticks(places, [cut(name, 40) for name in bars])
    axis.invert_yaxis()
    axis.set_xlim(0, max(left) * 1.15)
    axis.xaxis.set_major_formatter(lambda us, _: duration(us))
    axis.set_title(title)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(parts), frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
