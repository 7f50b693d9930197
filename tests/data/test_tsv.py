"""The reader: every field as the file has it, and every error with its place."""

from __future__ import annotations

import codecs
import gzip
import re
import warnings
from pathlib import Path

import numpy
import pytest
from criteo_rows import COUNTS, line, real_sample, replaced
from hypothesis import given, settings
from hypothesis import strategies as st

from fuselab.data import MISSING_COUNT, MISSING_ID, TruncatedLineWarning, read, tsv
from fuselab.data.layout import concatenate
from fuselab.data.rejects import Rejects
from fuselab.data.source import Source
from fuselab.errors import DataError


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_every_kind_of_field(tmp_path: Path) -> None:
    (rows,) = read(write(tmp_path / "a.tsv", line("1") + "\n" + line("0") + "\n"))
    assert rows.labels.tolist() == [1, 0]
    expected = [int(count) if count else MISSING_COUNT for count in COUNTS]
    assert rows.counts[0].tolist() == expected == rows.counts[1].tolist()
    assert rows.ids[0, :7].tolist() == [
        0x68FD1E64, 0x80E26C9B, MISSING_ID, 0xFFFFFFFF, 0, 0x7E0CCCCF, 0xDE7995B8,
    ]  # fmt: skip
    assert rows.ids[0, 7:].tolist() == [10] * 19


@pytest.mark.parametrize(
    "count", ["9", "99999999", "100000000", "2147483648", "-2147483649", "9" * 16, "-" + "9" * 16]
)
def test_counts_beyond_one_word(tmp_path: Path, count: str) -> None:
    (rows,) = read(write(tmp_path / "a.tsv", replaced(14, count) + "\n"))
    assert rows.counts[0, 12] == int(count)


def test_real_rows_field_by_field() -> None:
    path = real_sample()
    (rows,) = read(path)
    texts = [text.split("\t") for text in path.read_text().splitlines()]
    assert len(rows) == len(texts) == 1999
    assert rows.labels.tolist() == [int(fields[0]) for fields in texts]
    assert rows.counts.tolist() == [
        [int(field) if field else MISSING_COUNT for field in fields[1:14]] for fields in texts
    ]
    assert rows.ids.tolist() == [
        [int(field, 16) if field else MISSING_ID for field in fields[14:]] for fields in texts
    ]


def test_blocks_and_pieces_of_every_size_give_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(replaced(2, str(number)) + "\n" for number in range(100))
    path = write(tmp_path / "a.tsv", text)
    for block_bytes in (1, 7, len(line()) + 1, 1000, 1 << 20):
        monkeypatch.setattr(tsv, "BLOCK_BYTES", max(block_bytes, 300))
        for size in (1, 3, 50, 99, 100, 101):
            pieces = list(read(path, size))
            assert [len(piece) for piece in pieces[:-1]] == [size] * (len(pieces) - 1)
            counts = numpy.concatenate([piece.counts[:, 0] for piece in pieces])
            assert counts.tolist() == list(range(100))


_COUNT = st.one_of(st.just(""), st.integers(-(10**16) + 1, 10**16 - 1).map(str))
_ID = st.one_of(st.just(""), st.integers(0, 2**32 - 1).map(lambda value: f"{value:x}"))
_ROW = st.tuples(
    st.sampled_from("01"),
    st.lists(_COUNT, min_size=13, max_size=13),
    st.lists(_ID, min_size=26, max_size=26),
)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(_ROW, min_size=1, max_size=12),
    block_bytes=st.integers(1000, 4000),
    size=st.integers(1, 13),
    ending=st.sampled_from(["\n", "\r\n"]),
)
def test_any_rows_read_back_as_python_reads_them(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, list[str], list[str]]],
    block_bytes: int,
    size: int,
    ending: str,
) -> None:
    text = "".join("\t".join((label, *counts, *ids)) + ending for label, counts, ids in rows)
    path = write(tmp_path_factory.mktemp("rows") / "a.tsv", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tsv, "BLOCK_BYTES", block_bytes)
        found = concatenate(list(read(path, size)))
    assert found.labels.tolist() == [int(label) for label, _, _ in rows]
    assert found.counts.tolist() == [
        [int(field) if field else MISSING_COUNT for field in counts] for _, counts, _ in rows
    ]
    assert found.ids.tolist() == [
        [int(field, 16) if field else MISSING_ID for field in ids] for _, _, ids in rows
    ]


