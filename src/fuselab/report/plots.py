"""Plots of a benchmark: latency and bandwidth against size, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselab.errors import ArgumentError, MissingDependencyError
from fuselab.prove.bench_result import Bench, Group, Record
from fuselab.report.numbers import digits

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, told apart with any colour vision; markers differ as well.
COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#999999")
MARKERS = "osD^vP*X"
PHASE_ORDER = ("forward", "backward", "forward+backward")


def check_plot(path: Path) -> None:
    """Check before the work that a plot can be written to ``path``.

    Raises ArgumentError for another suffix than a plot's, MissingDependencyError without
    matplotlib.
    """
    if path.suffix not in SUFFIXES:
        raise ArgumentError(f"{path}: a plot is written as {', '.join(SUFFIXES)}; name it so.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError.of_extra("plots need", "matplotlib", "report") from error


def import_pyplot() -> Any:
    """Return ``matplotlib.pyplot``, set to draw into files; ``check_plot`` has found it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def bench_plot(bench: Bench, path: Path) -> None:
    """Write one figure: a row per dtype and phase with latency, bandwidth and roofline.

    The horizontal axis of latency and bandwidth is the least number of bytes that a case moves; the
    dashed line is the size-matched ceiling. The roofline uses the best measured copy bandwidth and
    the matrix product's rate. Raises ArgumentError if nothing was timed or the suffix is wrong,
    MissingDependencyError.
    """
    check_plot(path)
    pyplot = import_pyplot()

    rows = _rows(bench)
    if not rows:
        raise ArgumentError("there is nothing to plot: no case with a cost was timed.")
    styles = _styles(bench)
    figure, axes = pyplot.subplots(
        len(rows), 3, figsize=(15, 4.3 * len(rows) + 0.9), squeeze=False, layout="constrained"
    )
    for (title, groups), (latency, bandwidth, roofline) in zip(rows.items(), axes, strict=True):
        _against_size(latency, groups, styles, "median_us", "time per call (us)")
        _against_size(bandwidth, groups, styles, "gbps", "bandwidth (GB/s)")
        latency.set_title(f"Latency: {title}")
        bandwidth.set_title(f"Bandwidth: {title}")
        _roofline(roofline, groups, styles, bench.ceilings)
        roofline.set_title(f"Roofline: {title}")
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 7)
    )
    environment = bench.environment
    figure.suptitle(
        f"{bench.operator} on {environment['device_name']}, torch {environment['torch']}"
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _rows(bench: Bench) -> dict[str, list[Group]]:
    """Return the groups whose cost is known, by dtype and phase, smallest case first."""
    rows: dict[str, list[Group]] = {}
    groups = [group for group in bench.groups if group.bytes_moved]
    for group in sorted(groups, key=lambda group: PHASE_ORDER.index(group.phase)):
        rows.setdefault(f"{group.dtype}, {group.phase}", []).append(group)
    return {
        title: sorted(found, key=lambda group: group.bytes_moved or 0)
        for title, found in rows.items()
    }


def _styles(bench: Bench) -> dict[str, dict[str, Any]]:
    """Return one colour and marker per provider; ours are drawn thicker."""
    names: dict[str, Record] = {}
    for group in bench.groups:
        for record in group.records:
            if record.status == "ok":
                names.setdefault(record.provider, record)
    styles = {}
    for index, (name, record) in enumerate(names.items()):
        styles[name] = {
            "color": COLORS[index % len(COLORS)],
            "marker": MARKERS[(index + index // len(COLORS)) % len(MARKERS)],
            "linewidth": 2.2 if record.is_ours else 1.1,
            "markersize": 5,
        }
    return styles


def _against_size(
    axis: Any,
    groups: Sequence[Group],
    styles: Mapping[str, Mapping[str, Any]],
    value: str,
    label: str,
) -> None:
    for name, style in styles.items():
        points = [
            (group.bytes_moved, getattr(record, value))
            for group in groups
            for record in group.records
            if record.provider == name and record.status == "ok"
        ]
        if points:
            axis.plot(*zip(*points, strict=True), label=name, **style)
    ceilings = [
        (group.bytes_moved, getattr(group.ceiling, value))
        for group in groups
        if group.ceiling is not None and getattr(group.ceiling, value) is not None
    ]
    if ceilings:
        axis.plot(
            *zip(*ceilings, strict=True), label="size-matched limit", color="#777777", ls="--"
        )
    axis.set_xscale("log")
    if value == "median_us":
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.set_xlabel("bytes moved at least")
    axis.set_ylabel(label)
    axis.xaxis.set_major_formatter(lambda position, _: bytes_label(position))
    axis.grid(alpha=0.25)


def _roofline(
    axis: Any,
    groups: Sequence[Group],
    styles: Mapping[str, Mapping[str, Any]],
    ceilings: Mapping[str, Any],
) -> None:
    bandwidth = max(ceilings["copy_gbps"].values())
    unit = next((group.unit for group in groups if group.unit), "fp32")
    peak = 1000 * ceilings["matmul_tflops"].get(unit, 0)
    intensities = []
    for group in groups:
        if not group.flops or not group.bytes_moved:
            continue
        intensities.append(group.flops / group.bytes_moved)
        for record in group.records:
            if record.status == "ok" and record.tflops:
                style = {**styles[record.provider], "linestyle": "none"}
                axis.plot(intensities[-1], 1000 * record.tflops, label=record.provider, **style)
    if not intensities or not peak:
        axis.text(0.5, 0.5, "no arithmetic counted", ha="center", transform=axis.transAxes)
        return
    ridge = peak / bandwidth
    left, right = min(*intensities, ridge) / 4, max(*intensities, ridge) * 4
    axis.plot([left, ridge, right], [left * bandwidth, peak, peak], color="#777777", lw=1.5)
    place = left**0.25 * ridge**0.75  # far up the slope, where there is room above it and no marker
    axis.annotate(
        f"copy {digits(bandwidth)} GB/s",
        (place, place * bandwidth),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
    )
    axis.annotate(
        f"{unit} {digits(peak)} GFLOP/s",
        (right, peak),
        xytext=(-4, 5),
        textcoords="offset points",
        ha="right",
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    _label_intensities(axis, right / left)
    axis.set_ylim(top=peak * 3)
    axis.set_xlabel("arithmetic per byte moved (flop/byte)")
    axis.set_ylabel("GFLOP/s")
    axis.grid(alpha=0.25)


def _label_intensities(axis: Any, span: float) -> None:
    """Label a logarithmic axis at 1, 2 and 5 times powers of ten, a wide one at the powers alone.

    Between powers of ten matplotlib labels every step of an axis as short as a CPU's, and they
    overlap.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 1000 else (1,)))
    axis.xaxis.set_major_formatter(lambda position, _: f"{position:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())


def bytes_label(count: float) -> str:
    """Return a number of bytes for an axis."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"
