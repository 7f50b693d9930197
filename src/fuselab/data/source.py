"""What lies at a path: one file, the files of a folder or of a glob; one way to read them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuselab.data import tsv
from fuselab.data.layout import Rows


@dataclass(frozen=True)
class Source:
    """Files of rows, read one after the other."""

    files: tuple[Path, ...]

    @classmethod
    def at(cls, path: str | Path) -> Source:
        return cls((Path(path),))

    def read(self, rows: int = 16_384) -> Iterator[Rows]:
        """Yields all rows in order, at most ``rows`` at a time."""
        for file in self.files:
            yield from tsv.read(file, rows)

    def count_rows(self) -> tuple[int, ...]:
        """Rows of each file."""
        return tuple(sum(map(len, tsv.read(file))) for file in self.files)
