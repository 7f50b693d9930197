"""What a check says: one result per check, one group per implementation and dtype, one report."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


class Verdict(enum.StrEnum):
    """The four things that a check can say; only FAIL makes the exit status 1."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIPPED = "SKIPPED"
    NOT_JUDGED = "NOT JUDGED"


@dataclass(frozen=True)
class Result:
    """One check of one implementation and dtype.

    ``reason`` says what is wrong (FAIL), why nothing was tried (SKIPPED) or why nothing can be said
    here (NOT JUDGED). ``trials`` counts the inputs tried, of ``planned`` ones: fewer where the time
    budget ended; ``unsupported`` inputs were drawn and no trial, since the operator or the
    implementation takes no such input. ``share_of_bar`` is our error over the allowed one in the
    row that uses most of it, and the two errors are that row's, in ulp of it. A failure carries the
    smallest failing ``case`` and how to repeat it. ``seconds`` is the time that the check took.
    """

    check: str
    verdict: Verdict
    reason: str | None = None
    trials: int = 0
    ours_ulp: float = 0.0
    eager_ulp: float = 0.0
    case: tuple[str, ...] = ()
    repeat_command: str | None = None
    repeat_call: str | None = None
    share_of_bar: float = 0.0
    planned: int = 0
    unsupported: int = 0
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Group:
    """All checks of one implementation and dtype; ``where`` is cpu, cuda, interpreter or compiled
    (built for other machines, not run)."""

    implementation: str
    dtype: str
    where: str
    results: tuple[Result, ...]

    @property
    def failures(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.verdict is Verdict.FAIL)

    @property
    def verdict(self) -> Verdict:
        """FAIL if any check fails; NOT JUDGED where kernels were compiled but cannot run; PASS if
        any check passes; else the first check's verdict."""
        verdicts = [result.verdict for result in self.results]
        if self.where == "compiled" and Verdict.FAIL not in verdicts:
            return Verdict.NOT_JUDGED
        for verdict in (Verdict.FAIL, Verdict.PASS):
            if verdict in verdicts:
                return verdict
        return verdicts[0] if verdicts else Verdict.SKIPPED

    @property
    def trials(self) -> int:
        return sum(result.trials for result in self.results)

    @property
    def planned(self) -> int:
        """Trials that there would have been with more time."""
        return sum(max(result.planned, result.trials) for result in self.results)

    @property
    def unsupported(self) -> int:
        """Inputs drawn that the operator or the implementation does not take."""
        return sum(result.unsupported for result in self.results)

    @property
    def cut_short(self) -> bool:
        """Whether the row's time ended before its trials did."""
        return self.planned > self.trials

    @property
    def worst(self) -> Result | None:
        """The check that used most of the bar: its errors are the group's."""
        return max(self.results, key=lambda result: result.share_of_bar, default=None)

    @property
    def share_of_bar(self) -> float:
        return self.worst.share_of_bar if self.worst is not None else 0.0

    @property
    def ours_ulp(self) -> float:
        return self.worst.ours_ulp if self.worst is not None else 0.0

    @property
    def eager_ulp(self) -> float:
        return self.worst.eager_ulp if self.worst is not None else 0.0

    @property
    def reason(self) -> str | None:
        """Why nothing was judged, where nothing was."""
        if self.verdict in (Verdict.PASS, Verdict.FAIL):
            return None
        return "; ".join(result.reason for result in self.results if result.reason)


@dataclass(frozen=True)
class CheckReport:
    """What ``fuselab.check`` returns; true where nothing failed."""

    op: str
    seed: int
    quick: bool
    device: str
    groups: tuple[Group, ...]

    @property
    def passed(self) -> bool:
        return not any(group.failures for group in self.groups)

    @property
    def cut_short(self) -> bool:
        """Whether the time of any row ended before its trials did."""
        return any(group.cut_short for group in self.groups)

    @property
    def trials(self) -> int:
        return sum(group.trials for group in self.groups)

    @property
    def planned(self) -> int:
        """Trials that there would have been with more time."""
        return sum(group.planned for group in self.groups)

    def __bool__(self) -> bool:
        return self.passed

    def results(self, check: str) -> list[Result]:
        """The results of one check over all groups."""
        return [
            result for group in self.groups for result in group.results if result.check == check
        ]

    def failed_checks(self) -> set[str]:
        """Names of the checks that failed in any group."""
        return {failure.check for group in self.groups for failure in group.failures}

    def facts(self) -> dict[str, Any]:
        """The report as plain JSON values: what ``--json`` writes under the common keys."""
        return {
            "operator": self.op,
            "seed": self.seed,
            "quick": self.quick,
            "device": self.device,
            "passed": self.passed,
            "cut_short": self.cut_short,
            "groups": [group_facts(group) for group in self.groups],
        }

    def __str__(self) -> str:
        verdict = "passes" if self.passed else f"fails {', '.join(sorted(self.failed_checks()))}"
        trials = f"{self.trials} of {self.planned}" if self.cut_short else f"{self.trials}"
        return f"{self.op} {verdict}{', cut short' if self.cut_short else ''} ({trials} trials)"


def group_facts(group: Group) -> dict[str, Any]:
    """A group as plain JSON values."""
    return {
        "implementation": group.implementation,
        "dtype": group.dtype,
        "where": group.where,
        "verdict": str(group.verdict),
        "trials": group.trials,
        "planned": group.planned,
        "unsupported": group.unsupported,
        "cut_short": group.cut_short,
        "ours_ulp": group.ours_ulp,
        "eager_ulp": group.eager_ulp,
        "share_of_bar": group.share_of_bar,
        "results": [asdict(result) | {"verdict": str(result.verdict)} for result in group.results],
    }


def group_from_facts(facts: Mapping[str, Any]) -> Group:
    """The group that ``group_facts`` wrote, as a child process hands it over."""
    results = [
        Result(**{**entry, "verdict": Verdict(entry["verdict"]), "case": tuple(entry["case"])})
        for entry in facts["results"]
    ]
    return Group(facts["implementation"], facts["dtype"], facts["where"], tuple(results))
