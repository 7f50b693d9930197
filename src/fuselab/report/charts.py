"""Plots as inline SVG that follows the page's colours: a study's roofline and memory.

Shapes have CSS classes and no colours; the style sheet colours them, in light and in dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

from markupsafe import Markup, escape

from fuselab.report.numbers import byte_count, digits, duration

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 18, 48


@dataclass(frozen=True)
class Point:
    """A piece of work in a roofline: ``intensity`` in flop per byte, ``gflops`` in GFLOP/s.

    ``kind`` is its CSS class, ours or theirs; ``label`` is shown on hover, ``tag`` beside the
    point.
    """

    label: str
    kind: str
    intensity: float
    gflops: float
    tag: str = ""


def roofline(points: Sequence[Point], gbps: float, peak_gflops: float) -> Markup:
    """Draw a roofline on log-log axes: memory bandwidth ``gbps`` gives the slope, ``peak_gflops``
    the flat roof.

    Points without arithmetic cannot be drawn and are left out; without any point the result is
    empty.
    """
    points = [point for point in points if point.intensity > 0 and point.gflops > 0]
    if not points or gbps <= 0 or peak_gflops <= 0:
        return Markup()
    ridge = peak_gflops / gbps
    frame = _Frame(
        [*(point.intensity for point in points), ridge / 4, ridge * 4],
        [*(point.gflops for point in points), peak_gflops * 2],
    )
    left, right = frame.x_limits
    low_roof = max(gbps * left, frame.y_limits[0])
    roof = [(low_roof / gbps, low_roof), (ridge, peak_gflops), (right, peak_gflops)]
    parts = [frame.axes("arithmetic per byte moved (flop/byte, log)", "GFLOP/s (log)")]
    line = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in roof)
    parts.append(Markup('<polyline class="roof" points="{}"/>').format(line))
    parts.append(_roof_label(frame, gbps, peak_gflops, ridge))
    parts += [_dot(frame, point, gbps, peak_gflops) for point in points]
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="Roofline">{}</svg>'
    ).format(WIDTH, HEIGHT, Markup().join(parts))


MEMORY_HEIGHT = 250


def memory_chart(memory: Mapping[str, Any] | None) -> Markup:
    """Draw the memory of a call over time, a layer per source line that holds it.

    ``memory`` is the part of that name of a profile's JSON; without it, or with a single moment,
    the result is empty.
    """
    if memory is None or len(memory["timeline"]) < 2 or not memory["layers"]:
        return Markup()
    moments = [moment for moment, _ in memory["timeline"]]
    end, peak = moments[-1] or 1.0, max(memory["peak_bytes"], 1)
    bottom = MEMORY_HEIGHT - BOTTOM

    def place(moment: float, size: float) -> str:
        x = LEFT + moment / end * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f},{bottom - size / (1.1 * peak) * (bottom - TOP):.1f}"

    parts, legend = [], []
    below = [0.0] * len(moments)
    for number, layer in enumerate(memory["layers"]):
        kind = "layer-rest" if layer["name"] == "other" else f"layer-{number + 1}"
        above = [low + size for low, size in zip(below, layer["held_bytes"], strict=True)]
        edge = [place(m, size) for m, size in _steps(moments, above)]
        back = [place(m, size) for m, size in reversed(_steps(moments, below))]
        outline = " ".join([*edge, *back])
        parts.append(
            Markup(
                '<polygon points="{}" class="{}"><title>{}: at most {}</title></polygon>'
            ).format(outline, kind, layer["name"], byte_count(max(layer["held_bytes"])))
        )
        legend.append(Markup('<li><i class="{}"></i>{}</li>').format(kind, layer["name"]))
        below = above
    labels = Markup(
        '<text x="{}" y="{}" text-anchor="end">{}</text>'
        '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>'
        '<text x="{}" y="{}">0</text><text x="{}" y="{}" text-anchor="end">{}</text>'
    ).format(
        LEFT - 8,
        float(place(0, peak).split(",")[1]) + 4,
        byte_count(peak),
        LEFT,
        WIDTH - RIGHT,
        place(0, peak).split(",")[1],
        place(0, peak).split(",")[1],
        LEFT,
        bottom + 18,
        WIDTH - RIGHT,
        bottom + 18,
        duration(end),
    )
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="Memory over one call">{}{}'
        '</svg><ul class="legend">{}</ul>'
    ).format(WIDTH, MEMORY_HEIGHT, Markup().join(parts), labels, Markup().join(legend))


def _steps(moments: Sequence[float], sizes: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of a curve that keeps its height until the next moment."""
    corners = []
    for number, (moment, size) in enumerate(zip(moments, sizes, strict=True)):
        if number:
            corners.append((moment, sizes[number - 1]))
        corners.append((moment, size))
    return corners


