"""The result of a survey: what every point took, where ``auto`` wins and loses, and by how much."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fuselab.measure.statistics import significant
from fuselab.measure.verdict import Outcome
from fuselab.notebook import ShownInNotebooks
from fuselab.prove.bench_result import Ceiling, Comparison, Group, Record
from fuselab.schema import SCHEMA


@dataclass(frozen=True)
class Surveyed:
    """One point and what was measured there.

    ``groups`` has one group per phase (forward, and forward+backward if asked for), ``again`` those
    that ``--worst`` timed once more, in fresh rounds beside statically compiled code. ``takes`` has
    what ``auto`` ran, by phase; ``form`` and ``sizes`` are those that
    ``fuselab.runtime.surveyed_choice`` compares calls by. Where the operator or its reference
    refused the call, ``refused`` says why and there are no groups.
    """

    index: int
    title: str
    dtype: str
    moved_bytes: int
    groups: Sequence[Group] = ()
    again: Sequence[Group] = ()
    takes: Mapping[str, str] = field(default_factory=dict)
    form: str = ""
    sizes: Sequence[int] = ()
    refused: str | None = None

    def judged(self, subject: str) -> Iterator[Judged]:
        """Yield every phase as it counts: as timed again where it was. ``subject`` is the provider
        that is judged."""
        later = {group.phase: group for group in self.again}
        for group in self.groups:
            yield Judged(self, later.get(group.phase, group), subject, group.phase in later)


@dataclass(frozen=True)
class Judged:
    """One phase of a point: its group, the provider that is judged, and whether it was timed
    again."""

    point: Surveyed
    group: Group
    subject: str
    is_again: bool

    def record(self, provider: str) -> Record | None:
        """Return a provider's record if it was timed."""
        found = (one for one in self.group.records if one.provider == provider)
        return next((one for one in found if one.status == "ok"), None)

    @property
    def versus(self) -> Comparison | None:
        """The comparison of the subject with the best of eager, torch.compile and the peers."""
        record = self.record(self.subject)
        return record.vs_best_peer if record is not None else None

    @property
    def may_lose(self) -> bool:
        """Whether the subject is slower, or may be and is slower in the median."""
        versus = self.versus
        return versus is not None and (
            versus.outcome == Outcome.SLOWER
            or (versus.outcome == Outcome.UNCLEAR and versus.speedup < 1)
        )

    @property
    def faster(self) -> Record | None:
        """The fastest implementation whose 95 % interval lies wholly below the subject's."""
        own = self.record(self.subject)
        if own is None or own.low_us is None:
            return None
        faster = [
            one
            for one in self.group.records
            if one.kind == "implementation" and one.high_us is not None and one.high_us < own.low_us
        ]
        return min(faster, key=lambda one: one.median_us or math.inf, default=None)


