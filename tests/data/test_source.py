"""Every format and every way to name files gives the same rows; what is malformed has a place."""

from __future__ import annotations

import errno
import gzip
import math
import re
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from criteo_rows import line, replaced

from fuselab.data import MISSING_COUNT, open_dataset, pieces, synthesize, tsv
from fuselab.data.layout import MISSING_LABEL, Rows, concatenate
from fuselab.data.records import RECORD
from fuselab.data.rejects import LISTED, Rejects
from fuselab.data.source import Source
from fuselab.errors import DataError, OutputError

ROWS = 700


@pytest.fixture(scope="module")
def drawn() -> Rows:
    return concatenate(list(pieces(ROWS, seed=2)))


def same(found: Rows, wanted: Rows) -> None:
    assert found.labels.tolist() == wanted.labels.tolist()
    assert numpy.array_equal(found.counts, wanted.counts)
    assert numpy.array_equal(found.ids, wanted.ids)


def whole(path: Path | str, rejects: Rejects | None = None) -> Rows:
    return concatenate(list(Source.at(path).read(64, rejects)))


def without_missing(rows: Rows) -> Rows:
    """As formats that write 0 for a missing count give them back."""
    return Rows(rows.labels, numpy.where(rows.counts == MISSING_COUNT, 0, rows.counts), rows.ids)


def save_npz(path: Path, rows: Rows, **changes: numpy.ndarray) -> Path:
    """As the original DLRM does: X_cat is float64, and written column by column."""
    arrays = {
        "X_cat": numpy.transpose(numpy.ascontiguousarray(rows.ids.T.astype(numpy.float64))),
        "X_int": rows.counts.astype(numpy.int32),
        "y": rows.labels.astype(numpy.int32),
        "counts": numpy.arange(26),
    }
    arrays.update(changes)
    numpy.savez_compressed(path, **{name: a for name, a in arrays.items() if a is not None})
    return path


# --- formats -------------------------------------------------------------------------------------


def test_parquet(tmp_path: Path, drawn: Rows) -> None:
    synthesize(tmp_path / "a.parquet", ROWS, seed=2)
    found = whole(tmp_path / "a.parquet")
    assert found.counts.dtype == numpy.float32
    same(found, without_missing(drawn))


def test_parquet_of_another_hand(tmp_path: Path) -> None:
    columns = {
        "extra": ["x", "y"],
        **{f"SPARSE_{c}": pyarrow.array([c, None], pyarrow.int32()) for c in range(26)},
        **{f"DENSE_{c}": pyarrow.array([c + 0.5, None], pyarrow.float64()) for c in range(13)},
        "labels": pyarrow.array([1.0, 0.0]),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    found = whole(tmp_path / "a.parquet")
    assert found.labels.tolist() == [1, 0]
    assert found.counts[0].tolist() == [c + 0.5 for c in range(13)]
    assert numpy.isnan(found.counts[1]).all()
    assert found.ids.tolist() == [[*range(26)], [-1] * 26]


def test_the_originals_npz(tmp_path: Path, drawn: Rows) -> None:
    wanted = without_missing(drawn)
    same(whole(save_npz(tmp_path / "a.npz", wanted)), wanted)
    by_row = {"X_cat": wanted.ids.astype(numpy.int64)}
    same(whole(save_npz(tmp_path / "b.npz", wanted, **by_row)), wanted)


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz", ".parquet", ".npz"])
def test_parts_end_to_end_are_the_file(tmp_path: Path, drawn: Rows, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".npz":
        save_npz(path, without_missing(drawn))
    else:
        synthesize(path, ROWS, seed=2)
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(path), path, row_group_size=100)
    source = Source.at(path)
    assert source.count_rows(Rejects()) == (ROWS,)
    for part_bytes in (1, 300, 30_000, 1 << 30):
        parts = source.parts(part_bytes)
        if suffix == ".tsv" and part_bytes == 1:
            assert len(parts) == ROWS
        if suffix == ".parquet":
            assert (
                len(parts) == {1: 7, 300: 7, 30_000: parts and len(parts), 1 << 30: 1}[part_bytes]
            )
        found = concatenate([piece for part in parts for piece in part.read(Rejects())])
        same(found, whole(path))


def without_labels(folder: Path, suffix: str) -> Path:
    """ROWS rows of seed 2 without their labels."""
    path = folder / f"a{suffix}"
    if suffix == ".npz":
        return save_npz(path, without_missing(concatenate(list(pieces(ROWS, seed=2)))), y=None)
    if suffix == ".parquet":
        synthesize(path, ROWS, seed=2)
        labelled = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(labelled.drop_columns(["labels"]), path)
        return path
    synthesize(folder / "labelled", ROWS, seed=2)
    lines = (folder / "labelled").read_bytes().splitlines(keepends=True)
    text = b"".join(each.split(b"\t", 1)[1] for each in lines)
    path.write_bytes(gzip.compress(text) if suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".gz", ".parquet", ".npz"])
