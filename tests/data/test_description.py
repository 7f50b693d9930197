"""What ``describe`` counts, against plain Python over the same lines."""

from __future__ import annotations

import errno
import math
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
from criteo_rows import line, real_sample, replaced

from fuselab.data import Modulus, describe, synthesize
from fuselab.data.layout import MISSING_ID, concatenate
from fuselab.data.source import Source
from fuselab.data.survey import Survey
from fuselab.errors import DataError, OutputError


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


@pytest.mark.parametrize("largest_table", [1, 50, 10**9])
def test_collisions_and_skew_against_plain_python(tmp_path: Path, largest_table: int) -> None:
    path = tmp_path / "a.tsv"
    synthesize(path, 2000, seed=8)
    rows = concatenate(list(Source.at(path).read()))
    modulus = Modulus.capped(largest_table)
    found = describe(path, modulus=modulus)
    for column, (described, table) in enumerate(zip(found.ids, modulus.cardinalities, strict=True)):
        ids = rows.ids[:, column].tolist()
        load = Counter((value + 1) % table for value in ids)
        owners = Counter((value + 1) % table for value in set(ids))
        present = Counter(value for value in ids if value != MISSING_ID)
        assert described.table == table
        assert described.slots == len(load)
        assert described.colliding == sum(owners[(value + 1) % table] > 1 for value in present)
        assert described.fullest_share == pytest.approx(max(load.values()) / 2000)
        assert described.top_share == pytest.approx(max(present.values()) / 2000)
        assert described.skew == pytest.approx(max(load.values()) / (2000 / len(load)))


def test_parts_of_any_size_add_up(tmp_path: Path) -> None:
    synthesize(tmp_path / "a.tsv", 3000)
    synthesize(tmp_path / "a.parquet", 3000)
    whole = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(whole, tmp_path / "b.parquet", row_group_size=7)
    text, one, many = (describe(tmp_path / name) for name in ("a.tsv", "a.parquet", "b.parquet"))
    assert text.ids == one.ids == many.ids
    for column, other in zip(one.counts, many.counts, strict=True):
        assert (column.smallest, column.largest, column.missing) == (
            other.smallest, other.largest, other.missing,
        )  # fmt: skip
        for mine, others in ((column.mean, other.mean), (column.std, other.std)):
            assert mine == pytest.approx(others, rel=1e-9)


def test_full_temporary_files_name_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.tsv").write_text(line() + "\n")
    monkeypatch.setattr(Survey, "save", full)
    with pytest.raises(OutputError, match=r"the disk is full.*TMPDIR"):
        describe(tmp_path / "a.tsv")
    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    with pytest.raises(OutputError, match=r"No space left on device.*TMPDIR"):
        describe(tmp_path / "a.tsv")


def test_malformed_rows_are_counted_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(f"{line()}\n{replaced(1, '2')}\n{line()}\n0\t1")
    with pytest.raises(DataError, match="line 2, column 1"):
        describe(path)
    found = describe(path, skip_malformed=True)
    assert (found.rows, found.rejected) == (2, 1)
    assert ["line 2" in found.left_out[0], "line 4" in found.left_out[1]] == [True, True]
    path.write_text("x\n")
    with pytest.raises(DataError, match="holds no complete row"):
        describe(path, skip_malformed=True)
