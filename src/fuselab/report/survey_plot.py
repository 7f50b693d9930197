"""A survey as a picture: over the size, the speed of what is judged against the best of the
others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuselab.errors import ArgumentError
from fuselab.measure.verdict import Outcome
from fuselab.prove.survey_result import Judged, Survey, geometric_mean
from fuselab.report.plots import COLORS, MARKERS, bytes_label, check_plot, import_pyplot

_OUTCOME_COLORS = {
    Outcome.FASTER: "#009E73",
    Outcome.SAME: "#0072B2",
    Outcome.UNCLEAR: "#999999",
    Outcome.SLOWER: "#D55E00",
}


def survey_plot(survey: Survey, path: Path) -> None:
    """Write one figure with a panel per phase: every point by the bytes that it moves, with its
    interval, one marker per dtype and one colour per verdict; the dashed line is the geometric
    mean.

    Raises ArgumentError if no point was timed or the suffix is wrong, MissingDependencyError.
    """
    check_plot(path)
    panels = {
        phase: [one for one in survey.judged(phase) if one.versus is not None]
        for phase in survey.phases
    }
    panels = {phase: judged for phase, judged in panels.items() if judged}
    if not panels:
        raise ArgumentError("there is nothing to plot: no point was timed.")
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(7.5 * len(panels), 5), squeeze=False, layout="constrained"
    )
    dtypes = list(dict.fromkeys(point.dtype for point in survey.points))
    for (phase, judged), axis in zip(panels.items(), axes[0], strict=True):
        _panel(axis, judged, dtypes)
        axis.set_title(phase)
    environment = survey.environment
    figure.suptitle(
        f"{survey.operator} on {environment['device_name']}, torch {environment['torch']}, seed "
        f"{survey.made_of['seed']}"
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axis: Any, judged: Sequence[Judged], dtypes: Sequence[str]) -> None:
    from matplotlib.ticker import LogLocator

    seen: set[str] = set()
    for one in judged:
        versus = one.versus
        assert versus is not None
        marker = MARKERS[dtypes.index(one.point.dtype) % len(MARKERS)]
        outcome = Outcome(versus.outcome)
        axis.errorbar(
            one.point.moved_bytes,
            versus.speedup,
            yerr=[[versus.speedup - versus.low], [versus.high - versus.speedup]],
            marker=marker,
            color=_OUTCOME_COLORS[outcome],
            linestyle="none",
            elinewidth=0.8,
        )
        seen |= {str(outcome), one.point.dtype}
    for outcome, color in _OUTCOME_COLORS.items():
        if str(outcome) in seen:
            axis.plot([], [], "s", color=color, label=str(outcome))
    for place, dtype in enumerate(dtypes):
        if dtype in seen:
            axis.plot([], [], MARKERS[place % len(MARKERS)], color=COLORS[0], label=dtype)
    mean = geometric_mean(one.versus.speedup for one in judged if one.versus is not None)
    axis.axhline(mean, color="#777777", ls="--", lw=1, label=f"geometric mean {mean:.3f}")
    axis.axhline(1, color=COLORS[0], lw=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("bytes moved at least")
    axis.set_ylabel(f"speed of {judged[0].subject} over the best of the others")
    axis.xaxis.set_major_formatter(lambda position, _: bytes_label(position))
    axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # labels of all nine would overlap
    axis.yaxis.set_major_formatter(lambda position, _: f"{position:g}")
    axis.yaxis.set_minor_formatter(lambda position, _: f"{position:g}")
    axis.grid(alpha=0.25, which="both")
    axis.legend(fontsize="small")