def test_rows_without_labels(tmp_path: Path, drawn: Rows, suffix: str) -> None:
    path = without_labels(tmp_path, suffix)
    expected = drawn if suffix in (".txt", ".gz") else without_missing(drawn)
    source = Source.at(path, labels_required=False)
    assert source.count_rows(Rejects()) == (ROWS,)
    found = concatenate(list(source.read()))
    same(found, Rows(numpy.full(ROWS, MISSING_LABEL), expected.counts, expected.ids))
    data = open_dataset(path, labels_required=False)
    records = numpy.empty(ROWS, RECORD)
    data.open_reader().read_into(records, 0)
    assert numpy.isnan(records["label"]).all()
    for required in (lambda: whole(path), lambda: open_dataset(path)):
        with pytest.raises(
            DataError, match=r"expected .* without a label are for 'fuselab predict"
        ):
            required()


def test_a_folder_may_hold_labelled_and_other_files(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_text(line("1") + "\n")
    (tmp_path / "day_1").write_text(line().split("\t", 1)[1] + "\n" + "x" + line()[1:] + "\n")
    source = Source.at(tmp_path, labels_required=False)
    says = r"day_1, line 2, column 40: 40 columns; expected 39 tab-separated columns \(13 integers"
    with pytest.raises(DataError, match=says):
        list(source.read())
    (tmp_path / "day_1").write_text(line().split("\t", 1)[1] + "\n")
    assert concatenate(list(source.read())).labels.tolist() == [1, MISSING_LABEL]
    (tmp_path / "day_1").write_text(replaced(15, "y").split("\t", 1)[1] + "\n")
    with pytest.raises(
        DataError, match=r"day_1, line 1, column 14 \(C1\): found 'y'; expected a h"
    ):
        list(source.read())


# --- files, folders, globs -----------------------------------------------------------------------


def test_a_folder_and_a_glob_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for day in (10, 2, 1):
        (tmp_path / f"day_{day}").write_text(replaced(2, str(day)) + "\n")
    packed = gzip.compress((replaced(2, "3") + "\n").encode())
    (tmp_path / "day_3.gz").write_bytes(packed)
    for name in ("readme.md", "_SUCCESS", ".hidden"):
        (tmp_path / name).write_text("not rows")
    for path in (tmp_path, f"{tmp_path}/day_*"):
        assert whole(path).counts[:, 0].tolist() == [1, 2, 3, 10]
    assert whole(f"{tmp_path}/day_?").counts[:, 0].tolist() == [1, 2]


def test_a_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    (tmp_path / "day[1]").write_text(line() + "\n")
    assert len(whole(tmp_path / "day[1]")) == 1


def test_names_that_do_not_lead_to_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder without data files"):
        Source.at(tmp_path)
    with pytest.raises(DataError, match=r"no file matches '.*day_\*'"):
        Source.at(tmp_path / "day_*")
    with pytest.raises(DataError, match=r"no file '.*gone'"):
        whole(tmp_path / "gone")
    with pytest.raises(DataError, match="'/dev/null' is a pipe or a device"):
        Source.at("/dev/null")
    for suffix in (".parquet", ".npz"):
        with pytest.raises(DataError, match=r"no file '.*gone"):
            whole(tmp_path / f"gone{suffix}")
    (tmp_path / "day_0").write_text(line() + "\n")
    (tmp_path / "day_0.gz").write_bytes(gzip.compress(line().encode() + b"\n"))
    with pytest.raises(DataError, match="day_0 plain and gzipped: the same rows twice"):
        Source.at(tmp_path)
    (tmp_path / "day_1.npz").write_bytes(b"")
    with pytest.raises(DataError, match="holds files of several formats"):
        Source.at(tmp_path)


def test_an_empty_file_among_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_text(line() + "\n")
    (tmp_path / "day_1").write_text("")
    with pytest.raises(DataError, match="day_1 holds no complete row"):
        whole(tmp_path)


# --- malformed rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [(0,), (99,), (0, 1, 2), (7, 8, 50, 98, 99), tuple(range(99))])
@pytest.mark.parametrize("block_bytes", [1000, 1 << 20])
def test_skipped_rows_are_counted_and_listed_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...], block_bytes: int
) -> None:
    monkeypatch.setattr(tsv, "BLOCK_BYTES", block_bytes)
    lines = [replaced(2, "x" if number in bad else str(number)) for number in range(100)]
    path = tmp_path / "a.tsv"
    path.write_text("".join(text + "\n" for text in lines))
    rejects = Rejects(skip=True)
    found = whole(path, rejects)
    assert found.counts[:, 0].tolist() == [n for n in range(100) if n not in bad]
    assert rejects.count == len(bad)
    places = [int(re.search(r"line (\d+)", text)[1]) - 1 for text in rejects.sentences]
    assert tuple(places) == bad[:LISTED]
    assert "column 2 (I1): found 'x'; expected an integer" in rejects.sentences[0]