def test_crlf_and_gzip_read_the_same(tmp_path: Path) -> None:
    text = (replaced(40, "") + "\n" + line() + "\n").encode()
    (plain,) = read(write(tmp_path / "a.tsv", text))
    (windows,) = read(write(tmp_path / "b.tsv", text.replace(b"\n", b"\r\n")))
    (packed,) = read(write(tmp_path / "c.tsv.gz", gzip.compress(text)))
    for other in (windows, packed):
        assert (other.labels == plain.labels).all()
        assert (other.counts == plain.counts).all()
        assert (other.ids == plain.ids).all()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path: Path, suffix: str) -> None:
    text = codecs.BOM_UTF8 + f"{line('1')}\n{line()}\n{replaced(1, '2')}\n".encode()
    path = write(tmp_path / f"a.tsv{suffix}", gzip.compress(text) if suffix else text)
    rejects = Rejects(skip=True)
    parts = Source.at(path).parts(len(line()))
    assert len(parts) == (1 if suffix else 3)
    found = concatenate([rows for part in parts for rows in part.read(rejects)])
    assert found.labels.tolist() == [1, 0]
    assert rejects.sentences == [f"{path}, line 3, column 1 (label): found '2'; expected 0 or 1."]
    joined = write(tmp_path / "joined.tsv", 2 * (codecs.BOM_UTF8 + f"{line()}\n".encode()))
    with pytest.raises(
        DataError, match=r"joined.tsv, line 2, column 1 \(label\): found '\\ufeff0'"
    ):
        list(read(joined))
    twice = write(tmp_path / "b.tsv", codecs.BOM_UTF8 + text)
    with pytest.raises(DataError, match=r"line 1, column 1 \(label\): found '\\ufeff1'"):
        list(read(twice))


# --- the last line -------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["12345678", ""])
def test_a_whole_last_line_needs_no_break(tmp_path: Path, last: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (rows,) = read(write(tmp_path / "a.tsv", line() + "\n" + replaced(40, last)))
    assert rows.ids[:, 25].tolist() == [10, int(last, 16) if last else MISSING_ID]


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        (line().rsplit("\t", 1)[0], "stops after 39 of 40 columns"),
        ("1", "stops after 1 of 40 columns"),
        ("1\t-", "stops after 2 of 40 columns"),
        (replaced(40, "1234567"), "stops after 7 of 8 digits in its last column"),
    ],
)
def test_a_truncated_last_line_is_left_out_with_one_warning(
    tmp_path: Path, cut: str, says: str
) -> None:
    path = write(tmp_path / "a.tsv", line() + "\n" + line() + "\n" + cut)
    with pytest.warns(TruncatedLineWarning) as caught:
        (rows,) = read(path)
    assert len(rows) == 2
    assert len(caught) == 1
    assert f"{path}, line 3" in str(caught[0].message)
    assert says in str(caught[0].message)


@pytest.mark.filterwarnings("ignore::fuselab.data.TruncatedLineWarning")
@pytest.mark.parametrize("text", ["", "0\t1\t2"])
def test_a_file_without_a_complete_row_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"holds no complete row.*lines of 40"):
        list(read(write(tmp_path / "a.tsv", text)))


