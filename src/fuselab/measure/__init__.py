"""Timing, statistics, verdicts, memory and energy; knows nothing of operators."""
