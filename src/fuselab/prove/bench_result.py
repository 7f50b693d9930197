"""What a benchmark found, rounded once: the table, the JSON, the plots and the report show these
numbers digit by digit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 1
OURS = ("implementation", "auto")


@dataclass(frozen=True)
class Comparison:
    """A verdict against one provider; ``speedup`` above 1 is faster, in ``low`` to ``high``."""

    against: str
    outcome: str
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class Record:
    """One provider on one case.

    ``kind`` is eager, peer, torchscript, compile, implementation or auto. ``status`` is ``ok``;
    ``wrong`` (its result misses the reference's), ``failed`` (it raised), ``unsupported`` (an
    implementation that says it cannot run this) or ``unavailable``; ``reason`` says more. Times are
    microseconds, ``low_us`` to ``high_us`` the 95 % interval of the median. ``gbps`` and ``tflops``
    count the least work (``Cost``), ``ceiling_share`` is the ceiling's time over this one's.
    ``host_us`` is the median of the host's own time. ``peak_bytes`` is above the inputs.
    ``explain`` stands where the ceiling was exceeded.
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
    peak_bytes: int | None = None
    joules: float | None = None
    page_faults_per_call: float | None = None
    vs_eager: Comparison | None = None
    vs_best_peer: Comparison | None = None

    @property
    def is_ours(self) -> bool:
        return self.kind in OURS


@dataclass(frozen=True)
class Ceiling:
    """The least time for a case's work: streaming just its bytes (``bound`` is ``memory``), or its
    arithmetic at the rate of the library's matrix product (``compute``), whichever is more."""

    bound: str
    kernel: str
    median_us: float
    gbps: float | None


@dataclass(frozen=True)
class Group:
    """All providers on one case, dtype and phase (forward, backward, forward+backward), timed
    interleaved in one run. ``ceiling`` is None where nothing moves or no cost is given.
    ``verdicts_by`` is ``device time``, or ``host time`` for cases tagged ``tiny``."""

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
class Bench:
    """A whole benchmark: where it ran, what was skipped and why, and one group per case, dtype and
    phase."""

    operator: str
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    ceilings: Mapping[str, Any]
    groups: Sequence[Group]
    skipped: Sequence[str]
    notes: Sequence[str]

    @property
    def failures(self) -> list[str]:
        """One line for every implementation of ours that is wrong or failed."""
        return [
            f"{group.title}: {record.provider} {record.status}: {record.reason}"
            for group in self.groups
            for record in group.records
            if record.is_ours and record.status in ("wrong", "failed")
        ]

    def to_json(self) -> dict[str, Any]:
        """The payload of ``--json``; docs/contract.md describes it."""
        return {"schema": SCHEMA, "verb": "bench", **asdict(self)}
