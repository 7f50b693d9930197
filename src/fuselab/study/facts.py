"""The facts of a study, rounded once; ``report.json``, ``report.html`` and the screen show them.

Times are microseconds per call, bandwidths GB/s (1e9 bytes), shares and ratios plain numbers. None
means that there is no such figure; a ``reason`` beside it says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fuselab.errors import MissingDependencyError
from fuselab.notebook import ShownInNotebooks


@dataclass(frozen=True)
class Argument:
    """One tensor that the target is called with."""

    name: str
    shape: str
    dtype: str


@dataclass(frozen=True)
class Subject:
    """The target of a study. ``phase`` says what one call is: forward, or forward and backward."""

    name: str
    spec: str
    file: str
    data: str | None
    phase: str
    parameters: int
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Way:
    """One way to run the whole target: as it is, fused, compiled, or both.

    ``speedup`` and ``outcome`` compare it with eager, from interleaved rounds. ``limit_share`` is
    the limit's time over this one's. ``prepare_s`` is the time of the first call. ``same_as`` names
    the way that this one would repeat, because nothing was replaced; it was not timed again.
    """

    name: str
    title: str
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    speedup: float | None = None
    outcome: str | None = None
    limit_share: float | None = None
    peak_bytes: int | None = None
    prepare_s: float | None = None
    same_as: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Limit:
    """The least time of the whole target on this device.

    It is the longest of three times: the arithmetic at the best matmul's rate; inputs, used
    parameters and outputs moved once at the best copy's rate; and one launch.
    """

    us: float
    bound: str
    bytes: int
    flops: int
    gbps: float
    tflops: float
    unit: str


@dataclass(frozen=True)
class Lead:
    """One finding of the profile and what became of it.

    ``state`` is ``replaced`` (by an operator that was kept), ``compiled`` (torch.compile fuses it),
    ``tried`` (a replacement was tried and not kept) or ``open``.
    """

    kind: str
    title: str
    advice: str
    line: str | None
    source: str
    saved_us: float
    share: float
    state: str
    done: str


@dataclass(frozen=True)
class Kernel:
    """One kernel (``generated``) or ``library call`` of the compiled target, in launch order."""

    name: str
    kind: str
    phase: str
    operators: str
    lines: str
    bytes: int | None
    us: float | None
    gbps: float | None
    share: float | None


@dataclass(frozen=True)
class Compiler:
    """The result of torch.compile on the target.

    ``cold_s`` is the compile time in a fresh process with an empty cache, ``warm_s`` the time with
    the cache filled. ``failed`` is the reason if it does not compile.
    """

    graphs: int = 0
    breaks: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    cold_s: float | None = None
    warm_s: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Replaced:
    """One chain of the model and what became of the operator that was tried in its place.

    ``package`` is the folder, seen from the report, with the kernels that were written for the
    chain and kept; None for an operator that exists without it. ``lines`` are the places of all of
    the chain's operations, where they are known.
    """

    operator: str
    module: str
    chain: str
    line: str
    decision: str
    reason: str
    implementation: str | None
    before_us: float | None
    after_us: float | None
    speedup: float | None
    package: str | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """One implementation and dtype of an operator against its reference in float64."""

    operator: str
    implementation: str
    dtype: str
    where: str
    verdict: str
    trials: int
    ours_ulp: float | None
    eager_ulp: float | None
    reason: str | None


@dataclass(frozen=True)
class Record:
    """One provider on one case; ``ours`` is True for fuselab's implementations."""

    provider: str
    ours: bool
    us: float | None
    gbps: float | None
    limit_share: float | None
    speedup: float | None
    outcome: str | None
    reason: str | None


@dataclass(frozen=True)
class Bench:
    """An operator at one size found in the target, every provider in one interleaved run."""

    operator: str
    case: str
    phase: str
    dtype: str
    bytes: int | None
    flops: int | None
    ceiling_us: float | None
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Headline:
    """The first screen: one sentence, and four answers for someone who reads no tables."""

    sentence: str
    slow: str
    changed: str
    limit: str
    compile: str


@dataclass(frozen=True)
class Study(ShownInNotebooks):
    """All facts of a study. ``profile`` is a part of ``fuselab profile --json`` of the eager
    target."""

    subject: Subject
    environment: Mapping[str, Any]
    ways: tuple[Way, ...]
    limit: Limit | None
    profile: Mapping[str, Any]
    leads: tuple[Lead, ...]
    compiler: Compiler
    replaced: tuple[Replaced, ...]
    left: tuple[str, ...]
    proof: str
    checks: tuple[Check, ...]
    benches: tuple[Bench, ...]
    seconds: float
    waited_share: float = 0.0  # of its time the process waited for a core, while ways were timed
    headline: Headline = field(default=Headline("", "", "", "", ""))

    def __str__(self) -> str:
        """Return the screen of ``fuselab study``; without rich, the fields."""
        from fuselab.report.study_text import study_text

        try:
            return study_text(self.describe())
        except MissingDependencyError:
            return repr(self)

    def describe(self) -> dict[str, Any]:
        """Return the facts as plain values; ``report.result`` adds schema and verb."""
        return asdict(self)

    def way(self, name: str) -> Way:
        """Return the way named ``name``: eager, fused, compiled or compiled_fused."""
        return next(way for way in self.ways if way.name == name)