# --- malformed lines -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "field", "says"),
    [
        (1, "2", "column 1 (label): found '2'; expected 0 or 1."),
        (1, "", "column 1 (label): found ''; expected 0 or 1."),
        (1, "01", "column 1 (label): found '01'; expected 0 or 1."),
        (2, "1x", "column 2 (I1): found '1x'; expected an integer of at most 16 digits"),
        (2, "-", "column 2 (I1): found '-'; expected an integer"),
        (3, "--1", "column 3 (I2): found '--1'; expected an integer"),
        (14, "1.5", "column 14 (I13): found '1.5'; expected an integer"),
        (14, "a", "column 14 (I13): found 'a'; expected an integer"),
        (14, " 1", "column 14 (I13): found ' 1'; expected an integer"),
        (9, "1" * 17, "column 9 (I8): found '11111111111111111'; expected an integer"),
        (9, "x00000000", "column 9 (I8): found 'x00000000'; expected an integer"),
        (15, "0g", "column 15 (C1): found '0g'; expected a hexadecimal id of at most 8 digits"),
        (40, "-1", "column 40 (C26): found '-1'; expected a hexadecimal id"),
        (39, "123456789", "column 39 (C25): found '123456789'; expected a hexadecimal id"),
        (39, "\x00" * 2, r"column 39 (C25): found '\x00\x00'; expected a hexadecimal id"),
        (20, "é" * 40, "column 20 (C6): found 'éééééééééééééééééééééééééééééééé...'"),
    ],
)  # fmt: skip
def test_a_malformed_field_names_its_place(
    tmp_path: Path, column: int, field: str, says: str
) -> None:
    path = write(tmp_path / "a.tsv", f"{line()}\n{line()}\n{replaced(column, field)}\n{line()}\n")
    with pytest.raises(DataError) as refusal:
        list(read(path))
    assert f"{path}, line 3, {says}" in str(refusal.value)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (line().rsplit("\t", 1)[0], "column 39: 39 columns; expected 40 tab-separated columns"),
        (line() + "\t", "column 41: 41 columns; expected 40 tab-separated columns"),
        (line() + 80 * "\t", "column 41: 120 columns; expected 40 tab-separated columns"),
        ("", "no tab in the line; expected 40 tab-separated columns"),
        (line().replace("\t", ","), "no tab in the line; expected 40 tab-separated columns"),
    ],
)
@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_wrong_number_of_columns_names_the_line(
    tmp_path: Path, bad: str, says: str, before: int
) -> None:
    text = before * (line() + "\n") + bad + "\n" + line() + "\n"
    path = write(tmp_path / "a.tsv", text)
    with pytest.raises(DataError, match=re.escape(f"{path}, line {before + 1}")) as refusal:
        list(read(path))
    assert says in str(refusal.value)
    if before == 0:  # counting reads one line, so that a file in another format ends there
        with pytest.raises(DataError, match=re.escape(says)):
            Source.at(path).count_rows(Rejects())


def test_39_and_41_columns_do_not_make_up_for_each_other(tmp_path: Path) -> None:
    short, long = line().rsplit("\t", 1)[0], line() + "\t"
    path = write(tmp_path / "a.tsv", f"{line()}\n{long}\n{short}\n")
    with pytest.raises(DataError, match="line 2, column 41: 41 columns"):
        list(read(path))


def test_faults_of_every_kind_come_in_the_order_of_their_lines(tmp_path: Path) -> None:
    """A field of the first line is found behind the columns of the third, and named before."""
    text = [replaced(20, "x"), line(), line() + "\t", "", replaced(3, "x"), line("1"), line("2")]
    path = write(tmp_path / "a.tsv", "".join(each + "\n" for each in text))
    rejects = Rejects(skip=True)
    (rows,) = Source.at(path).read(rejects=rejects)
    assert rows.labels.tolist() == [0, 1]
    said = [sentence.removeprefix(f"{path}, line ") for sentence in rejects.sentences]
    starts = ("1, column 20 (C6)", "3, column 41", "4: no tab", "5, column 3 (I2)", "7, column 1 (")
    assert len(said) == len(starts)
    assert all(map(str.startswith, said, starts)), said
    with pytest.raises(DataError, match=r"line 1, column 20 \(C6\)"):
        list(read(path))


def test_line_numbers_go_on_from_block_to_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tsv, "BLOCK_BYTES", 1000)
    path = write(tmp_path / "a.tsv", 99 * (line() + "\n") + replaced(5, "x") + "\n")
    with pytest.raises(DataError, match=r"line 100, column 5 \(I4\): found 'x'"):
        list(read(path))


def test_a_line_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tsv, "BLOCK_BYTES", 1000)
    with pytest.raises(DataError, match="line 1: no line break in"):
        list(read(write(tmp_path / "a.tsv", "0" * 10_000)))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file '.*gone.tsv'"):
        list(read(tmp_path / "gone.tsv"))
    with pytest.raises(DataError, match="is a folder"):
        list(read(tmp_path))
    whole = gzip.compress((100 * (line() + "\n")).encode())
    for broken in (whole[:-20], b"plain text"):
        with pytest.raises(DataError, match="is not a whole gzip file"):
            list(read(write(tmp_path / "a.gz", broken)))
