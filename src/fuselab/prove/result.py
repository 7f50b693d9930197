"""The results of a check: one per check, one group per implementation and dtype, one report."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fuselab.notebook import ShownInNotebooks
from fuselab.prove.guide import OF_DECLARATION, PAGE, section_of


class Verdict(enum.StrEnum):
    """The four possible verdicts of a check; only FAIL makes the exit status 1."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIPPED = "SKIPPED"
    NOT_JUDGED = "NOT JUDGED"


@dataclass(frozen=True)
class Result:
    """One check of one implementation and dtype.

    ``reason`` says what is wrong (FAIL), why nothing was tried (SKIPPED) or why no verdict is
    possible here (NOT JUDGED). ``trials`` counts the inputs tried, out of ``planned`` ones; there
    are fewer if the time budget ended. ``unsupported`` counts inputs that were drawn but not tried,
    because the operator or the implementation does not take them. ``share_of_bar`` is our error
    over the allowed one in the row where that ratio is largest; ``ours_ulp`` and ``eager_ulp`` are
    that row's errors, in ulp of it. A failure carries the smallest failing ``case`` and how to
    repeat it. ``seconds`` is the time that the check took. ``of_declaration`` tells of a failure
    that what the operator declares is at fault: its reference raised.
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
    of_declaration: bool = False

    @property
    def guide(self) -> str | None:
        """The page and section on how to mend a failure; None where nothing failed."""
        if self.verdict is not Verdict.FAIL:
            return None
        section = OF_DECLARATION if self.of_declaration else section_of(self.check)
        return f'{PAGE}, "{section}"'


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
        """FAIL if any check fails; NOT JUDGED if kernels were compiled but cannot run, or if too
        few of the inputs drawn are taken; PASS if any check passes; otherwise the first check's
        verdict."""
        verdicts = [result.verdict for result in self.results]
        is_little = any(
            result.check == "coverage" and result.verdict is Verdict.NOT_JUDGED
            for result in self.results
        )
        if (self.where == "compiled" or is_little) and Verdict.FAIL not in verdicts:
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
        """The number of trials that there would have been with more time."""
        return sum(max(result.planned, result.trials) for result in self.results)

    @property
    def unsupported(self) -> int:
        """The number of inputs drawn that the operator or the implementation does not take."""
        return sum(result.unsupported for result in self.results)

    @property
    def cut_short(self) -> bool:
        """Whether the row's time ended before its trials did."""
        return self.planned > self.trials

    @property
    def worst(self) -> Result | None:
        """The check with the largest share of the bar; its errors are the group's."""
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
        """Why nothing was judged, or None if something was."""
        if self.verdict in (Verdict.PASS, Verdict.FAIL):
            return None
        return "; ".join(result.reason for result in self.results if result.reason)


@dataclass(frozen=True)
class CheckReport(ShownInNotebooks):
    """The report of ``fuselab.check``; it is true if nothing failed."""

    text_by = "fuselab.report.check_text:check_text"

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
        """The number of trials that there would have been with more time."""
        return sum(group.planned for group in self.groups)

    def __bool__(self) -> bool:
        return self.passed

    def results(self, check: str) -> list[Result]:
        """Return the results of one check over all groups."""
        return [
            result for group in self.groups for result in group.results if result.check == check
        ]

    def failed_checks(self) -> set[str]:
        """Return the names of the checks that failed in any group."""
        return {failure.check for group in self.groups for failure in group.failures}

    def facts(self) -> dict[str, Any]:
        """Return the report as plain JSON values, as ``--json`` writes it under the common keys."""
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
    """Return a group as plain JSON values."""
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
        "results": [
            asdict(result) | {"verdict": str(result.verdict), "guide": result.guide}
            for result in group.results
        ],
    }


def group_from_facts(facts: Mapping[str, Any]) -> Group:
    """Rebuild the group that a child process sent through ``group_facts``."""
    known = [one.name for one in fields(Result)]
    results = [
        Result(
            **{name: entry[name] for name in known}
            | {"verdict": Verdict(entry["verdict"]), "case": tuple(entry["case"])}
        )
        for entry in facts["results"]
    ]
    return Group(facts["implementation"], facts["dtype"], facts["where"], tuple(results))
