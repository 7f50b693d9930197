"""Vocabularies, cardinalities and dense statistics in files: the usual JSON, and a compact form.

The JSON is ``{"SPARSE_0": {"cardinality": n, "tokenizer_values": [sorted distinct ids]}, ...,
"DENSE_0": {"mean": m, "std": s}, ..., "labels": ...}``; ``tokenizer_values``, the dense columns and
the labels may be missing. It takes about 12 bytes per id. The compact form (.npz) stores the
differences between consecutive ids, 1 to 3 bytes each.
"""

from __future__ import annotations

import itertools
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from fuselab.data.ids import Modulus, Vocabulary
from fuselab.data.layout import DENSE_COLUMNS, SPARSE_COLUMNS
from fuselab.errors import DataError, MissingDataError
from fuselab.report.files import replacing, write_json


@dataclass(frozen=True)
class Metadata:
    """The contents of a metadata file.

    ``ids`` is a Vocabulary if the file has one, otherwise a Modulus by its cardinalities. ``dense``
    are mean and standard deviation of the 13 count columns, or None.
    """

    ids: Modulus | Vocabulary
    dense: tuple[tuple[float, float], ...] | None = None
    labels: Any = None


def load_metadata(path: str | Path) -> Metadata:
    """Load either form; a name that ends in ``.npz`` is compact. Raises DataError."""
    path = Path(path)
    if not os.path.exists(path):
        raise MissingDataError(
            f"no file '{path}'; give metadata (.json, .npz) or a prepared folder."
        )
    if path.suffix == ".npz":
        return Metadata(load_vocabulary(path))
    try:
        columns = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(columns, dict):
        raise DataError(f"{path} holds no JSON object; expected the keys SPARSE_0 to SPARSE_25.")
    sparse = [_sparse(path, columns, f"SPARSE_{column}") for column in range(SPARSE_COLUMNS)]
    values = [values for _, values in sparse if values is not None]
    ids: Modulus | Vocabulary
    if not values:
        ids = Modulus(tuple(cardinality for cardinality, _ in sparse))
    elif len(values) == SPARSE_COLUMNS:
        ids = Vocabulary(values)
    else:
        raise DataError(f"{path} has 'tokenizer_values' for some columns only; expected all.")
    return Metadata(ids, _dense(path, columns), columns.get("labels"))


def save_metadata(path: str | Path, metadata: Metadata) -> None:
    """Save the JSON form. Raises OutputError."""
    sparse: dict[str, Any] = {}
    if isinstance(metadata.ids, Vocabulary):
        for column, values in enumerate(metadata.ids.values):
            sparse[f"SPARSE_{column}"] = {
                "cardinality": len(values),
                "tokenizer_values": values.tolist(),
            }
    else:
        for column, cardinality in enumerate(metadata.ids.cardinalities):
            sparse[f"SPARSE_{column}"] = {"cardinality": cardinality}
    dense = {
        f"DENSE_{column}": {"mean": mean, "std": std}
        for column, (mean, std) in enumerate(metadata.dense or ())
    }
    labels = {} if metadata.labels is None else {"labels": metadata.labels}
    write_json(path, {**sparse, **dense, **labels})


def save_vocabulary(path: str | Path, vocabulary: Vocabulary) -> None:
    """Save the compact form. Raises OutputError."""
    steps: dict[str, Any] = {}
    for column, values in enumerate(vocabulary.values, 1):
        # Starting from -1, the missing id, no difference is negative.
        apart = numpy.diff(values, prepend=-1)
        lowest, highest = int(apart.min(initial=0)), int(apart.max(initial=0))
        small = numpy.min_scalar_type(highest) if lowest >= 0 else numpy.int64
        steps[f"C{column}"] = apart.astype(small)
    with replacing(path) as temporary, temporary.open("wb") as file:
        numpy.savez_compressed(file, **steps)


def load_vocabulary(path: str | Path) -> Vocabulary:
    """Load a vocabulary that ``save_vocabulary`` wrote. Raises DataError."""
    try:
        with numpy.load(path) as steps:
            columns = [steps[f"C{column}"] for column in range(1, SPARSE_COLUMNS + 1)]
        if any(column.ndim != 1 or column.dtype.kind not in "iu" for column in columns):
            raise ValueError("a column is not a list of integers")
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a whole compact vocabulary ({error}).") from error
    return Vocabulary([numpy.cumsum(column, dtype=numpy.int64) - 1 for column in columns])


def _sparse(
    path: Path, columns: Mapping[str, Any], name: str
) -> tuple[int, numpy.typing.NDArray[numpy.int64] | None]:
    column = columns.get(name)
    if not isinstance(column, dict) or type(column.get("cardinality")) is not int:
        raise DataError(f"{path} has no '{name}' with an integer 'cardinality'.")
    cardinality = column["cardinality"]
    listed = column.get("tokenizer_values")
    if listed is None:
        return cardinality, None
    if not isinstance(listed, list) or not all(
        type(value) is int and value.bit_length() < 64 for value in listed
    ):
        raise DataError(f"{path}, '{name}': 'tokenizer_values' is not a list of 64-bit integers.")
    if len(listed) != cardinality:
        raise DataError(
            f"{path}, '{name}': {len(listed)} 'tokenizer_values' for a cardinality of "
            f"{cardinality}; expected as many."
        )
    if any(left >= right for left, right in itertools.pairwise(listed)):
        raise DataError(f"{path}, '{name}': 'tokenizer_values' are not sorted and distinct.")
    return cardinality, numpy.array(listed, dtype=numpy.int64)


def _dense(path: Path, columns: Mapping[str, Any]) -> tuple[tuple[float, float], ...] | None:
    found = [columns.get(f"DENSE_{column}") for column in range(DENSE_COLUMNS)]
    if not any(found):
        return None
    try:
        return tuple((float(each["mean"]), float(each["std"])) for each in found)  # type: ignore[index]
    except (TypeError, KeyError, ValueError):
        raise DataError(
            f"{path}: expected 'mean' and 'std' of all of DENSE_0 to DENSE_12, or of none."
        ) from None
