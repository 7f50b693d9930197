"""A judge's verdicts as a table, with the reason of each that is not RIGHT."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fuselab.prove.judge_problem import AnswerReport, Judgement, ProblemReport


def show_judgements(report: ProblemReport, console: Console) -> None:
    """Print one row per answer, then why answers are not right and what nothing kept them from."""
    table = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, title=report.problem, title_justify="left"
    )
    table.add_column("answer")
    for name in ("of bar", "us", "x eager", "x compile"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for answer in report.answers:
        speed = answer.speed
        table.add_row(
            answer.candidate,
            f"{100 * answer.share_of_bar:.3g}%" if answer.trials else "",
            f"{speed.median_us:.4g}" if speed else "",
            _against(answer, "eager"),
            _against(answer, "compile"),
            str(answer.verdict),
        )
    console.print(table)
    for answer in report.answers:
        if answer.reason is not None:
            console.print(f"{answer.verdict} {answer.candidate}: {answer.reason}", soft_wrap=True)
        elif answer.speed is not None and answer.speed.note is not None:
            console.print(f"UNCLEAR {answer.candidate}: {answer.speed.note}", soft_wrap=True)
    kept = sorted({one for answer in report.answers for one in answer.kept_from})
    console.print(f"kept from the machine: {'; '.join(kept) or 'nothing'}", style="dim")
    right = sum(answer.verdict is Judgement.RIGHT for answer in report.answers)
    console.print(f"{right} of {len(report.answers)} right (seed {report.seed})", soft_wrap=True)


def _against(answer: AnswerReport, name: str) -> str:
    if answer.speed is None or name not in answer.speed.against:
        return ""
    found = answer.speed.against[name]
    return f"{found['speedup']:.3g} ({found['low']:.3g} to {found['high']:.3g})"
