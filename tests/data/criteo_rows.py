"""Lines of Criteo TSV made by hand, and the real sample where there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

COUNTS = ("1", "-2", "", "0", "1382", "4", "15", "2", "181", "1", "2", "", "2")
IDS = ("68fd1e64", "80e26c9b", "", "FFFFFFFF", "00000000", "7e0ccccf", "de7995b8", *19 * ("a",))


def line(label: str = "0", counts: tuple[str, ...] = COUNTS, ids: tuple[str, ...] = IDS) -> str:
    """One line without its break."""
    return "\t".join((label, *counts, *ids))


def replaced(column: int, field: str) -> str:
    """A good line with the field of a 1-based column exchanged."""
    fields = line().split("\t")
    fields[column - 1] = field
    return "\t".join(fields)


def real_sample() -> Path:
    """1,999 real rows; skips the test where they are not."""
    beside = Path(__file__).parents[3] / "shared" / "data" / "criteo" / "kaggle_sample_2k.tsv"
    path = Path(os.environ.get("FUSELAB_CRITEO_SAMPLE", beside))
    if not path.is_file():
        pytest.skip("no real Criteo rows here; FUSELAB_CRITEO_SAMPLE names a file of them")
    return path