def test_lines_are_numbered_from_the_files_beginning_in_every_part(tmp_path: Path) -> None:
    lines = [replaced(2, "x" if number % 30 == 29 else "1") for number in range(100)]
    path = tmp_path / "a.tsv"
    path.write_text("".join(text + "\n" for text in lines))
    rejects = Rejects(skip=True)
    for part in Source.at(path).parts(1000):
        for _ in part.read(rejects):
            pass
    lines_named = [text.split(",")[1] for text in rejects.sentences]
    assert lines_named == [" line 30", " line 60", " line 90"]
    with pytest.raises(DataError, match="line 90, column 2"):
        for part in Source.at(path).parts(1000)[-4:]:
            list(part.read(Rejects()))


def test_a_file_of_malformed_rows_alone_gives_none(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a,b\n" * 150)
    rejects = Rejects(skip=True)
    assert sum(map(len, Source.at(tmp_path / "a.tsv").read(64, rejects))) == 0
    assert (rejects.count, len(rejects.sentences)) == (150, LISTED)
    with pytest.raises(DataError, match=r"a\.tsv, line 1: no tab in the line"):
        whole(tmp_path / "a.tsv")


def parquet_with(path: Path, **changes: pyarrow.Array | None) -> Path:
    columns = {
        "labels": pyarrow.array([1, 0, 1]),
        **{f"DENSE_{c}": pyarrow.array([0.0] * 3) for c in range(13)},
        **{f"SPARSE_{c}": pyarrow.array([1, 2, 3]) for c in range(26)},
        **changes,
    }
    kept = {name: column for name, column in columns.items() if column is not None}
    pyarrow.parquet.write_table(pyarrow.table(kept), path)
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"DENSE_12": None}, "has no column 'DENSE_12'; expected labels, DENSE_0 to DENSE_12"),
        ({"labels": pyarrow.array([0, 2, 1])}, "row 2, column 'labels': found 2; expected 0 or 1"),
        ({"labels": pyarrow.array([0, 1, None])}, "row 3, column 'labels': found nothing; expect"),
        ({"labels": pyarrow.array([0, -1, 1])}, "row 2, column 'labels': found -1; expected 0 or"),
        ({"labels": pyarrow.array([math.nan, 0, 1])}, "row 1, column 'labels': found nothing;"),
        ({"SPARSE_4": pyarrow.array(["a"] * 3)}, "'SPARSE_4': found string; expected integers"),
        ({"SPARSE_4": pyarrow.array([0.5] * 3)}, "'SPARSE_4': found double; expected integers"),
        ({"DENSE_4": pyarrow.array(["a"] * 3)}, "'DENSE_4': found string; expected numbers"),
        ({"DENSE_4": pyarrow.array([0, 1, -math.inf])}, "row 3, column 'DENSE_4': found -inf"),
    ],
)
def test_parquet_that_is_not_this_layout(tmp_path: Path, changes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        whole(parquet_with(tmp_path / "a.parquet", **changes))


def test_malformed_parquet_rows_can_be_skipped(tmp_path: Path) -> None:
    infinite = {name: pyarrow.array([0.0, math.inf, math.inf]) for name in ("DENSE_0", "DENSE_1")}
    path = parquet_with(tmp_path / "a.parquet", labels=pyarrow.array([0, 7, 1]), **infinite)
    rejects = Rejects(skip=True)
    assert whole(path, rejects).ids[:, 0].tolist() == [1]
    assert rejects.count == 2
    assert ["row 2" in rejects.sentences[0], "row 3" in rejects.sentences[1]] == [True, True]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"X_int": None}, "has no array 'X_int'; expected X_int, X_cat and y"),
        ({"X_int": numpy.zeros((3, 12))}, r"'X_int' has shape \(3, 12\); expected \(3, 13\)"),
        ({"X_cat": numpy.zeros((2, 26))}, r"'X_cat' has shape \(2, 26\); expected \(3, 26\)"),
        ({"y": numpy.array([0, 1, 2])}, r"row 3, column 1 \(label\): found 2; expected 0 or 1"),
        ({"y": numpy.array([0, -1, 1])}, r"row 2, column 1 \(label\): found -1; expected 0 or 1"),
        ({"y": numpy.array([0, 1, math.nan])}, r"row 3, column 1 \(label\): found nan; expected"),
        ({"X_cat": numpy.full((3, 26), 0.5)}, r"row 1, column 15 \(C1\): found 0.5; expected an"),
        ({"y": numpy.array(["a", "b", "c"])}, "holds an array of <U1; expected numbers"),
    ],
)
def test_npz_that_is_not_the_originals(tmp_path: Path, drawn: Rows, changes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        whole(save_npz(tmp_path / "a.npz", without_missing(drawn[:3]), **changes))


def test_files_that_were_cut(tmp_path: Path, drawn: Rows) -> None:
    synthesize(tmp_path / "a.parquet", 50)
    save_npz(tmp_path / "a.npz", without_missing(drawn))
    for name, says in (("a.parquet", "not a whole parquet file"), ("a.npz", "not a whole .npz")):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(DataError, match=says):
            whole(path)
    for name in ("empty.parquet", "empty.npz"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DataError, match="not a whole"):
            whole(tmp_path / name)


def test_no_room_to_unpack_an_npz(
    tmp_path: Path, drawn: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OutputError, match="set TMPDIR to a folder with more space"):
        whole(save_npz(tmp_path / "a.npz", without_missing(drawn)))


def test_an_npz_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "a.npz").write_bytes(b"")
    monkeypatch.setattr("zipfile.ZipFile", refuse)
    with pytest.raises(DataError, match=r"a\.npz cannot be read: Permission denied\."):
        whole(tmp_path / "a.npz")


@pytest.mark.filterwarnings("ignore::fuselab.data.TruncatedLineWarning")
def test_a_file_without_a_row_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("0\t1")
    with pytest.raises(DataError, match=r"a\.tsv holds no complete row"):
        open_dataset(tmp_path / "a.tsv")


def test_rows_are_counted_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    last = replaced(40, "12345678")
    for text in (last, line() + "\n", line() + "\n" + last, line() + "\r\n0\t1"):
        path.write_text(text, newline="")
        counting, reading = Rejects(), Rejects()
        assert Source.at(path).count_rows(counting) == (len(whole(path, reading)),)
        assert counting.cut == reading.cut
        assert len(reading.cut) == text.endswith("\t1")


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses root nothing, so what asks it is made to say so."""
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(DataError, match="may not be read"):
        Source.at(tmp_path)
