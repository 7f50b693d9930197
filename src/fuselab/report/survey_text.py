"""A survey in 80 columns: the map by size, the implementations, every point, and how to repeat the
losing ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fuselab.measure.verdict import Outcome
from fuselab.prove.survey_result import Judged, Survey, geometric_mean, summary_of
from fuselab.report.numbers import NONE, digits, percent_of_limit
from fuselab.report.screen import as_text
from fuselab.report.tables import STYLES

_BOUNDS = ("1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB")  # where a class of sizes begins


def survey_text(survey: Survey) -> str:
    """Return what ``fuselab bench --survey`` prints."""
    return as_text(lambda console: console.print(survey_table(survey)))


def survey_table(survey: Survey) -> RenderableType:
    """Return the whole survey as tables of 80 columns."""
    environment, made = survey.environment, survey.made_of
    parts: list[RenderableType] = [
        Text(
            f"{survey.operator} on {environment['device_name']}, torch {environment['torch']}, "
            f"triton {environment['triton']}"
        ),
        Text(f"{len(survey.points)} points of seed {made['seed']}, {', '.join(made['dtypes'])}"),
    ]
    for phase in survey.phases:
        judged = survey.judged(phase)
        parts += [Text(), Text(phase, style="bold"), _map(judged), *_counts(survey, judged)]
        parts += [Text(), _providers(survey, judged), Text(), _points(judged)]
    parts += _losses(survey)
    refused = [point for point in survey.points if point.refused is not None]
    parts += [Text(f"point {one.index}, {one.title}: not taken, {one.refused}") for one in refused]
    if survey.above_limit:
        parts += [Text(), Text("above the limit, to be explained:", style="bold")]
        parts += [Text(f"  {line}") for line in survey.above_limit]
    parts += [Text(f"note: {line}") for line in survey.notes]
    return Lines(*parts)


def size_class(moved_bytes: int) -> int:
    """Return the place of a size among the classes of the map, one for each power of ten from
    1 kB; those below and above count as the first and the last."""
    return min(max(floor(log10(max(moved_bytes, 1))) - 3, 0), len(_BOUNDS) - 1)


def _map(judged: Sequence[Judged]) -> Table:
    """Return the geometric means by size: of the subject's speed against the best of the others, of
    its share of the limit, and of eager's host time over its own."""
    table = _table("from", *_BOUNDS, "all")
    classes = [
        [one for one in judged if size_class(one.point.moved_bytes) == place]
        for place in range(len(_BOUNDS))
    ]
    summaries = [summary_of(found) for found in (*classes, judged)]
    table.add_row("points", *(str(one["points"]) for one in summaries))
    for title, key, factor in (
        ("speed", "speedup", 1.0),
        ("least", "least_speedup", 1.0),
        ("% of limit", "ceiling_share", 100.0),
        ("host speed", "eager_host_ratio", 1.0),
    ):
        table.add_row(title, *(_number(one[key], factor) for one in summaries))
    return table


def _counts(survey: Survey, judged: Sequence[Judged]) -> list[Text]:
    """Return the verdicts in words, and by which time they are where that is not the device's."""
    found = summary_of(judged)
    counts = ", ".join(
        f"{found[str(outcome).lower()]} {outcome}"
        for outcome in Outcome
        if found[str(outcome).lower()]
    )
    again = sum(one.is_again for one in judged)
    timed_again = f"; {again} of the points were timed again" if again else ""
    by_host = sum(one.group.verdicts_by == "host time" for one in judged)
    lines = [Text(f"{survey.subject}: {counts or 'no verdict'}{timed_again}")]
    if by_host:
        lines.append(Text(f"{by_host} of the points are so small that host time is judged"))
    return lines


def _providers(survey: Survey, judged: Sequence[Judged]) -> Table:
    """Return a row for each provider: at how many points it was timed, its geometric mean against
    the best of the others, how often it is taken, and how often it was faster than what was."""
    subject = survey.subject
    table = _table("provider", "points", "speed", f"{subject} takes it", f"faster than {subject}")
    names = dict.fromkeys(record.provider for one in judged for record in one.group.records)
    for name in names:
        records = [record for one in judged if (record := one.record(name)) is not None]
        against = [one.vs_best_peer.speedup for one in records if one.vs_best_peer is not None]
        faster = [one.faster for one in judged]
        taken = [one.point.takes.get(one.group.phase) for one in judged]
        is_ours = any(record.kind == "implementation" for record in records)
        chosen = name if is_ours else {"eager": "reference"}.get(name)
        chosen = chosen if any(taken) else None
        beats = sum(one is not None and one.provider == name for one in faster)
        table.add_row(
            name,
            str(len(records)),
            _number(geometric_mean(against)),
            NONE if chosen is None else str(taken.count(chosen)),
            str(beats) if is_ours else NONE,
        )
    return table


def _points(judged: Sequence[Judged]) -> Table:
    """Return a row for each point, the slowest against the others first."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("point", justify="right", width=5)
    table.add_column("call", width=27, overflow="fold")
    table.add_column("takes", width=9, overflow="fold")
    for heading, width in (("us", 7), ("host us", 7), ("%lim", 5)):
        table.add_column(heading, justify="right", width=width, overflow="fold")
    table.add_column("vs best", width=13, overflow="fold")
    for one in sorted(judged, key=lambda one: (one.versus is None, _speed(one), one.point.index)):
        record = one.record(one.subject)
        table.add_row(
            str(one.point.index),
            f"{one.point.dtype} {one.point.title}",
            one.point.takes.get(one.group.phase, NONE),
            _number(record.median_us if record else None),
            _number(record.host_us if record else None),
            percent_of_limit(record.ceiling_share if record else None),
            _verdict(one),
        )
    return table


def _speed(judged: Judged) -> float:
    return judged.versus.speedup if judged.versus is not None else 0.0


def _verdict(judged: Judged) -> Text:
    versus = judged.versus
    if versus is None:
        return Text("not timed", style="red")
    speed = f"{versus.speedup:.3f}" if versus.speedup < 10 else digits(versus.speedup)
    return Text(f"{speed} {versus.outcome}", style=STYLES.get(Outcome(versus.outcome), ""))


def _losses(survey: Survey) -> list[RenderableType]:
    """Return the losing points, each with the command that repeats it."""
    losing = survey.losing
    if not losing:
        unclear = sum(
            one.versus is not None and one.versus.outcome == Outcome.UNCLEAR
            for one in survey.judged()
        )
        behind = f"; {unclear} verdicts are UNCLEAR" if unclear else ""
        return [Text(), Text(f"{survey.subject} is SLOWER at no point{behind}.")]
    parts: list[RenderableType] = [Text(), Text(f"{survey.subject} is SLOWER here:", style="bold")]
    for one in losing:
        versus = one.versus
        assert versus is not None
        once = "timed again" if one.is_again else "timed once, --worst times it again"
        parts += [
            Text(
                f"  {versus.speedup:.3f} ({versus.low:.3f} to {versus.high:.3f}) of the speed of "
                f"{versus.against}, {one.group.phase}; {once}"
            ),
            Text(f"    {survey.command_of(one.point)}", no_wrap=True, overflow="ignore"),
        ]
    return parts


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _number(value: float | None, factor: float = 1.0) -> str:
    """Format a number for a column of 7."""
    if value is None:
        return NONE
    text = digits(value * factor)
    return text if len(text) <= 7 else f"{value * factor:g}"
