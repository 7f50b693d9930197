"""The note that other processes held the cores while something was timed."""

from __future__ import annotations

from fuselab.measure.machine_state import BUSY_SHARE
from fuselab.report.numbers import share
from fuselab.report.screen import folded


def busy_note(*waited_shares: float | None) -> list[str]:
    """Return lines that say so if one of the shares of time is that of a busy machine.

    Each is the share of its time for which the process waited for a core (``waiting_share``), or
    None where it is not known.
    """
    sentence = busy_sentence(*waited_shares)
    return [] if sentence is None else folded(" ", sentence)


def busy_sentence(*waited_shares: float | None) -> str | None:
    """Return what ``busy_note`` says, without a line's end; None where no machine was busy."""
    most = max((one for one in waited_shares if one is not None), default=0.0)
    if most <= BUSY_SHARE:
        return None
    return (
        f"the machine is busy: for {share(most)} of the time threads waited for a core that others "
        "held, so times are too long, and scatter; with fewer threads (OMP_NUM_THREADS) they wait "
        "less"
    )
