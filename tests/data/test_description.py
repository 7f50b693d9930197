"""What ``describe`` counts, against plain Python over the same lines."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from criteo_rows import line, real_sample, replaced

from fuselab.data import describe


def test_real_rows_against_plain_python() -> None:
    path = real_sample()
    found = describe(path)
    columns = list(zip(*(text.split("\t") for text in path.read_text().splitlines()), strict=True))
    assert (found.rows, found.positives) == (1999, columns[0].count("1"))
    assert found.label_rate == pytest.approx(columns[0].count("1") / 1999)
    for column, fields in zip(found.counts, columns[1:14], strict=True):
        present = [int(field) for field in fields if field]
        logs = [math.log1p(max(count, 0)) for count in present]
        assert column.missing == fields.count("")
        assert (column.smallest, column.largest) == (min(present), max(present))
        assert column.mean_log == pytest.approx(sum(logs) / len(logs))
    for column, fields in zip(found.ids, columns[14:], strict=True):
        assert column.missing == fields.count("")
        assert column.cardinality == len(set(fields) - {""})
    assert [column.name for column in (*found.counts, *found.ids)][::13] == ["I1", "C1", "C14"]


def test_a_column_that_is_always_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(replaced(2, "") + "\n" + replaced(15, "") + "\n" + line() + "\n")
    found = describe(path)
    assert found.counts[2].missing == 3
    assert found.counts[2].smallest is found.counts[2].largest is found.counts[2].mean_log is None
    assert found.ids[2].cardinality == 0
    assert (found.counts[0].missing, found.ids[0].missing, found.ids[0].cardinality) == (1, 1, 1)
