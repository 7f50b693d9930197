"""The result of ``fuse``: the chains that it tried, what became of each, and what it left alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from fuselab.measure.verdict import Verdict
from fuselab.notebook import ShownInNotebooks
from fuselab.op import FusedOp, Inputs


class Decision(StrEnum):
    """The decision on one chain that an operator could replace."""

    KEPT = "kept"
    NOT_FASTER = "not faster"
    WRONG = "wrong"
    REFUSED = "refused"


@dataclass(frozen=True)
class Replacement:
    """One chain of the model and the operator that was tried in its place.

    ``folder`` is the kernel package that was written for the chain, None for an operator that
    exists without it.

    ``module`` is the dotted path of the module whose forward contains the chain ("" is the model),
    ``chain`` the operations in order, ``source`` the user's ``file:line``, ``lines`` those of all
    its operations, where they are known. Times are microseconds
    per call, or None if it was not measured. ``inputs`` are the operator's arguments at the sizes
    found in the model.
    """

    op: FusedOp
    module: str
    chain: str
    source: str
    decision: Decision
    reason: str
    implementation: str | None = None
    before_us: float | None = None
    after_us: float | None = None
    verdict: Verdict | None = None
    inputs: Inputs = field(default_factory=Inputs, repr=False)
    folder: Path | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftAlone:
    """A module or layer that was left unchanged, and the reason."""

    module: str
    source: str
    reason: str


@dataclass(frozen=True)
class FuseResult(ShownInNotebooks):
    """The result of ``fuse``. ``model`` is the fused model; times are of the whole model, in us.

    ``training`` says whether forward and backward were timed, or only the forward. ``proof`` is the
    outcome of the whole-model comparison, ``searched`` what was looked for and where.
    """

    model: Any
    replacements: tuple[Replacement, ...]
    left: tuple[LeftAlone, ...]
    training: bool
    before_us: float
    after_us: float
    verdict: Verdict
    proof: str
    searched: str

    @property
    def kept(self) -> tuple[Replacement, ...]:
        """The replacements that are in the model now."""
        return tuple(tried for tried in self.replacements if tried.decision is Decision.KEPT)

    def __str__(self) -> str:
        what = "forward and backward" if self.training else "forward"
        lines = [
            f"{len(self.kept)} of {len(self.replacements)} chains replaced; {what} "
            f"{self.before_us:.1f} us before, {self.after_us:.1f} us after: "
            f"{self.verdict.outcome}; {self.proof}"
        ]
        for tried in self.replacements:
            times = f" ({tried.before_us:.1f} -> {tried.after_us:.1f} us)" if tried.after_us else ""
            lines.append(
                f"  {tried.decision}: {tried.chain} in {tried.module or 'the model'} -> "
                f"{tried.op.short_name}{times}: {tried.reason} [{tried.source}]"
            )
            if tried.folder is not None:
                lines.append(f"    its kernels: {tried.folder}")
        if not self.replacements:
            lines.append(f"  {self.searched}")
        lines += [
            f"  left alone: {module.module or 'the model'}: {module.reason}" for module in self.left
        ]
        return "\n".join(lines)
