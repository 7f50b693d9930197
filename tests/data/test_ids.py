"""Ids to indices, and the files that say how: the field's JSON and the compact form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from fuselab.data import KAGGLE_CARDINALITIES, Modulus, Vocabulary
from fuselab.data.metadata import (
    Metadata,
    load_metadata,
    load_vocabulary,
    save_metadata,
    save_vocabulary,
)
from fuselab.errors import ArgumentError, DataError


def every_column(*ids: int) -> numpy.ndarray:
    return numpy.tile(numpy.array(ids, dtype=numpy.int64)[:, None], 26)


def test_the_modulus_sends_missing_to_0_and_wraps() -> None:
    found = Modulus((10,) * 26).indices(every_column(-1, 0, 8, 9, 2**32 - 1))
    assert found[:, 25].tolist() == [0, 1, 9, 0, 2**32 % 10]


def test_capped_tables() -> None:
    assert Modulus.capped(1000).cardinalities == tuple(min(n, 1000) for n in KAGGLE_CARDINALITIES)


def test_a_vocabulary_has_one_slot_for_all_it_does_not_know() -> None:
    values = [numpy.array([-1, 5, 9])] * 25 + [numpy.array([], dtype=numpy.int64)]
    vocabulary = Vocabulary(values)
    assert vocabulary.cardinalities == (4,) * 25 + (1,)
    found = vocabulary.indices(every_column(-1, 5, 9, 0, 6, 10, -2))
    assert found[:, 0].tolist() == [0, 1, 2, 3, 3, 3, 3]
    assert found[:, 25].tolist() == [0] * 7


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Modulus((1, 2)), "there are 2 cardinalities; expected one for each of the 26"),
        (lambda: Modulus((0,) * 26), "the cardinality of C1 is 0; expected 1 to 2147483647"),
        (lambda: Modulus((2**31,) * 26), "the cardinality of C1 is 2147483648"),
        (lambda: Vocabulary([numpy.array([2, 2])] * 26), "C1 is not strictly increasing"),
    ],
)
def test_tables_that_cannot_be_are_refused(make, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        make()


def vocabulary() -> Vocabulary:
    some = numpy.random.default_rng(0)
    columns = [numpy.unique(some.integers(-1, 2**32, size)) for size in range(24)]
    return Vocabulary([*columns, numpy.array([-1]), numpy.array([-(2**40), 2**40])])


@pytest.mark.parametrize("name", ["vocabulary.npz", "metadata.json"])
def test_both_forms_of_a_vocabulary_load_as_they_were(tmp_path: Path, name: str) -> None:
    path, saved = tmp_path / name, vocabulary()
    if name.endswith(".npz"):
        save_vocabulary(path, saved)
    else:
        save_metadata(path, Metadata(saved))
    loaded = load_metadata(path).ids
    assert isinstance(loaded, Vocabulary)
    for found, wanted in zip(loaded.values, saved.values, strict=True):
        assert found.tolist() == wanted.tolist()


def test_the_compact_form_is_compact(tmp_path: Path) -> None:
    ids = numpy.unique(numpy.random.default_rng(1).integers(0, 2**32, 200_000))
    dense = [ids, *[numpy.array([0])] * 25]
    save_vocabulary(tmp_path / "a.npz", Vocabulary(dense))
    save_metadata(tmp_path / "a.json", Metadata(Vocabulary(dense)))
    compact, text = ((tmp_path / name).stat().st_size for name in ("a.npz", "a.json"))
    assert compact < 3 * len(ids) < text / 4


def test_the_fields_json_as_it_is_written_elsewhere(tmp_path: Path) -> None:
    columns = {
        f"SPARSE_{c}": {"cardinality": c + 1, "tokenizer_values": [*range(c + 1)]}
        for c in range(26)
    }
    dense = {f"DENSE_{c}": {"mean": c + 0.5, "std": 2} for c in range(13)}
    path = tmp_path / "metadata.json"
    path.write_text(json.dumps({**columns, **dense, "labels": {"mean": 0.25}}))
    found = load_metadata(path)
    assert isinstance(found.ids, Vocabulary)
    assert found.ids.cardinalities == tuple(range(2, 28))
    assert found.dense is not None
    assert found.dense[3] == (3.5, 2.0)
    assert found.labels == {"mean": 0.25}
    path.write_text(json.dumps({name: {"cardinality": 7} for name in columns}))
    assert load_metadata(path).ids == Modulus((7,) * 26)
    save_metadata(path, load_metadata(path))
    assert load_metadata(path).ids == Modulus((7,) * 26)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SPARSE_3": None}, "has no 'SPARSE_3' with an integer 'cardinality'"),
        ({"SPARSE_3": {"cardinality": 2, "tokenizer_values": [1]}}, "1 'tokenizer_values' for a"),
        ({"SPARSE_3": {"cardinality": 2, "tokenizer_values": [2, 1]}}, "not sorted and distinct"),
        ({"SPARSE_3": {"cardinality": True}}, "has no 'SPARSE_3' with an integer 'cardinality'"),
        ({"SPARSE_3": {"cardinality": 1, "tokenizer_values": ["a"]}}, "not a list of 64-bit int"),
        ({"SPARSE_3": {"cardinality": 1, "tokenizer_values": [2**63]}}, "not a list of 64-bit int"),
        ({"SPARSE_3": {"cardinality": 1}}, "'tokenizer_values' for some columns only"),
        ({"DENSE_0": {"mean": 1.0}}, "expected 'mean' and 'std' of all of DENSE_0 to DENSE_12"),
    ],
)
def test_metadata_that_is_not_whole_is_refused(tmp_path: Path, change, says: str) -> None:
    columns = {f"SPARSE_{c}": {"cardinality": 1, "tokenizer_values": [4]} for c in range(26)}
    path = tmp_path / "metadata.json"
    path.write_text(json.dumps({**columns, **change}))
    with pytest.raises(DataError, match=says):
        load_metadata(path)


def test_files_that_are_no_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("{", "[]", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(DataError, match=r"a\.json"):
            load_metadata(path)
    (tmp_path / "a.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match="not a whole compact vocabulary"):
        load_vocabulary(tmp_path / "a.npz")
    for steps in (["a"], [1.5], 3):
        numpy.savez(tmp_path / "b.npz", **{f"C{column}": steps for column in range(1, 27)})
        with pytest.raises(DataError, match="a column is not a list of integers"):
            load_vocabulary(tmp_path / "b.npz")
    for name in ("gone.json", "gone.npz"):
        with pytest.raises(DataError, match=f"no file '.*{name}'"):
            load_metadata(tmp_path / name)
