"""What a reader does with rows that are malformed: stop at the first, or leave out and list."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from fuselab.errors import DataError

LISTED = 100


class TruncatedLineWarning(UserWarning):
    """The file's last line stops short; it was left out."""


@dataclass
class Rejects:
    """With ``skip``, ``count`` malformed rows were left out, the first LISTED of them in
    ``sentences``; without it the first is a DataError. ``cut`` are sentences about last lines that
    stop short, as an interrupted download leaves them: those never stop a reader."""

    skip: bool = False
    count: int = 0
    sentences: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)

    def malformed(self, sentence: str) -> None:
        """One row. Raises DataError unless it is to be skipped."""
        if not self.skip:
            raise DataError(sentence)
        self.count += 1
        if len(self.sentences) < LISTED:
            self.sentences.append(sentence)

    def add(self, other: Rejects) -> None:
        """What another reader left out of the rows behind."""
        self.count += other.count
        self.sentences = (self.sentences + other.sentences)[:LISTED]
        self.cut += other.cut


def warn_of_cut(rejects: Rejects) -> None:
    """One TruncatedLineWarning per last line that stops short."""
    for sentence in rejects.cut:
        warnings.warn(sentence, TruncatedLineWarning, stacklevel=3)
