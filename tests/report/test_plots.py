"""Plots hold every provider and the ceilings, whatever was timed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fuselab.errors import ArgumentError
from fuselab.prove.bench_result import Bench, Ceiling, Group, Record
from fuselab.report import plots
from fuselab.report.plots import bench_plot, check_plot

CEILINGS = {"copy_gbps": {"1": 4280.0}, "matmul_tflops": {"fp32": 51.0}}


def record(provider: str, median_us: float, size: int, status: str = "ok") -> Record:
    kind = "implementation" if provider in ("triton", "cuda") else "peer"
    return Record(
        provider,
        kind,
        status,
        median_us=median_us,
        gbps=size / median_us / 1000,
        tflops=size / median_us / 1e6,
    )


def sweep(phase: str, flops: int | None = 1) -> list[Group]:
    groups = []
    for exponent in (10, 16, 22, 28):
        size = 1 << exponent
        limit = 2 + size / 4.2e6
        records = [
            record("eager", 6 + 3 * limit, size),
            record("compile(naive)", 3 + limit, size),
            record("triton", 1 + 1.1 * limit, size),
            record("cuda", limit, size, status="wrong" if exponent == 10 else "ok"),
        ]
        ceiling = Ceiling("memory", "stream", limit, size / limit / 1000)
        work = size // 4 if flops else 0
        groups.append(
            Group(str(size), "float32", phase, size // 2, size // 2, work, "fp32", ceiling, records)
        )
    return groups


def result(groups: list[Group]) -> Bench:
    environment = {"device_name": "NVIDIA H200", "torch": "2.11.0"}
    return Bench("fuselab::softmax", environment, {}, CEILINGS, groups, [], [])


@pytest.mark.parametrize("flops", [1, None])
def test_a_plot_names_every_provider_and_both_ceilings(tmp_path: Path, flops: int | None) -> None:
    import matplotlib

    file = tmp_path / "plot.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        bench_plot(result([*sweep("forward", flops), *sweep("backward", flops)]), file)
    text = file.read_text()
    for name in ("eager", "compile(naive)", "triton", "cuda", "size-matched limit"):
        assert text.count(f">{name}<") == 1  # one legend
    assert "fuselab::softmax on NVIDIA H200, torch 2.11.0" in text
    assert "Latency: float32, backward" in text
    assert ("fp32 51000 GFLOP/s" in text and "copy 4280 GB/s" in text) == bool(flops)


@pytest.mark.parametrize("flops_per_byte", [0.03, 0.25, 2.0, 60.0])
def test_the_labels_of_a_roofline_touch_no_marker(flops_per_byte: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    roof = min(flops_per_byte * 4.28, 51.0)
    shares = {"eager": 0.3, "compile": 0.6, "triton": 0.85, "cuda": 0.98}
    records = [
        Record(name, "peer", "ok", median_us=1.0, gbps=1.0, tflops=share * roof)
        for name, share in shares.items()
    ]
    flops = round(flops_per_byte * 2000)
    groups = [Group("a", "float32", "forward", 1000, 1000, flops, "fp32", None, records)]
    figure = Figure(figsize=(5, 4.3), layout="constrained")
    axis = figure.subplots()
    FigureCanvasAgg(figure)
    plots._roofline(axis, groups, plots._styles(result(groups)), CEILINGS)
    figure.canvas.draw()
    assert len(axis.texts) == 2
    first, second = (text.get_window_extent() for text in axis.texts)
    assert not first.overlaps(second)
    for line in axis.lines[:-1]:  # the last is the roof
        for x, y in axis.transData.transform(line.get_xydata()):
            assert not any(
                box.x0 - 5 < x < box.x1 + 5 and box.y0 - 5 < y < box.y1 + 5
                for box in (first, second)
            )


@pytest.mark.parametrize("peak_tflops", [0.07, 51.0, 2000.0])  # a CPU core's, and two GPUs'
def test_the_ticks_of_a_roofline_do_not_overlap(peak_tflops: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bandwidth = 37.6 if peak_tflops < 1 else 4280.0
    ceilings = {"copy_gbps": {"1": bandwidth}, "matmul_tflops": {"fp32": peak_tflops}}
    figure = Figure(figsize=(5, 4.3), layout="constrained")
    axis = figure.subplots()
    FigureCanvasAgg(figure)
    groups = [replace(group, flops=(group.bytes_moved or 0) * 5 // 8) for group in sweep("forward")]
    plots._roofline(axis, groups, plots._styles(result(groups)), ceilings)
    figure.canvas.draw()
    low, high = axis.get_xlim()
    ticks = [*axis.xaxis.get_major_ticks(), *axis.xaxis.get_minor_ticks()]
    labels = [
        tick.label1 for tick in ticks if tick.label1.get_text() and low <= tick.get_loc() <= high
    ]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    assert len(boxes) >= 2
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


@pytest.mark.parametrize("suffix", [".png", ".pdf"])
def test_other_formats(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"plot{suffix}"
    bench_plot(result(sweep("forward")[:1]), file)
    assert file.read_bytes()[:4] in (b"\x89PNG", b"%PDF")


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"plot.jpg: a plot is written as .png"):
        check_plot(Path("plot.jpg"))
    with pytest.raises(ArgumentError, match="nothing to plot"):
        bench_plot(result([]), Path("plot.png"))
