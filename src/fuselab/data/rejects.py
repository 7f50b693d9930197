"""The treatment of malformed rows: stop at the first, or leave them out and list them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from fuselab.errors import DataError

LISTED = 100


class TruncatedLineWarning(UserWarning):
    """The file's last line stops short; it was left out."""


@dataclass
class Rejects:
    """The malformed rows of a reader.

    With ``skip``, ``count`` rows were left out, the first LISTED of them described in
    ``sentences``; without it, the first is a DataError. ``cut`` describes last lines that stop
    short, as an interrupted download leaves them; those never stop a reader.
    """

    skip: bool = False
    count: int = 0
    sentences: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)

    def malformed(self, sentence: str) -> None:
        """Record one malformed row. Raises DataError unless it is to be skipped."""
        if not self.skip:
            raise DataError(sentence)
        self.count += 1
        if len(self.sentences) < LISTED:
            self.sentences.append(sentence)

    def add(self, other: Rejects) -> None:
        """Add what another reader left out of later rows."""
        self.count += other.count
        self.sentences = (self.sentences + other.sentences)[:LISTED]
        self.cut += other.cut


def warn_of_cut(rejects: Rejects) -> None:
    """Warn with one TruncatedLineWarning per last line that stops short."""
    for sentence in rejects.cut:
        warnings.warn(sentence, TruncatedLineWarning, stacklevel=3)