@dataclass(frozen=True)
class Survey(ShownInNotebooks):
    """A whole survey: where and of what it was made, and its points in order.

    ``subject`` is the provider that is judged: ``auto``, or ``fused`` for a composition.
    ``made_of`` has what a survey must share with another one to be continued by it: operator,
    device, seed, dtypes, providers, versions, and a hash of the sources.
    """

    text_by = "fuselab.report.survey_text:survey_text"

    operator: str
    named: str
    subject: str
    environment: Mapping[str, Any]
    made_of: Mapping[str, Any]
    points: Sequence[Surveyed]
    notes: Sequence[str] = ()

    def judged(self, phase: str | None = None) -> list[Judged]:
        """Return the timed phases of all points, or those of one phase."""
        every = (one for point in self.points for one in point.judged(self.subject))
        return [one for one in every if phase is None or one.group.phase == phase]

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(one.group.phase for one in self.judged()))

    @property
    def losing(self) -> list[Judged]:
        """The phases where the subject is SLOWER, the worst first."""
        slower = [
            (one.versus.speedup, place, one)
            for place, one in enumerate(self.judged())
            if one.versus is not None and one.versus.outcome == Outcome.SLOWER
        ]
        return [one for _, _, one in sorted(slower, key=lambda found: found[:2])]

    @property
    def failures(self) -> list[str]:
        """One line for every implementation of ours that was wrong or failed; one line if no point
        could be timed."""
        if self.points and not any(point.groups for point in self.points):
            return [f"no point could be timed: {self.points[0].refused}"]
        return [
            f"point {point.index} ({group.title}): {record.provider} {record.problem}"
            for point, group in self._groups()
            for record in group.records
            if record.is_ours and record.status in ("wrong", "failed")
        ]

    @property
    def above_limit(self) -> list[str]:
        """One line for every time of ours that is above the limit beyond both intervals."""
        lines = (
            f"point {point.index}, {group.phase}: {record.provider} at "
            f"{100 * record.ceiling_share:.0f} % of the limit"
            for point, group in self._groups()
            for record in group.records
            if record.is_ours and record.is_above_limit and record.ceiling_share is not None
        )
        return list(dict.fromkeys(lines))

    def _groups(self) -> Iterator[tuple[Surveyed, Group]]:
        for point in self.points:
            for group in (*point.groups, *point.again):
                yield point, group

    def command_of(self, point: Surveyed) -> str:
        """Return the command that times one point alone."""
        made = self.made_of
        words = ["fuselab", "bench", self.named, "--survey", "--seed", str(made["seed"])]
        words += ["--point", str(point.index)]
        words += ["--backward"] if made["backward"] else []
        for dtype in made["asked_dtypes"] or ():
            words += ["--dtype", dtype]
        if made["asked_providers"]:
            words += ["--provider", ",".join(made["asked_providers"])]
        return shlex.join(words)

    def to_json(self) -> dict[str, Any]:
        """Return the payload of ``--json`` and of the file in ``-o``'s folder."""
        facts = asdict(self)
        summary = {phase: summary_of(self.judged(phase)) for phase in self.phases}
        losing = [
            {
                "point": one.point.index,
                "phase": one.group.phase,
                "is_again": one.is_again,
                "command": self.command_of(one.point),
            }
            for one in self.losing
        ]
        return {"schema": SCHEMA, "verb": "survey", **facts, "summary": summary, "losing": losing}

    def choices(self) -> dict[str, Any]:
        """Return what ``fuselab.runtime.surveyed_choice`` goes by: the times of the forwards that
        were judged by the device's time, by implementation; eager's are those of the reference,
        unless the operator writes over its arguments, which eager does not.
        """
        names = {} if self.operator.endswith("_") else {"eager": "reference"}
        points = []
        for one in self.judged("forward"):
            times = {
                names.get(record.provider, record.provider): (
                    record.median_us,
                    record.low_us,
                    record.high_us,
                )
                for record in one.group.records
                if record.status == "ok"
                and (record.kind == "implementation" or record.provider in names)
            }
            if one.group.verdicts_by == "device time" and times:
                point = one.point
                points.append({"form": point.form, "sizes": point.sizes, "us": times})
        return {"made_of": self.made_of, "date": self.environment["date"], "points": points}

    def with_point(self, surveyed: Surveyed) -> Survey:
        """Return the survey with one point added or replaced, in order."""
        others = [point for point in self.points if point.index != surveyed.index]
        return replace(self, points=sorted([*others, surveyed], key=lambda point: point.index))


def summary_of(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return counts of verdicts and geometric means over points: of the subject's speed against the
    best of the others, of its share of the limit, and of eager's host time over its own."""
    compared = [one.versus for one in judged if one.versus is not None]
    owns = [record for one in judged if (record := one.record(one.subject)) is not None]
    hosts = [
        eager.host_us / own.host_us
        for one in judged
        if (own := one.record(one.subject)) is not None
        and (eager := one.record("eager")) is not None
        and own.host_us
        and eager.host_us
    ]
    return {
        "points": len(compared),
        **{
            str(outcome).lower(): sum(one.outcome == outcome for one in compared)
            for outcome in Outcome
        },
        "speedup": geometric_mean(one.speedup for one in compared),
        "least_speedup": min((one.speedup for one in compared), default=None),
        "ceiling_share": geometric_mean(
            one.ceiling_share for one in owns if one.ceiling_share is not None
        ),
        "eager_host_ratio": geometric_mean(hosts),
    }


def geometric_mean(values: Iterable[float]) -> float | None:
    """Return the geometric mean of positive numbers to four digits; None of none."""
    logs = [math.log(value) for value in values]
    return significant(math.exp(math.fsum(logs) / len(logs))) if logs else None


def survey_from(payload: Mapping[str, Any]) -> Survey:
    """Return the survey that ``to_json`` gave. Raises KeyError or TypeError for anything else."""
    return Survey(
        operator=payload["operator"],
        named=payload["named"],
        subject=payload["subject"],
        environment=payload["environment"],
        made_of=payload["made_of"],
        points=[_point_from(point) for point in payload["points"]],
        notes=payload["notes"],
    )


def _point_from(facts: Mapping[str, Any]) -> Surveyed:
    groups = {key: tuple(map(_group_from, facts[key])) for key in ("groups", "again")}
    return Surveyed(**{**facts, **groups, "sizes": tuple(facts["sizes"])})


def _group_from(facts: Mapping[str, Any]) -> Group:
    records = [_record_from(record) for record in facts["records"]]
    ceiling = _optional(Ceiling, facts["ceiling"])
    return Group(**{**facts, "records": records, "ceiling": ceiling})


def _record_from(facts: Mapping[str, Any]) -> Record:
    compared = {key: _optional(Comparison, facts[key]) for key in ("vs_eager", "vs_best_peer")}
    return Record(**{**facts, **compared})


def _optional(kind: Callable[..., Any], facts: Mapping[str, Any] | None) -> Any:
    return None if facts is None else kind(**facts)
