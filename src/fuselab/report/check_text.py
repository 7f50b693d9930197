"""A check's report as a table of 80 columns, with every failure and what repeats it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fuselab.prove.result import CheckReport, Group, Result, Verdict
from fuselab.report.screen import as_text

READABLE_ULPS = 1e6
NOTED_ULPS = 1e3  # an error of eager's from which on a note says how it can be


def check_text(report: CheckReport) -> str:
    """Return what ``fuselab check`` prints of a report."""
    return as_text(lambda console: show(report, console))


def show(report: CheckReport, console: Console) -> None:
    """Print the table, then every failure with its smallest case, then what was not judged and
    why."""
    table = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, title=report.op, title_justify="left"
    )
    for name in ("implementation", "dtype", "where"):
        table.add_column(name)
    for name in ("trials", "of bar", "ulp", "eager's"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for group in report.groups:
        judged = group.verdict in (Verdict.PASS, Verdict.FAIL)
        table.add_row(
            group.implementation,
            group.dtype,
            group.where,
            trials(group) if judged else "",
            percent(group.share_of_bar) if judged else "",
            ulps(group.ours_ulp) if judged else "",
            ulps(group.eager_ulp) if judged else "",
            f"{group.verdict}{', cut short' if group.cut_short else ''}",
        )
    console.print(table)
    for group in report.groups:
        for failure, others in failures_by_error(group):
            show_failure(group, failure, others, console)
    for line in notes(report):
        console.print(line, style="dim", soft_wrap=False)
    console.print(summary(report), soft_wrap=True)


def summary(report: CheckReport) -> str:
    """Return the last line: the verdict behind the exit status, and how much was judged."""
    verdicts = [group.verdict for group in report.groups]
    failures = sum(len(group.failures) for group in report.groups)
    judged = sum(verdict in (Verdict.PASS, Verdict.FAIL) for verdict in verdicts)
    text = f"FAIL: {failures} checks" if failures else "PASS" if judged else "NOT JUDGED"
    trials = f"{report.trials} trials"
    if report.cut_short:
        short = sum(group.cut_short for group in report.groups)
        text += f", cut short: the time of {short} of {len(verdicts)} rows ended first"
        trials = f"{report.trials} of {report.planned} trials"
    if judged < len(verdicts):
        text += f"; {len(verdicts) - judged} of {len(verdicts)} rows not judged here"
    return f"{text} ({trials}, seed {report.seed})"


def trials(group: Group) -> str:
    """Return how many trials were run; ``90/335`` if the time ended first."""
    if group.planned > group.trials:
        return f"{group.trials}/{group.planned}"
    return str(group.trials)


def ulps(value: float) -> str:
    """Format an error in ulp of its row with three digits; from a million on, only as a bound."""
    return f"{value:.3g}" if value < READABLE_ULPS else f">{READABLE_ULPS:.0e}"


def percent(share: float) -> str:
    """Format a share of the bar in per cent, with three digits; above 100 the bar is missed."""
    return f"{100 * share:.3g}%" if 100 * share < 999.5 else ">999%"


def failures_by_error(group: Group) -> list[tuple[Result, list[str]]]:
    """Return each failure with the names of the later checks that raised the same error: a kernel
    that raises in every call fails in two dozen checks, and is one mistake. So does a reference,
    whose errors of one class count as the same, because their texts have sizes in them."""
    found: dict[str, tuple[Result, list[str]]] = {}
    for failure in group.failures:
        has_raised = failure.reason is not None and failure.reason.startswith("raised ")
        key = str(failure.reason) if has_raised else f"{failure.check} {len(found)}"
        if failure.of_declaration:
            key = str(failure.reason).partition(":")[0]
        if key in found:
            found[key][1].append(failure.check)
        else:
            found[key] = (failure, [])
    return list(found.values())


def show_failure(group: Group, failure: Result, others: list[str], console: Console) -> None:
    """Print one failure: what is wrong, the smallest case found, and the unwrapped commands that
    repeat it; then the names of the ``others`` that raised the same error."""
    console.print(f"FAIL {failure.check}: {group.implementation} {group.dtype} ({group.where})")
    console.print(f"  {failure.reason}", markup=False)
    for line in failure.case:
        console.print(f"    {line}", markup=False)
    for repeat in (failure.repeat_command, failure.repeat_call):
        if repeat is not None:
            console.print(f"  {repeat}", markup=False, soft_wrap=True)
    console.print(f"  How to mend it: {failure.guide}", markup=False)
    if others:
        console.print(f"  The same error in {len(others)} more: {', '.join(others)}.")
    console.print()


def notes(report: CheckReport) -> list[str]:
    """Return what was not judged and what was refused, each reason once, with the rows it
    concerns."""
    held: dict[str, dict[str, list[str]]] = {}
    for group in report.groups:
        for entry in group.results:
            if entry.reason is None or entry.verdict is Verdict.FAIL:
                continue
            if entry.verdict is Verdict.SKIPPED:
                continue
            places = held.setdefault(f"{entry.verdict} {entry.check}: {entry.reason}", {})
            places.setdefault(group.implementation, []).append(group.dtype)
    lines = [f"{text} ({_listed(places)})" for text, places in held.items()]
    for group in report.groups:
        judged = group.verdict in (Verdict.PASS, Verdict.FAIL)
        if judged and group.unsupported > group.trials:
            drawn = group.trials + group.unsupported
            lines.append(
                f"{group.implementation} {group.dtype} takes few of the inputs drawn: "
                f"{group.trials} of {drawn}"
            )
    if any(group.eager_ulp >= NOTED_ULPS for group in report.groups):
        lines.append(
            "thousands of ulp: of a row whose terms cancel to almost nothing eager is as far off "
            'as the column "eager\'s" says, in its own dtype; what counts is the share "of bar"'
        )
    if report.cut_short:
        lines.append(
            "cut short: the row's time ended first; of every check at least a quarter was run, or "
            "with --quick under the interpreter one trial"
        )
    return lines


def _listed(places: dict[str, list[str]]) -> str:
    return "; ".join(f"{name} {' '.join(dtypes)}" for name, dtypes in places.items())