class _Frame:
    """Log-log axes over whole decades that contain every value."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x_limits, self.y_limits = _decades(xs), _decades(ys)

    def x(self, value: float) -> float:
        return LEFT + _position(value, self.x_limits) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - _position(value, self.y_limits) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_title: str, y_title: str) -> Markup:
        bottom = HEIGHT - BOTTOM
        columns = [
            Markup(
                '<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>'
                '<text x="{0:.1f}" y="{3}" text-anchor="middle">{4}</text>'
            ).format(self.x(value), TOP, bottom, bottom + 18, _power(value))
            for value in _powers(self.x_limits)
        ]
        lines = [
            Markup(
                '<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>'
                '<text x="{3}" y="{4:.1f}" text-anchor="end">{5}</text>'
            ).format(LEFT, WIDTH - RIGHT, self.y(value), LEFT - 8, self.y(value) + 4, _power(value))
            for value in _powers(self.y_limits)
        ]
        titles = Markup(
            '<text class="title" x="{}" y="{}" text-anchor="end">{}</text>'
            '<text class="title" x="{}" y="{}">{}</text>'
        ).format(WIDTH - RIGHT, HEIGHT - 8, x_title, LEFT + 8, TOP + 14, y_title)
        return Markup().join([*columns, *lines, titles])


def _roof_label(frame: _Frame, gbps: float, peak_gflops: float, ridge: float) -> Markup:
    right = frame.x_limits[1]
    middle = (max(gbps * frame.x_limits[0], frame.y_limits[0]) / gbps * ridge) ** 0.5
    return Markup(
        '<text class="roof-label" x="{:.1f}" y="{:.1f}" text-anchor="end">{} GFLOP/s</text>'
        '<text class="roof-label" x="{:.1f}" y="{:.1f}" text-anchor="end">{} GB/s</text>'
    ).format(
        frame.x(right) - 6,
        frame.y(peak_gflops) - 8,
        digits(peak_gflops),
        frame.x(middle) - 10,
        frame.y(middle * gbps) - 4,
        digits(gbps),
    )


def _dot(frame: _Frame, point: Point, gbps: float, peak_gflops: float) -> Markup:
    limit = min(peak_gflops, point.intensity * gbps)
    x, y = frame.x(point.intensity), frame.y(point.gflops)
    return Markup(
        '<g class="point {kind}"><title>{label}: {gflops} GFLOP/s, {of} % of its limit</title>'
        '<line x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{top:.1f}"/>'
        '<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        '<text x="{beside:.1f}" y="{below:.1f}">{tag}</text></g>'
    ).format(
        kind=escape(point.kind),
        label=point.label,
        gflops=digits(point.gflops),
        of=digits(100 * point.gflops / limit),
        x=x,
        y=y,
        top=frame.y(limit),
        tag=point.tag,
        beside=x + 10,
        below=y + 12,
    )


def _decades(values: Sequence[float]) -> tuple[float, float]:
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _position(value: float, limits: tuple[float, float]) -> float:
    low, high = map(log10, limits)
    return (log10(value) - low) / (high - low)


def _powers(limits: tuple[float, float]) -> list[float]:
    low, high = (round(log10(limit)) for limit in limits)
    return [10.0**exponent for exponent in range(low, high + 1)]


def _power(value: float) -> str:
    return f"{value:g}" if 0.001 <= value < 10_000 else f"1e{round(log10(value))}"
