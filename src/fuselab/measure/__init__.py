"""Timing, statistics, verdicts, memory and energy; nothing here depends on operators."""

from fuselab.measure.timing import Timing, time
from fuselab.measure.verdict import Outcome, Verdict, verdict

__all__ = ["Outcome", "Timing", "Verdict", "time", "verdict"]
