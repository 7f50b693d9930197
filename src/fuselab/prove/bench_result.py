"""The result of a benchmark, rounded once: the table, the JSON, the plots and the report all show
these digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fuselab.notebook import ShownInNotebooks
from fuselab.schema import SCHEMA

OURS = ("implementation", "auto")


@dataclass(frozen=True)
class Comparison:
    """A verdict against one provider; ``speedup`` above 1 is faster, ``low`` to ``high`` is its
    interval."""

    against: str
    outcome: str
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class Record:
    """One provider on one case.

    ``kind`` is eager, peer, torchscript, compile, implementation or auto. ``status`` is ``ok``,
    ``wrong`` (its result differs from the reference's by more than the bar allows), ``failed`` (it
    raised), ``unsupported`` (an implementation that says it cannot run this) or ``unavailable``;
    ``reason`` says more. Times are in microseconds; ``low_us`` to ``high_us`` is the 95 % interval
    of the median. ``gbps`` and ``tflops`` count the least work (``Cost``); ``ceiling_share`` is the
    ceiling's time divided by this provider's. ``host_us`` is the median of the host's own time.
    ``peak_bytes`` does not count the inputs. ``explain`` is set where the ceiling was exceeded, and
    ``is_above_limit`` where that is beyond the intervals of both times.
    """

    provider: str
    kind: str
    status: str
    reason: str | None = None
    note: str | None = None
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    quantiles_us: Mapping[str, float] | None = None
    rounds: int = 0
    calls_per_round: int = 0
    method: str | None = None
    host_us: float | None = None
    gbps: float | None = None
    tflops: float | None = None
    ceiling_share: float | None = None
    explain: str | None = None
    is_above_limit: bool = False
    peak_bytes: int | None = None
    joules: float | None = None
    page_faults_per_call: float | None = None
    vs_eager: Comparison | None = None
    vs_best_peer: Comparison | None = None

    @property
    def is_ours(self) -> bool:
        return self.kind in OURS

    @property
    def problem(self) -> str | None:
        """The reason why the record of an implementation is a failure, or None."""
        if self.status in ("wrong", "failed"):
            return f"{self.status}: {self.reason}"
        if not self.is_above_limit or self.ceiling_share is None:
            return None
        return f"at {100 * self.ceiling_share:.0f} % of the limit is {self.explain}"


@dataclass(frozen=True)
class Ceiling:
    """The least time for a case's work.

    It is the larger of two times: streaming just the case's bytes (``bound`` is ``memory``), or its
    arithmetic at the rate of the library's matrix product (``bound`` is ``compute``). ``low_us`` is
    the lower end of its 95 % interval.
    """

    bound: str
    kernel: str
    median_us: float
    gbps: float | None
    low_us: float | None = None


@dataclass(frozen=True)
class Group:
    """All providers on one case, dtype and phase (forward, backward, forward+backward), timed
    interleaved in one run.

    ``ceiling`` is None if no bytes are read or written or no cost is declared. ``verdicts_by`` is
    ``device time``, or ``host time`` for cases tagged ``tiny``.
    """

    case: str
    dtype: str
    phase: str
    bytes_read: int | None
    bytes_written: int | None
    flops: int | None
    unit: str | None
    ceiling: Ceiling | None
    records: Sequence[Record]
    verdicts_by: str = "device time"

    @property
    def bytes_moved(self) -> int | None:
        if self.bytes_read is None or self.bytes_written is None:
            return None
        return self.bytes_read + self.bytes_written

    @property
    def title(self) -> str:
        return f"{self.case}, {self.dtype}, {self.phase}"


@dataclass(frozen=True)
class Bench(ShownInNotebooks):
    """A whole benchmark: where it ran, what was skipped and why, and one group per case, dtype and
    phase."""

    text_by = "fuselab.report.tables:bench_text"

    operator: str
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    ceilings: Mapping[str, Any]
    groups: Sequence[Group]
    skipped: Sequence[str]
    notes: Sequence[str]

    @property
    def failures(self) -> list[str]:
        """One line for every implementation of ours whose result is wrong, which failed, or whose
        time is shorter than the limit allows."""
        return [
            f"{group.title}: {record.provider} {problem}"
            for group in self.groups
            for record in group.records
            if record.is_ours and (problem := record.problem) is not None
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the payload of ``--json``, which docs/contract.md describes."""
        return {"schema": SCHEMA, "verb": "bench", **asdict(self)}
